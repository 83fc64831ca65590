"""PyTorch in several processes: `context_parallel`, divided caches, and DTensors.

Outputs, gradients and caches of what is divided equal those of one process. Calls are those of the
suite's divided cases; other rows are in the `*_worker.py` beside this file. Processes are started
once for all their parts.
"""

import json
import subprocess
from importlib import import_module

import pytest

pytest.importorskip("torch")

import torch

if not torch.distributed.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)

from precondattn_conformance.division.cases import divided_cases
from precondattn_conformance.division.run import run_divided
from tests.ranks import ranks, run_ranks
from tests.representatives import SCANNED

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
SOLVES = (
    *("lucid", "lucid[beta=true]", "lucid[normalize=none]", "qk_norm(lucid)", "differential"),
    *("lucid[normalize=queries_and_keys,beta=true]", "temperature[per=head](lucid)"),
    "lucid(laser)",
)
"""Compositions whose leaves are divided one by one"""
RINGS = ("softmax", "softmax[causal=false]", "softmax[softcap=5,scale=0.3]", "laser")
DIVIDED = {
    "heads": (
        *("softmax[bias=true]", "softmax[forget=unscaled]", "lucid(path)", "differential", "gsa"),
        *("deltaformer", "row_normalized", "temperature[per=head](linear)", "delta_product"),
        *(
            "ccq(lucid)",
            "mesa",
            "hedgehog(gated_delta)",
            "cross_covariance",
            "lucid",
            "per_dim_scale",
        ),
        *("lucid(softmax[causal=false])", "softmax[causal=false,distance=buckets]"),
    ),
    "contiguous": (
        *(*SCANNED, *RINGS, "path", "path[window=3]", "path[forget=unscaled]", "qk_norm(path)"),
        *("softmax[window=3]", "softmax[forget=unscaled]", "softmax[sink=true]", "lucid"),
        *("softmax[distance=slopes]", "softmax[distance=buckets]", "elu1(linear)"),
    ),
    "zigzag": (*RINGS, "path", "lucid", "differential"),
    "cyclic": (*SOLVES, "path", "softmax", "laser"),
}
"""Mechanisms that each layout divides"""
MASKED = ("lucid[beta=true]", "softmax", "laser", "path", "kda", "gsa", "ccq(gated_delta)")


@pytest.mark.thorough
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_divided_cases_of_the_suite_pass(world):
    """A ring of three has two directions; the workers have rings of two, four and eight."""
    cases = [
        case
        for order, texts in DIVIDED.items()
        for text in texts
        for case in divided_cases(world, only_mechanisms=(text,), only_checks=(order,))
    ]
    for order, texts in (("contiguous", MASKED), ("cyclic", MASKED[:3])):
        chosen = {"only_mechanisms": texts, "only_checks": (order,)}
        cases += divided_cases(world, "full", only_libraries=("torch",), **chosen)
    outcomes = list(run_divided(dict.fromkeys(cases), world))
    assert len(outcomes) > 40
    assert not [(o.case.id, o.reason) for o in outcomes if o.status != "passed"]


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
