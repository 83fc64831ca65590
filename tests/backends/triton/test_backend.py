"""The Triton backend: conformance, precision, compiled steps, threads, and processes of its own."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

import torch

import precondattn as pa
from precondattn.kernel_backend.precise import VARIABLE
from precondattn_conformance.grid import TWO_OF_33
from precondattn_conformance.runner import Report, run_case
from precondattn_conformance.status import FAILED, PASSED
from precondattn_triton.precision import as_the_user_allows, product_precision
from tests.backends.mechanism_groups import fewer_queries, groups, groups_of, only, slow_unless
from tests.backends.triton.tiles import small_tiles

OPTIONS = ("window=3", "causal=false,window=3", "bias=true", "softcap=2", "sink=true")
TAKEN = (
    *("lucid_solve", "lucid_solve[beta=true]", "lucid", "lucid[beta=true]"),
    *("lucid_solve[metric=transported]", "lucid(path)", "lucid(laser)"),
    *("unit_rows", "unit_rows[detach=false]", "row_normalized", "gated_delta"),
    *("laser", *(f"laser(softmax[{name}])" for name in ("causal=false", "window=3", "bias=true"))),
    *("path", "path[window=3]"),
    *(f"softmax[{name}]" for name in (*OPTIONS, "distance=slopes")),
)
OF_ANY_WIDTH = tuple(name for name in TAKEN if not name.startswith("laser"))
"""LASER's kernels decline the widths of the suite's cases in half precision."""
WITH_GRADIENT_IN_FLOAT16 = tuple(name for name in OF_ANY_WIDTH if name != "row_normalized")
"""The norm's gradient at rows of zeros is beyond float16's range, and declined."""
OF_LONG_KERNELS = ("path", "path[window=3]", "gated_delta")
"""Mechanisms that are slow in half precision, which the tests of their kernels cover."""
RECURRENCES = ("gated_delta", "ssd", "gla", "gsa", "kda", "conditioned_query", "ccq(gated_delta)")
IN_BFLOAT16 = (
    *("lucid_solve[metric=transported]", "lucid[beta=true]", "softmax[bias=true]"),
    *("unit_rows", "row_normalized"),
)
"""One mechanism of each kind of kernel: it has the operations of float16 in another dtype."""
IN_AUTOCAST = ("lucid", "softmax[causal=false,window=3]", "unit_rows[detach=false]")
"""The others whose calls under autocast Triton computes."""
STATES = {"states": ((TWO_OF_33._replace(name="one_of_33", b=1), "clustered"),)}
"""Three chunks: only the second one has both an initial state and a gradient of its last one."""
INTERPRET = "TRITON_INTERPRET"


@pytest.mark.thorough(but=("torch-lucid[beta=true]2", "torch-row_normalized0"))
@pytest.mark.parametrize(
    "group",
    [
        *only(TAKEN.__contains__, groups("smoke", "torch", ("float32",))),
        *slow_unless(
            lambda mechanism: mechanism not in OF_LONG_KERNELS,
            only(OF_ANY_WIDTH.__contains__, groups("smoke", "torch", ("float16",))),
        ),
        *only(("gla", "kda").__contains__, groups_of("torch", "float32", STATES)),
        *fewer_queries("torch", "float16", (*WITH_GRADIENT_IN_FLOAT16, *RECURRENCES)),
        *only(IN_BFLOAT16.__contains__, groups("smoke", "torch", ("bfloat16",))),
        *only(IN_AUTOCAST.__contains__, groups("smoke", "torch", ("bfloat16",), ("autocast",))),
    ],
)
def test_all_supported_mechanisms_conform(group):
    # The interpreter runs one kernel at a time.
    cases = [case for case in group.cases if case.check != "threads"]
    with small_tiles():
        report = Report([run_case(case, ("triton", "torch")) for case in cases])
    failed = [f"{o.case.id}: {o.reason}" for o in report.outcomes if o.status == FAILED]
    assert not failed, "\n".join(failed)
    assert any(o.status == PASSED for o in report.outcomes)


def test_a_traced_step_runs_on_another_backend():
    m = pa.Lucid()
    q, k, v = torch.randn(3, 2, 1, 2, 8)
    cache = m.init_cache(q, k, v, capacity=8)

    def step(q, k, v):
        return m.extend(cache, q, k, v, backend=("triton", "torch"))[0]

    with small_tiles():
        result = torch.compile(step, backend="eager", fullgraph=True)(q, k, v)
        torch.testing.assert_close(result, step(q, k, v), rtol=1e-5, atol=1e-6)


def test_tf32_is_the_users_choice_in_float32_and_in_precise_kernels_in_float16(monkeypatch):
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        for precision, expected in (("ieee", "tf32x3"), ("tf32", "tf32")):
            matmul.fp32_precision = precision
            assert as_the_user_allows() == expected
            for precise, in_float16 in (("0", "tf32"), ("1", expected)):
                monkeypatch.setenv(VARIABLE, precise)
                assert product_precision(torch.float16) == in_float16
                assert product_precision(torch.bfloat16) == "tf32"
    finally:
        matmul.fp32_precision = before


@pytest.mark.thorough
def test_every_configuration_is_compiled_ahead_of_time():
    code = """
from unittest.mock import patch
from precondattn_triton import configurations, tiles, unit_rows, variants
from precondattn_triton.recurrence import chunk_arrays
from precondattn_triton.lucid import plan as lucid_plan
from precondattn_triton.lucid import step as lucid_step
from precondattn_triton.path import blocks, chunk_gradient
from precondattn_triton.path import step as path_step
from precondattn_triton.softmax import laser_decode, laser_exact, softmax_forward
compiled, look_up = set(), configurations.configuration
def noted(kernel, *rest):
    cut = look_up(kernel, *rest)
    compiled.add((kernel, cut))
    return cut
for module in (
    *(chunk_arrays, lucid_plan, lucid_step, path_step, softmax_forward),
    *(laser_decode, laser_exact, tiles, unit_rows, blocks, chunk_gradient),
):
    patch.object(module, "configuration", noted).start()
for target in ("sm_80", "sm_90"):
    compiled.clear()
    names = [variant.name for variant in variants.variants(target)]
    assert len(names) == len(set(names))
    chosen = configurations.REGISTRY.chosen.get(target, {})
    by_key = {**configurations.REGISTRY.untuned, **chosen}
    shipped = {(key.kernel, cut) for key, cut in by_key.items()}
    assert len(shipped) <= 200 + len(set(chosen.values())), len(shipped)
    assert compiled == shipped, shipped ^ compiled
"""
    without = {name: value for name, value in os.environ.items() if name != INTERPRET}
    subprocess.run([sys.executable, "-c", code], check=True, env=without)
