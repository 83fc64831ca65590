"""Processes compute or train one model. `tests/ranks.py` starts them; each calls `main`."""

from pathlib import Path

import torch
from torch import distributed

from tests.layers import divided_layers, divided_training

CHECKS = {2: divided_layers.check, 4: divided_training.on_four, 8: divided_training.on_eight}


def main(rank, count, folder):
    folder = Path(folder)
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
    CHECKS[count](folder)
    distributed.destroy_process_group()
    (folder / f"done {rank}").touch()
