"""The JAX backend beyond conformance: real block sizes, JAX's transformations, memory, extremes."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs
from precondattn_jax.arithmetic import zeros
from precondattn_jax.triangular_inverse import unit_lower_inverse
from tests.backends.portable.test_blocked_backends import MECHANISMS

SLOW = pytest.mark.slow


def arrays(x, dtype=None):
    return {n: jnp.asarray(a, dtype=dtype) for n, a in x.items()}


def close(result, expected, tolerance=1e-9):
    np.testing.assert_allclose(
        np.asarray(result), np.asarray(expected), rtol=tolerance, atol=tolerance
    )


def with_gradient(m, x, cotangent, backend, **masks):
    """Output and gradients, as NumPy's."""
    out, pullback = m.vjp(**x, **masks, backend=backend)
    gradients = pullback(cotangent)
    return {"out": np.asarray(out)} | {n: np.asarray(g) for n, g in gradients.items()}


def compare(m, x, tolerance=1e-9, **masks):
    """Compares output and gradients, each relative to the reference's largest number."""
    cotangent = np.random.default_rng(0).normal(size=m(**x, **masks, backend="reference").shape)
    expected = with_gradient(m, x, cotangent, "reference", **masks)
    result = with_gradient(m, arrays(x), jnp.asarray(cotangent), "jax", **arrays(masks))
    for name, array in expected.items():
        scale = max(np.abs(array).max(), 1e-3)
        close(result[name] / scale, array / scale, tolerance)


@pytest.mark.parametrize("expression", MECHANISMS)
@pytest.mark.parametrize("verb", ["forward", "vjp", "extend"])
def test_jax_is_chosen_over_the_reference(expression, verb):
    m = pa.parse(expression)
    x = arrays(make_inputs(m, CallLayout("plain"), "random"))
    if verb == "extend":
        explained = m.explain(cache=m.init_cache(**x, capacity=x["k"].shape[1]), **x)
    else:
        explained = m.explain(**x, verb=verb)
    assert set(explained.backends) == {"jax"}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_zero_states_are_not_read_from_memory_that_nothing_has_written(dtype):
    """jaxlib 0.10.2 does so if it sums over a product with constant zeros."""
    m, numbers = pa.parse("retention"), np.random.default_rng(0)
    shapes = {"q": (1, 30, 4, 64), "k": (1, 64, 1, 64), "v": (1, 64, 1, 128)}
    x = {name: numbers.normal(size=shape) for name, shape in shapes.items()}
    cotangent = numbers.normal(size=(1, 30, 4, 128))
    expected = with_gradient(m, x, cotangent, "reference")

    freed = [jnp.full((64, 64 * i), 1e30).block_until_ready() for i in range(1, 40)]
    del freed
    result = with_gradient(m, arrays(x, dtype), jnp.asarray(cotangent, dtype=dtype), "jax")
    for name, array in expected.items():
        close(result[name] / np.abs(array).max(), array / np.abs(array).max(), 1e-5)


@pytest.mark.parametrize("value", [0.0, 1.0, -math.inf, math.nan])
def test_zeros_are_zeros_and_do_not_depend_on_the_array_that_they_are_like(value):
    like = jnp.full((2, 2), value)
    result, gradient = jax.value_and_grad(lambda x: zeros((3, 4), x).sum())(like)
    assert result == 0
    assert not gradient.any()


DEFAULT = [name for name in MECHANISMS if name.isidentifier() or name == "ccq(gated_delta)"]


# Slow: options and other compositions, which `test_blocked_backends` has in NumPy and PyTorch.
@pytest.mark.thorough(but=("row_normalized",))
@pytest.mark.parametrize(
    "expression",
    [
        pytest.param(expression, marks=() if expression in DEFAULT else SLOW)
        for expression in MECHANISMS
    ],
)
def test_several_blocks_of_the_default_size(expression):
    m = pa.parse(expression)
    layout = CallLayout("blocks", b=1, t=301, s=301, h=4, n=2, d=8, e=6)
    compare(m, make_inputs(m, layout, "clustered"))


@pytest.mark.parametrize("expression", ["lucid", "path"])
@pytest.mark.parametrize("mask", ["lengths", "key_mask", "segment_ids"])
def test_a_mask_of_more_keys_than_queries(mask, expression, small_blocks):
    """A query with a masked key still attends to the other keys."""
    m = pa.parse(expression)
    layout = CallLayout("fewer", b=2, t=11, s=30, h=4, n=2, d=8, e=8, mask=mask)
    compare(m, make_inputs(m, layout, "clustered"), **layout.masks())


@pytest.mark.parametrize("tokens", [7, 8, 17])
@pytest.mark.parametrize("keys", ["duplicate", "zero", "clustered"])
def test_hard_keys_around_the_edge_of_a_block(keys, tokens, small_blocks):
    m = pa.Lucid()
    x = make_inputs(m, CallLayout("edge", b=1, t=tokens, s=tokens, h=2, n=1, d=8, e=4), "clustered")
    if keys == "duplicate":
        x["k"][:, 1:] = x["k"][:, :1]
    elif keys == "zero":
        x["k"][:, ::2] = 0.0
    compare(m, x)


@pytest.mark.parametrize("tokens", [15, 16])
def test_non_causal_softmax_with_more_queries_than_keys(tokens, small_blocks):
    m = pa.Softmax(causal=False)
    compare(
        m, make_inputs(m, CallLayout("more", b=1, t=21, s=tokens, h=2, n=1, d=4, e=3), "random")
    )


@pytest.mark.parametrize(("dtype", "apart"), [("float64", 1500.0), ("float32", 130.0)])
def test_laser_reads_values_too_far_apart_for_one_shift(dtype, apart, small_blocks):
    """Values of whole blocks that are far apart, and single values far from their neighbours."""
    rng = np.random.default_rng(1)
    x = {n: rng.normal(size=(2, 45, 2, 4)) for n in "qkv"}
    x["v"][:, 10:20] += apart
    x["v"][:, 20:30] -= apart
    x["v"][:, 33, :, 1] += apart / 2
    wide = {n: a.astype(dtype).astype("float64") for n, a in x.items()}
    cotangent = rng.normal(size=x["v"].shape)
    result = with_gradient(pa.Laser(), arrays(x, dtype), jnp.asarray(cotangent, dtype), "jax")
    wide_cotangent = cotangent.astype(dtype).astype("float64")
    expected = with_gradient(pa.Laser(), wide, wide_cotangent, "reference")
    for name in result:
        close(result[name], expected[name], 1e-9 if dtype == "float64" else 2e-4)


@pytest.mark.thorough(but=("1", "16"))
@pytest.mark.parametrize("size", [1, 7, 16, 40, 256])
def test_the_inverse_for_nearly_equal_keys_is_accurate(size):
    rng = np.random.default_rng(2)
    strict = np.tril(1.0 - 0.1 * rng.random((2, size, size)), k=-1)
    exact = np.linalg.inv(np.eye(size) + strict)
    close(unit_lower_inverse(jnp.asarray(strict)), exact, 1e-10)
    close(unit_lower_inverse(jnp.asarray(strict, "float32")), exact, 1e-4)


# Slow: `test_jax` has the same test for LASER and GSA, which take long to compile.
@pytest.mark.thorough
@pytest.mark.parametrize(
    "expression",
    [
        *("softmax", "lucid", "path", "gated_delta"),
        *(pytest.param(expression, marks=SLOW) for expression in ("laser", "gsa")),
    ],
)
def test_jit_grad_and_vmap_agree_with_plain_calls(expression, small_blocks):
    m = pa.parse(expression)
    layout = CallLayout("transformed", b=1, t=21, s=21, h=2, n=1, d=4, e=4)
    x = arrays(make_inputs(m, layout, "clustered"))
    call = partial(m, backend="jax")
    expected, pullback = m.vjp(**x, backend="jax")
    close(jax.jit(lambda x: call(**x))(x), expected)
    cotangent = jnp.cos(expected)
    stacked = {n: jnp.stack([a, 0.7 * a]) for n, a in x.items()}
    result = jax.jit(jax.vmap(jax.grad(lambda x: jnp.sum(jnp.sin(call(**x))))))(stacked)
    for name, gradient in pullback(cotangent).items():
        close(result[name][0], gradient)
    close(jax.vmap(lambda x: call(**x))(stacked)[1], call(**{n: a[1] for n, a in stacked.items()}))


@pytest.mark.parametrize(
    "expression",
    [
        *("lucid", "path[flush=3]", "gated_delta"),
        *(pytest.param(expression, marks=SLOW) for expression in ("softmax[window=9]", "laser")),
    ],
)
def test_a_donated_cache_is_continued_with_lengths_that_are_traced(expression, small_blocks):
    m = pa.parse(expression)
    layout = CallLayout("decoded", b=2, t=20, s=20, h=2, n=1, d=4, e=4)
    x = arrays(make_inputs(m, layout, "clustered"))
    expected = m(**x, backend="reference")

    @partial(jax.jit, donate_argnums=0)
    def extend(cache, x, lengths):
        return m.extend(cache, **x, lengths=lengths, backend="jax", donate=True)

    cache = m.init_cache(**x, capacity=24)
    lengths = np.asarray([[5, 3], [1, 1], [0, 1], [5, 5], [1, 1]])
    place = np.zeros(2, dtype=int)
    for now in lengths:
        rows = place[:, None] + np.arange(now.max())
        tokens = {n: a[np.arange(2)[:, None], rows] for n, a in x.items()}
        out, cache = extend(cache, tokens, jnp.asarray(now))
        for i, count in enumerate(now):
            close(out[i, :count], expected[i, place[i] : place[i] + count])
        place += now
    assert list(cache.length) == list(place)


@pytest.mark.thorough
@pytest.mark.parametrize("expression", ["softmax", "lucid", "laser", "path[flush=4]"])
def test_a_step_from_a_cache_of_tokens_has_a_gradient(expression, small_blocks):
    m = pa.parse(expression)
    x = arrays(make_inputs(m, CallLayout("s", b=1, t=9, s=9, h=2, n=1, d=4, e=4), "clustered"))

    def loss(x, backend):
        cache = m.init_cache(**x, capacity=10)
        first, cache = m.extend(cache, **{n: a[:, :6] for n, a in x.items()}, backend=backend)
        second, _ = m.extend(cache, **{n: a[:, 6:] for n, a in x.items()}, backend=backend)
        return jnp.sum(jnp.sin(first)) + jnp.sum(jnp.cos(second))

    gradient = jax.jit(jax.grad(loss), static_argnames="backend")
    result, expected = (gradient(x, backend=name) for name in ("jax", "reference"))
    for name in x:
        close(result[name], expected[name])


@pytest.mark.parametrize("expression", ["softmax", "laser", "lucid", "path", "gated_delta"])
def test_memory_is_linear_in_the_number_of_tokens(expression):
    """XLA reports the memory of a compiled function besides its arguments."""
    m = pa.parse(expression)

    def bytes_of(tokens):
        layout = CallLayout("memory", b=1, t=tokens, s=tokens, h=2, n=2, d=16, e=16)
        small = make_inputs(m, CallLayout("m", b=1, t=1, s=1, h=2, n=2, d=16, e=16), "random")
        x = {
            n: jax.ShapeDtypeStruct((1, layout.t, *a.shape[2:]), jnp.float32)
            for n, a in small.items()
        }
        loss = jax.jit(jax.grad(lambda x: jnp.sum(m(**x, backend="jax"))))
        return loss.lower(x).compile().memory_analysis().temp_size_in_bytes

    few, many = bytes_of(4096), bytes_of(16384)
    assert many <= 2 * 2.2 * few
    assert many < 16384 * 16384 * 4
