"""The CuPy backend in dispatch: support, refusals and conformance."""

import numpy as np
import pytest

import precondattn as pa
from precondattn.algebra.group import Group, group_of
from precondattn.backend import Request
from precondattn_conformance.runner import Report, run_case
from precondattn_conformance.status import FAILED, PASSED
from precondattn_cupy import Cupy
from precondattn_cupy.configurations import Configuration, forced
from tests.backends.cupy import attention as cupy_attention
from tests.backends.cupy.simulated import DTYPES
from tests.backends.mechanism_groups import fewer_queries, groups, only
from tests.kernel_tools.toolchain import needs_simulator

# Thorough: the first test of each kernel compiles it for the simulator, which takes seconds.
pytestmark = pytest.mark.thorough

TAKEN = (
    *("lucid_solve", "lucid_solve[beta=true]", "lucid", "lucid[beta=true]"),
    *("gated_delta", "delta", "conditioned_query"),
    *("softmax", "softmax[causal=false]", "softmax[scale=0.3]", "softmax[window=3]"),
    *("laser", "laser(softmax[causal=false])", "laser(softmax[window=3])"),
)
SMALL = {
    **cupy_attention.SMALL,
    "lucid_inverse": Configuration(16, 32),
    "lucid_update": Configuration(16, 16),
    "lucid_gradient": Configuration(16, 16),
    "lucid_decode": Configuration(16, 16),
}


@needs_simulator
@pytest.mark.parametrize(
    "group",
    [
        *only(TAKEN.__contains__, groups("smoke", "numpy", (*DTYPES,))),
        *fewer_queries("numpy", "float32", (*TAKEN, "ssd", "ccq(gated_delta)")),
    ],
)
def test_all_supported_mechanisms_conform(group):
    with forced(**SMALL):
        report = Report([run_case(case, ("cupy", "portable")) for case in group.cases])
    failed = [f"{o.case.id}: {o.reason}" for o in report.outcomes if o.status == FAILED]
    assert not failed, "\n".join(failed)
    assert any(o.status == PASSED for o in report.outcomes)


def test_in_the_simulator_the_backend_runs_only_if_it_is_named():
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 20, 2, 8)).astype(np.float32)
    assert "cupy" not in pa.Lucid().explain(q, k, v).backends
    named = pa.Lucid().explain(q, k, v, backend=("cupy", "portable"))
    assert named.backends == ("cupy", "cupy")


def request(mechanism, dtype="float32", verb="vjp", **shapes):
    return Request(verb, "numpy", "cpu", dtype, tuple(shapes.items()), frozenset())


KV = {"k": (2, 20, 2, 8), "v": (2, 20, 2, 8)}


@pytest.mark.parametrize(
    ("mechanism", "changes", "reason"),
    [
        ("lucid_solve", {}, None),
        ("lucid_solve[window=3]", {}, "no window"),
        ("lucid_solve[normalize=rows]", {}, "unit diagonal"),
        ("lucid_solve[metric=transported]", {}, "dot product"),
        ("lucid_solve", {"dtype": "float64"}, "float64"),
        ("lucid_solve", {"k": (2, 20, 2, 264)}, "d=264"),
        ("lucid_solve", {"v": (2, 20, 2, 520)}, "e=520"),
        ("lucid_solve", {"v": (0, 20, 2, 8)}, "empty"),
        ("lucid_solve", {"k": (256, 20, 256, 8)}, "65535 heads"),
        ("lucid_solve", {"verb": "extend"}, "no step"),
    ],
)
def test_unsupported_calls_are_declined_with_the_reason(mechanism, changes, reason):
    leaf = pa.parse(mechanism).program.leaves[0]
    refusal = Cupy().refusal(leaf, request(mechanism, **{**KV, **changes}))
    assert refusal is None if reason is None else reason in refusal


@pytest.mark.parametrize(
    ("mechanism", "shape", "reason"),
    [
        ("lucid", {}, None),
        ("lucid", {"h": 63, "n": 1, "d": 256, "e": 256}, None),
        ("lucid", {"h": 64, "n": 1}, "and 64"),
        ("lucid", {"d": 257}, "d=257"),
        ("lucid", {"t": 2}, "t=2"),
        ("lucid", {"b": 0}, "empty"),
        ("lucid(softmax[window=3])", {}, "plain LUCID"),
        ("lucid(laser)", {}, "plain LUCID"),
    ],
)
def test_unsupported_steps_are_declined_with_the_reason(mechanism, shape, reason):
    b, t, h, n, d, e = ({"b": 2, "t": 1, "h": 4, "n": 2, "d": 8, "e": 8} | shape).values()
    shapes = {"q": (b, t, h, d), "k": (b, t, n, d), "v": (b, t, n, e)}
    group = Group(group_of(mechanism))
    refusal = Cupy().refusal(group, request(group, verb="extend", **shapes))
    assert refusal is None if reason is None else reason in refusal


@pytest.mark.parametrize("mechanism", [pa.Softmax(), pa.Laser(), pa.Softmax(bias=True)])
def test_calls_without_a_kernel_are_left_to_portable(mechanism):
    x, _ = cupy_attention.problem(20)
    bias = {"bias": np.zeros((1, 2, 20, 20), np.float32)} if "bias" in mechanism.inputs else {}
    result = mechanism.explain(**x, **bias, backend=("cupy", "portable"))
    assert result.backends == ("portable" if bias else "cupy",)
    assert not bias or "no kernel for attention with a bias" in str(result)
