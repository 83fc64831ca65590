"""A decoder whose tokens are divided among processes, trained beside one process."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

import torch

from precondattn.layers.torch import divide_tokens


def test_training_on_data_and_context_gives_the_losses_of_one_process(tmp_path):
    command = [sys.executable, "-m", "tests.layers.divided_process"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], env=environment) for rank in range(4)
    ]
    try:
        assert [worker.wait(timeout=600) for worker in workers] == [0] * 4
    finally:
        for worker in workers:
            worker.kill()
    assert all((tmp_path / f"done {rank}").exists() for rank in range(4))


def test_a_model_without_attention_is_refused():
    with pytest.raises(ValueError, match="model has no Attention; found Linear"):
        divide_tokens(torch.nn.Linear(2, 2), None)
