"""Divided caches of PyTorch in 1 to 4 processes: outputs and caches equal those of one process.

The processes run all cases of `parallel_cache_worker.py` once.
"""

import json

import pytest

pytest.importorskip("torch")

import torch

if not torch.distributed.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)

from tests.core.parallel_cache_worker import STATES
from tests.ranks import run_ranks


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("world", "count"),
    [
        (1, 3),
        (2, 95 + 2 * len(STATES)),
        pytest.param(3, 31 + 2 * len(STATES[1::4]), marks=pytest.mark.slow),
        (4, 25 + 2 * len(STATES[::4])),
    ],
)
def test_caches_divided_among_processes(world, count, tmp_path):
    run_ranks("tests.core.parallel_cache_worker", world, tmp_path)
    for rank in range(world):
        results = json.loads((tmp_path / f"result_{rank}.json").read_text())
        failed = {name: error for name, error in results.items() if error}
        assert not failed, "\n".join(f"{name}: {error}" for name, error in failed.items())
        assert len(results) == count
