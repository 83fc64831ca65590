"""The Pallas backend in dispatch: support, refusals and conformance."""

import subprocess
import sys
from functools import partial

import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
import numpy as np

import precondattn as pa
from precondattn.backend import Request, UnsupportedError
from precondattn_conformance.runner import Report, run_case
from precondattn_conformance.status import FAILED, PASSED
from precondattn_pallas import Pallas
from precondattn_pallas.precision import products
from tests.backends.mechanism_groups import fewer_queries, groups, mechanism_of, slow_unless
from tests.backends.pallas.tiles import quick, small_tiles

TAKEN = ("lucid_solve", "lucid[beta=true]", "softmax[window=3]")
ALSO = ("laser", "gla", "gsa", "kda", "gated_delta", "conditioned_query")
"""Mechanisms whose kernels take long to interpret: one dtype, and only some checks."""
RUNS_BOTH = ("gsa", "kda")
"""Slow mechanisms, which run the kernels of GLA twice."""
GROUPS = (
    (TAKEN, ("float32", "bfloat16", "float16"), ()),
    (ALSO, ("float32",), ("outputs", "gradients", "caching")),
)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "group",
    [
        *(
            group
            for names, dtypes, checks in GROUPS
            for group in slow_unless(
                lambda mechanism: mechanism not in RUNS_BOTH,
                groups("smoke", "jax", dtypes, checks),
            )
            if mechanism_of(group) in names
        ),
        *slow_unless(
            lambda mechanism: mechanism not in RUNS_BOTH,
            fewer_queries("jax", "float32", (*TAKEN, *ALSO, "softmax", "lucid", "ssd")),
        ),
    ],
)
def test_all_supported_mechanisms_conform(group):
    with small_tiles():
        report = Report([run_case(case, ("pallas", "reference")) for case in group.cases])
    failed = [f"{o.case.id}: {o.reason}" for o in report.outcomes if o.status == FAILED]
    assert not failed, "\n".join(failed)
    assert any(o.status == PASSED for o in report.outcomes)


def arrays(t=20, h=2, n=2, d=8, e=8, dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = ((2, t, heads, width) for heads, width in ((h, d), (n, d), (n, e)))
    return [jnp.asarray(rng.normal(size=shape), dtype=dtype) for shape in shapes]


def test_in_the_interpreter_the_backend_runs_only_if_it_is_named():
    q, k, v = arrays()
    assert "pallas" not in pa.Lucid().explain(q, k, v).backends
    named = pa.Lucid().explain(q, k, v, backend="pallas")
    assert named.backends == ("pallas", "pallas")


def request(mechanism, device="cpu", dtype="float32", verb="vjp", masks=(), **shapes):
    return Request(verb, "jax", device, dtype, tuple(shapes.items()), frozenset(masks))


QKV = {"q": (2, 20, 4, 8), "k": (2, 20, 2, 8), "v": (2, 20, 2, 8)}


@pytest.mark.parametrize(
    ("mechanism", "changes", "reason"),
    [
        ("lucid_solve[window=3]", {}, "no window"),
        ("lucid_solve[normalize=rows]", {}, "unit diagonal"),
        ("lucid_solve[metric=transported]", {}, "dot product"),
        ("lucid_solve", {"dtype": "float64"}, "float64"),
        ("lucid_solve", {"device": "cuda"}, "interprets"),
        ("lucid_solve", {"k": (2, 20, 2, 264)}, "d=264"),
        ("lucid_solve", {"v": (2, 20, 2, 520)}, "e=520"),
        ("lucid_solve", {"v": (0, 20, 2, 8)}, "empty"),
        ("softmax[bias=true]", {}, "bias"),
        ("softmax[forget=scaled]", {}, "forget gate"),
        ("softmax", {"verb": "extend"}, "no step"),
        ("softmax", {"v": (2, 20, 2, 136)}, "found 136"),
        ("softmax", {"q": (2, 0, 2, 8)}, "empty"),
        ("path", {}, "no kernels"),
        ("gla", {"k": (2, 20, 2, 264)}, "d=264"),
        ("gsa", {"s": (2, 20, 2, 300)}, "found m=300"),
    ],
)
def test_unsupported_calls_are_declined_with_the_reason(mechanism, changes, reason):
    leaf = pa.parse(mechanism).program.leaves[0]
    refusal = Pallas().refusal(leaf, request(mechanism, **{**QKV, **changes}))
    assert reason in refusal


def test_an_unsupported_call_is_an_error_if_no_other_backend_is_allowed():
    q, k, v = arrays()
    w, beta = k / 3, jnp.ones(k.shape[:3], k.dtype)
    with pytest.raises(UnsupportedError, match="no kernels for path"):
        pa.Path()(q, k, v, w=w, beta=beta, backend="pallas")


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [(None, False), ("highest", False), ("tensorfloat32", True), ("bfloat16", True)],
)
def test_tf32_is_the_users_choice(setting, allowed, monkeypatch):
    with jax.default_matmul_precision(setting):
        assert products(jnp.float32, interpret=False).tf32 == allowed
        assert products(jnp.float16, interpret=False).tf32
        assert products(jnp.bfloat16, interpret=False).tf32
        monkeypatch.setenv("PRECONDATTN_PRECISE", "1")
        assert products(jnp.float16, interpret=False).tf32 == allowed
        assert products(jnp.bfloat16, interpret=False).tf32


@pytest.mark.thorough
def test_jit_grad_and_vmap_of_a_call_with_fewer_key_heads():
    m, (q, k, v) = pa.Lucid(), arrays(h=4)

    def loss(k, backend):
        return jnp.sum(m(q, k, v, lengths=jnp.asarray([20, 13]), backend=backend) ** 2)

    keys = jnp.stack([k, k[::-1] + 1])
    with small_tiles():
        result = quick(jax.vmap(jax.grad(partial(loss, backend="pallas"))))(keys)
    expected = jax.vmap(jax.grad(partial(loss, backend="reference")))(keys)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_a_numpy_call_does_not_initialise_jax():
    code = """
import jax, numpy as np, precondattn as pa
from jax._src import xla_bridge
pa.lucid(*np.ones((3, 1, 2, 1, 4)))
assert not xla_bridge.backends_are_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
