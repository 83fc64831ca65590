"""mLSTM where gates are extreme or denominators small.

Outputs, gradients and states in general are compared with a loop over tokens in
`test_definitions.py`, and with xLSTM's in `test_peers.py`.
"""

import numpy as np
import pytest

import precondattn as pa

B, H, D, E = 2, 2, 4, 3
BACKENDS = ["reference", "portable"]


def inputs(s=70, *, n=1, seed=0, size=1.0):
    rng = np.random.default_rng(seed)
    return {
        "q": rng.normal(size=(B, s, H, D)),
        "k": rng.normal(size=(B, s, n, D)),
        "v": rng.normal(size=(B, s, n, E)),
        "g": -rng.exponential(size=(B, s, H)),
        "i": size * rng.normal(size=(B, s, H)),
    }


def names_of(cache):
    """The buffers' names, of C, n and m."""
    return [next(key for key in cache.store if f".{s}(" in key) for s in NAMES]


NAMES = ("state", "mass", "maximum")


def a_cache(m, x, seed=1):
    rng, cache = np.random.default_rng(seed), m.init_cache(**x)
    return cache._replace(store={n: rng.normal(size=a.shape) for n, a in cache.store.items()})


def close(result, expected, within=1e-12):
    scale = 1 + np.max(np.abs(expected))
    np.testing.assert_allclose(result / scale, expected / scale, rtol=0, atol=within)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_common_factor_of_gates_that_open_wide_cancels(backend):
    """If |s n·q| is the larger, both it and C contain the factor e^{1000}."""
    m, x = pa.MLSTM(eps=0), inputs(n=H)
    x["q"], x["k"] = np.abs(x["q"]), np.abs(x["k"])
    x["i"] = np.abs(x["i"]) + 9
    out, pullback = m.vjp(**x, backend=backend)
    wide, other = m.vjp(**(x | {"i": x["i"] + 1024}), backend=backend)
    close(wide, out, 1e-10)
    d_out = np.random.default_rng(4).normal(size=out.shape)
    expected = pullback(d_out)
    for name, gradient in other(d_out).items():
        close(gradient, expected[name], 1e-9)


def of_logarithms(x, eps=0.0):
    """The output from logarithms of weights, with sums of the exact gates: float64 integers."""
    g, i = (x[name].transpose(0, 2, 1) for name in "gi")
    total = np.cumsum(g, axis=-1)
    s = g.shape[-1]
    logs = total[..., :, None] - total[..., None, :] + i[..., None, :]
    logs = np.where(np.tril(np.ones((s, s), dtype=bool)), logs, -np.inf)
    maximum = logs.max(-1, keepdims=True)
    k, v = (np.repeat(x[name], H // x[name].shape[2], axis=2) for name in "kv")
    weights = D**-0.5 * np.einsum("bthd,bshd->bhts", x["q"], k) * np.exp(logs - maximum)
    with np.errstate(over="ignore"):
        mass = np.maximum(np.abs(weights.sum(-1, keepdims=True)), np.exp(-maximum))
    return np.einsum("bhts,bshe->bthe", weights / (mass + eps), v)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("sizes", [(0, 1e4), (1e4, 0), (1e4, 1e4), (-1e4, -1e4), (1, 1e4)])
def test_gates_of_size_1e4_of_either_sign_give_the_exact_output(backend, dtype, sizes):
    """Pre-activations are whole numbers, so that float32 holds the sums of the gates."""
    rng, x = np.random.default_rng(5), inputs(n=H)
    x["q"], x["k"] = np.abs(x["q"]), np.abs(x["k"])  # Far from n·q = 0.
    f, i = (np.round(size * rng.normal(size=x["g"].shape)) for size in sizes)
    x["g"], x["i"] = np.minimum(f, 0), i  # log σ(f) for large |f|
    x = {name: array.astype(dtype) for name, array in x.items()}
    exact = {name: array.astype(np.float64) for name, array in x.items()}
    m = pa.MLSTM(eps=0)
    out, pullback = m.vjp(**x, backend=backend)
    assert out.dtype == dtype
    unit = np.finfo(dtype).eps
    close(out, of_logarithms(exact), 100 * unit)
    assert all(np.all(np.isfinite(a)) for a in pullback(np.ones_like(out)).values())


def test_long_sequences_of_closing_gates_do_not_lose_the_maximum():
    """The sum of all gates is −4e7, of which float32 holds multiples of 4 only."""
    x = inputs(s=4096, n=H, size=2.0)
    x["q"], x["k"] = np.abs(x["q"]), np.abs(x["k"])
    rng = np.random.default_rng(6)
    x["g"] = -np.where(rng.random(x["g"].shape) < 0.5, 2e4, 2.0**-6)
    x = {name: array.astype(np.float32) for name, array in x.items()}
    exact = {name: array.astype(np.float64) for name, array in x.items()}
    close(pa.MLSTM(eps=0)(**x), pa.MLSTM(eps=0)(**exact, backend="reference"), 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [-300.0, 0.0, 300.0, 1e4])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_keys_of_zero_give_an_output_of_zero_and_finite_gradients(backend, size, eps):
    x = inputs()
    x["k"] = 0 * x["k"]
    x["i"] = x["i"] + size
    out, pullback = pa.MLSTM(eps=eps).vjp(**x, backend=backend)
    assert np.all(out == 0)
    assert all(np.all(np.isfinite(a)) for a in pullback(np.ones_like(out)).values())


def test_values_whose_weights_cancel_have_the_branch_of_the_maximum():
    """n·q = 0 and C·q is not: o is C·q e^{m}, with a gradient of the input gate of its own size."""
    x = {
        "q": np.ones((1, 2, 1, 1)),
        "k": np.asarray([1.0, -1.0]).reshape(1, 2, 1, 1),
        "v": np.asarray([3.0, 1.0]).reshape(1, 2, 1, 1),
        "g": np.zeros((1, 2, 1)),
        "i": np.zeros((1, 2, 1)),
    }
    out, pullback = pa.MLSTM(eps=0).vjp(**x)
    np.testing.assert_allclose(out.ravel(), [3.0, 2.0])
    gradients = pullback(np.asarray([0.0, 1.0]).reshape(out.shape))
    np.testing.assert_allclose(gradients["i"].ravel(), [3.0, -1.0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_where_all_keys_are_masked_nothing_is_kept_and_the_maximum_stays(backend):
    m, x = pa.MLSTM(), inputs()
    is_kept = np.asarray([[False] * 70, [True] * 70])
    cache = m.init_cache(**x)
    out, last, pullback = m.extend_vjp(cache, **x, key_mask=is_kept, backend=backend)
    assert np.all(out[0] == 0)
    for name, array in last.store.items():
        np.testing.assert_array_equal(array[0], cache.store[name][0])
    assert np.all(np.isneginf(last.store[names_of(last)[2]][0]))
    gradients, d_first = pullback(np.ones_like(out))
    assert all(np.all(np.isfinite(a)) for a in (*gradients.values(), *d_first.values()))
    assert all(np.all(a[0] == 0) for a in gradients.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_half_precision_states_are_in_float32_and_continue_the_full_call(dtype):
    """Only the inputs and the output are rounded, so that a split changes no bit but by float32."""
    torch = pytest.importorskip("torch")
    x = {name: torch.tensor(a).to(getattr(torch, dtype)) for name, a in inputs(size=9.0).items()}
    m = pa.MLSTM()
    full = m(**x)
    cache, outs = m.init_cache(**x), []
    assert {str(a.dtype) for a in cache.store.values()} == {"torch.float32"}
    for part in (slice(0, 1), slice(1, 64), slice(64, 70)):
        out, cache = m.extend(cache, **{name: a[:, part] for name, a in x.items()})
        outs.append(out)
    assert full.dtype == getattr(torch, dtype)
    exact = m(**{name: a.double() for name, a in x.items()})
    unit = torch.finfo(full.dtype).eps
    for out in (full, torch.cat(outs, dim=1)):
        assert torch.all((out - exact).abs() <= unit * exact.abs() + 1e-4)


@pytest.mark.thorough
def test_where_gates_are_equal_jax_differentiates_an_extension_as_the_closed_form_does():
    """JAX differentiates the operations. The maximum is 0, too, which two exponents begin at."""
    jax = pytest.importorskip("jax")
    m, x = pa.MLSTM(), inputs(s=3)
    x["g"], x["i"] = 0 * x["g"], 0 * x["i"]
    cache = a_cache(m, x)
    cache.store[names_of(cache)[2]][:] = -1.0
    out, last, pullback = m.extend_vjp(cache, **x)
    d_out, d_last = np.sin(out), {name: np.cos(array) for name, array in last.store.items()}
    length = jax.numpy.asarray(cache.length)

    def total(x, store):
        out, last = m.extend(pa.Cache(length, store, cache.kinds), **x, backend="reference")
        return (out * d_out).sum() + sum((last.store[n] * d).sum() for n, d in d_last.items())

    given = jax.tree.map(jax.numpy.asarray, (x, dict(cache.store)))
    found = jax.grad(total, (0, 1))(*given)
    for result, expected in zip(found, pullback(d_out, d_last), strict=True):
        for name, array in expected.items():
            close(np.asarray(result[name]), array)
