"""Softmax attention and LASER on the CuPy backend, through the library and through conformance."""

from tests.cupy_kernels import DTYPES  # isort: skip  # It may skip.

import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance.runner import run_cases
from precondattn_conformance.status import FAILED, PASSED
from precondattn_cupy.configurations import forced
from tests.cupy_attention import SMALL, problem
from tests.mechanism_groups import groups

TAKEN = (
    *("softmax", "softmax[causal=false]", "softmax[scale=0.3]", "softmax[window=3]"),
    *("laser", "laser(softmax[causal=false])", "laser(softmax[window=3])"),
)


@pytest.mark.parametrize(
    "group",
    [g for g in groups("smoke", "numpy", (*DTYPES,)) if g.id.removeprefix("numpy-") in TAKEN],
)
def test_what_it_takes_conforms(group):
    with forced(**SMALL):
        report = run_cases(group, ("cupy", "portable"))
    failed = [f"{o.case.id}: {o.reason}" for o in report.outcomes if o.status == FAILED]
    assert not failed, "\n".join(failed)
    assert any(o.status == PASSED for o in report.outcomes)


@pytest.mark.parametrize("mechanism", [pa.Softmax(), pa.Laser(), pa.Softmax(bias=True)])
def test_what_has_kernels_and_what_is_left_to_portable(mechanism):
    x, _ = problem(20)
    bias = {"bias": np.zeros((1, 2, 20, 20), np.float32)} if "bias" in mechanism.inputs else {}
    found = mechanism.explain(**x, **bias, backend=("cupy", "portable"))
    assert found.backends == ("portable" if bias else "cupy",)
    assert not bias or "no kernel for attention with a bias" in str(found)
