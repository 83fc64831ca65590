"""DTensors sharded over batch and heads, and `context_parallel`, in two processes.

Each mechanism: output, gradients, `vjp`, `extend` and its cache equal those of whole tensors, and
nothing is communicated. The processes run all cases of `dtensor_worker.py` once.
"""

import json

import pytest

pytest.importorskip("torch")

import torch

if not torch.distributed.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)

from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    run_ranks("tests.core.dtensor_worker", 2, folder)
    return [json.loads((folder / f"result_{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.thorough(but=(", heads-26", "context parallel-1"))
@pytest.mark.parametrize(
    ("cases", "count"),
    [
        (", batch", 26),
        (", heads", 26),
        (", one key head", 4),
        ("refused: ", 9),
        ("compiled", 1),
        ("context parallel", 1),
    ],
)
def test_two_processes(results, cases, count):
    for of_rank in results:
        chosen = {name: error for name, error in of_rank.items() if cases in name}
        assert len(chosen) == count
        failed = {name: error for name, error in chosen.items() if error}
        assert not failed, "\n".join(f"{name}: {error}" for name, error in failed.items())
