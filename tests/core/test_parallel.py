"""`context_parallel` of PyTorch in 2, 3, 4 and 8 processes.

Outputs and gradients of sequences that are divided equal those of one process. The processes run
all cases of `parallel_worker.py` once.
"""

import json
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

pytest.importorskip("torch")

import torch

from tests.representatives import SCANNED

if not torch.distributed.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)


@contextmanager
def processes(world, folder, *more, module="parallel_worker", **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"tests.core.{module}"]
    workers = [
        subprocess.Popen(
            [*command, *map(str, (rank, world, folder, *more))], env=environment, **options
        )
        for rank in range(world)
    ]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()


def require_good_results(world, count, folder):
    for rank in range(world):
        results = json.loads((folder / f"result_{rank}.json").read_text())
        failed = {name: error for name, error in results.items() if error}
        assert not failed, "\n".join(f"{name}: {error}" for name, error in failed.items())
        assert len(results) == count


def test_each_way_of_dividing_a_call_by_two_processes(tmp_path):
    with processes(2, tmp_path, "few") as workers:
        assert [worker.wait(timeout=600) for worker in workers] == [0, 0]
    require_good_results(2, 13, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("world", "count"),
    [
        (1, 5),
        (2, 176 + len(SCANNED)),
        pytest.param(3, 138 + len(SCANNED), marks=pytest.mark.slow),
        (4, 146 + len(SCANNED)),
        (8, 6),
    ],
)
def test_sequences_divided_among_processes(world, count, tmp_path):
    with processes(world, tmp_path) as workers:
        assert [worker.wait(timeout=600) for worker in workers] == [0] * world
    require_good_results(world, count, tmp_path)


@pytest.mark.thorough
def test_a_process_that_ends_is_reported_to_the_others(tmp_path):
    with processes(2, tmp_path, "ends", stderr=subprocess.PIPE, text=True) as workers:
        (_, said), _ = (worker.communicate(timeout=90) for worker in workers)
    assert workers[0].returncode != 0
    assert "in agreed" in said  # The function in which it waited; PyTorch wrote the message.
