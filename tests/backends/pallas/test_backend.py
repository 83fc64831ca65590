"""The Pallas backend: conformance of interpreted kernels, precision, transformations."""

import subprocess
import sys
from functools import partial

import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
import numpy as np

import precondattn as pa
from precondattn_pallas import backend
from precondattn_pallas.precision import products
from tests.backends.kernel_problems import problem
from tests.backends.mechanism_groups import (
    check,
    fewer_queries,
    groups,
    mechanism_of,
    slow_unless,
    thorough,
)
from tests.backends.pallas.tiles import in_jax, quick, small_tiles

TAKEN = ("lucid_solve", "lucid[beta=true]", "softmax[window=3]")
ALSO = ("laser", "gla", "gsa", "kda", "gated_delta", "conditioned_query")
"""Mechanisms whose kernels take long to interpret: one dtype, and only some checks."""
RUNS_BOTH = ("gsa", "kda")
"""Slow mechanisms, which run the kernels of GLA twice."""
OF_FEWER = ("softmax", "softmax[window=3]", "lucid", "gated_delta", "ssd", *RUNS_BOTH)
"""Mechanisms of fewer queries than keys; `test_calls.py` has LASER and the conditioned query."""
GROUPS = (
    (TAKEN, ("float32", "bfloat16"), ()),
    (TAKEN[:1], ("float16",), ("outputs", "gradients", "stability")),
    (ALSO, ("float32",), ("outputs", "gradients", "caching")),
)


def chosen():
    for names, dtypes, checks in GROUPS:
        for group in groups("smoke", "jax", dtypes, checks):
            if mechanism_of(group) in names:
                yield group
    yield from fewer_queries("jax", "float32", OF_FEWER)


@pytest.mark.parametrize("group", [*thorough(slow_unless(lambda m: m not in RUNS_BOTH, chosen()))])
def test_all_supported_mechanisms_conform(group):
    with small_tiles():
        check(group, "pallas", "reference", some=True)


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
    m = pa.Lucid()
    q, k, v = in_jax(problem(m, 20, b=2, h=4, n=2, d=8, e=8)[0], "float32").values()

    def loss(k, backend):
        return jnp.sum(m(q, k, v, lengths=jnp.asarray([20, 13]), backend=backend) ** 2)

    keys = jnp.stack([k, k[::-1] + 1])
    with small_tiles():
        result = quick(jax.vmap(jax.grad(partial(loss, backend="pallas"))))(keys)
    expected = jax.vmap(jax.grad(partial(loss, backend="reference")))(keys)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_the_device_of_interpreted_kernels_is_read_from_the_environment(monkeypatch):
    read = backend._interpreted.__wrapped__
    monkeypatch.delenv(backend.INTERPRETED, raising=False)
    assert read() == backend.CUDA
    monkeypatch.setenv(backend.INTERPRETED, "tpu")
    assert read() == backend.TPU
    monkeypatch.setenv(backend.INTERPRETED, "gpu")
    with pytest.raises(ValueError, match="must be one of cuda, tpu; found 'gpu'"):
        read()


@pytest.mark.thorough
def test_a_numpy_call_does_not_initialise_jax():
    code = """
import jax, numpy as np, precondattn as pa
from jax._src import xla_bridge
pa.lucid(*np.ones((3, 1, 2, 1, 4)))
assert not xla_bridge.backends_are_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
