"""The JAX backend beyond conformance: real block sizes, JAX's transformations, memory, extremes."""

import gc
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs
from precondattn_jax.triangular_inverse import unit_lower_inverse
from tests.backends.jax.four_devices import QUICK, assert_pass_on_devices
from tests.backends.portable.test_blocked_backends import close, with_gradient

SLOW = pytest.mark.slow


def arrays(x, dtype=None):
    return {n: jnp.asarray(a, dtype=dtype) for n, a in x.items()}


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


@pytest.mark.thorough
@pytest.mark.parametrize("expression", ["softmax", "lucid", "path", "gated_delta"])
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
        *("lucid", "gated_delta"),
        pytest.param("path[flush=3]", marks=pytest.mark.thorough),
        pytest.param("softmax[window=9]", marks=SLOW),
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


@pytest.mark.thorough(but=("lucid",))
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


@pytest.mark.thorough
def test_no_tracer_outlives_its_trace():
    """`jax.checking_leaks` finds nothing of ours, so that users can look for leaks of their own."""
    m = pa.Lucid()
    x = arrays(make_inputs(m, CallLayout("small", b=2, t=4, s=4, h=2, n=2, d=4, e=4), "clustered"))
    cache, lengths = m.init_cache(**x, capacity=4), jnp.asarray([2, 4])

    def gradient(x):
        return jax.grad(lambda x: m(**x, lengths=lengths).sum())(x)

    jax.clear_caches()  # A function that is already traced is not traced again.
    gc.collect()
    gc.freeze()  # JAX's garbage collections do not search existing objects.
    try:
        with jax.checking_leaks():
            jax.jit(jax.vmap(gradient)).trace({name: array[None] for name, array in x.items()})
            jax.jit(lambda cache, x: m.extend(cache, **x)).trace(cache, x)
    finally:
        gc.unfreeze()


FILES = ("sharded", "tokens")


@pytest.mark.thorough
def test_calls_on_several_devices():
    """The tests share a process, which has eight devices."""
    assert_pass_on_devices([f"{name}_on_devices.py" for name in FILES], 8, QUICK)


@pytest.mark.slow
def test_more_calls_on_several_devices():
    assert_pass_on_devices(["tokens_on_devices.py"], 8, QUICK, "slow")
