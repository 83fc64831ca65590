"""`context_parallel` of PyTorch in 2, 3, 4 and 8 processes.

Outputs and gradients of sequences that are divided equal those of one process. The processes run
all cases of `parallel_worker.py` once.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

import torch

if not torch.distributed.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)


def results(world, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.core.parallel_worker"]
    workers = [
        subprocess.Popen([*command, str(rank), str(world), str(folder)], env=environment)
        for rank in range(world)
    ]
    try:
        assert [worker.wait(timeout=600) for worker in workers] == [0] * world
    finally:
        for worker in workers:
            worker.kill()
    return [json.loads((folder / f"result_{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize(("world", "count"), [(2, 86), (3, 65), (4, 70), (8, 3)])
def test_sequences_divided_among_processes(world, count, tmp_path):
    for of_rank in results(world, tmp_path):
        failed = {name: error for name, error in of_rank.items() if error}
        assert not failed, "\n".join(f"{name}: {error}" for name, error in failed.items())
        assert len(of_rank) == count
