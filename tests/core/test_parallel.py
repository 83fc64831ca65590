"""`context_parallel` of PyTorch in 2, 3, 4 and 8 processes.

Outputs and gradients of sequences that are divided equal those of one process. The processes run
all cases of `parallel_worker.py` once.
"""

import json
import subprocess

import pytest

pytest.importorskip("torch")

import torch

from tests.ranks import ranks, run_ranks
from tests.representatives import SCANNED

WORKER = "tests.core.parallel_worker"

if not torch.distributed.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)


def require_good_results(world, count, folder):
    for rank in range(world):
        results = json.loads((folder / f"result_{rank}.json").read_text())
        failed = {name: error for name, error in results.items() if error}
        assert not failed, "\n".join(f"{name}: {error}" for name, error in failed.items())
        assert len(results) == count


def test_each_way_of_dividing_a_call_by_two_processes(tmp_path):
    run_ranks(WORKER, 2, tmp_path, "few")
    require_good_results(2, 13, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("world", "count"),
    [
        (1, 5),
        (2, 176 + len(SCANNED)),
        pytest.param(3, 141 + len(SCANNED), marks=pytest.mark.slow),
        (4, 146 + len(SCANNED)),
        (8, 6),
    ],
)
def test_sequences_divided_among_processes(world, count, tmp_path):
    run_ranks(WORKER, world, tmp_path)
    require_good_results(world, count, tmp_path)


@pytest.mark.thorough
def test_a_process_that_ends_is_reported_to_the_others(tmp_path):
    with ranks(WORKER, 2, tmp_path, "ends", stderr=subprocess.PIPE, text=True) as process:
        _, said = process.communicate(timeout=90)
    assert process.returncode != 0
    assert "in agreed" in said  # The function in which it waited; PyTorch wrote the message.
