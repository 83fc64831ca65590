"""PyTorch in several processes: `context_parallel`, divided caches, and DTensors.

Outputs, gradients and caches of what is divided equal those of one process. The rows of the cases
are in the `*_worker.py` beside this file; processes are started once for all their parts.
"""

import json
import subprocess
from importlib import import_module

import pytest

pytest.importorskip("torch")

import torch

if not torch.distributed.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)

from tests.ranks import ranks, run_ranks

WORKER = "tests.core.parallel_worker"
MODULES = (
    *("parallel_worker", "parallel_cache_worker", "parallel_refusals"),
    *("parallel_cache_refusals", "dtensor_worker"),
)
PARTS = {
    (2, "few"): MODULES,
    (1, "cases"): MODULES[:2],
    (2, "cases"): MODULES,
    (3, "cases"): MODULES[:2],
    (4, "cases"): MODULES[:3],
    (8, "cases"): MODULES[:1],
}
"""The modules whose cases a number of processes runs, all of them or a few"""
MARKS = {"few": (), "cases": (pytest.mark.thorough,)}


@pytest.mark.parametrize(
    ("world", "which"),
    [pytest.param(*key, marks=pytest.mark.slow if key[0] == 3 else MARKS[key[1]]) for key in PARTS],
)
def test_what_processes_divide_is_that_of_one_process(world, which, tmp_path):
    parts = [f"{module}:{which}" for module in PARTS[world, which]]
    run_ranks(WORKER, world, tmp_path, *parts)
    for part in parts:
        module, name = part.split(":")
        expected = [name for name, _ in getattr(import_module(f"tests.core.{module}"), name)(world)]
        assert expected
        for rank in range(world):
            results = json.loads((tmp_path / f"{part}_{rank}.json").read_text())
            failed = "\n".join(f"{name}: {error}" for name, error in results.items() if error)
            assert not failed, failed
            assert list(results) == expected


@pytest.mark.thorough
def test_a_process_that_ends_is_reported_to_the_others(tmp_path):
    with ranks(WORKER, 2, tmp_path, "ends", stderr=subprocess.PIPE, text=True) as process:
        _, said = process.communicate(timeout=90)
    assert process.returncode != 0
    assert "in agree" in said  # The function in which it waited; PyTorch wrote the message.
