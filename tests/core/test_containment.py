"""A NaN or infinity in the inputs spoils later outputs of its own segment, and nothing else."""

from itertools import product

import numpy as np
import pytest

import precondattn as pa
from precondattn.arrays import running_maximum
from precondattn.execution.containment import INF, NAN
from precondattn.execution.preparation import examined
from precondattn.frameworks import of
from precondattn_conformance import libraries
from precondattn_conformance.inputs import CallLayout, make_inputs
from tests.core.inputs import LIBRARIES, assert_same_in

T, BAD = 9, 5
LAYOUT = CallLayout("short", b=2, t=T, s=T, h=4, n=2, d=4, e=3, values_per_head=2)
SEGMENTS = np.asarray([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 0, 0, 0, 1, 1, 1, 1, 2]])


def inputs_of(mechanism, **bad):
    """Inputs with bad entries at one token of one key/value head of the first sequence."""
    x = make_inputs(mechanism, LAYOUT, "random")
    for name, value in bad.items():
        x[name][0, BAD, 0] = value
    return x


def moved(name, x):
    """A library, and inputs in its arrays of float64."""
    if name not in libraries.installed():
        pytest.skip(f"{name} is not installed")
    library = libraries.named(name, None)
    return library, {each: library.array(array, "float64") for each, array in x.items()}


@pytest.mark.parametrize("backend", ["reference", None])
@pytest.mark.parametrize(
    ("name", "expression"),
    [
        *(("numpy", "softmax"), ("torch", "laser"), ("jax", "laser")),
        ("numpy", "laser(softmax[causal=false])"),
    ],
)
def test_attention_with_a_bad_key_is_nan(name, expression, backend):
    """In LASER, the logarithm of a sum that is NaN is not that of an empty sum."""
    m = pa.parse(expression)
    first = BAD if m.offers.causal else 0
    library, x = moved(name, inputs_of(m, k=np.nan))
    out = library.numpy(m(**x, backend=backend))
    assert np.isnan(out[0, first:, :2]).all()
    assert np.isfinite(out[0, :first]).all()
    assert np.isfinite(out[1]).all()


def test_the_gradient_by_autograd_of_other_segments_is_that_without_the_bad_one():
    torch = pytest.importorskip("torch")
    m = pa.parse("softmax")
    segments = torch.tensor(SEGMENTS)
    other = SEGMENTS[:, BAD : BAD + 1] != SEGMENTS

    def gradients(x):
        x = {name: torch.tensor(a, requires_grad=True) for name, a in x.items()}
        out = m(**x, segment_ids=segments)
        out[torch.tensor(other)].square().sum().backward()
        return {name: a.grad.numpy() for name, a in x.items()}

    expected = gradients(inputs_of(m))
    for name, found in gradients(inputs_of(m, v=np.nan)).items():
        np.testing.assert_allclose(found[other], expected[name][other], rtol=1e-9, atol=1e-12)


def test_under_jit_the_gradient_of_other_segments_is_that_without_the_bad_one():
    jax = pytest.importorskip("jax")
    m = pa.parse("lucid")
    other = SEGMENTS[:, BAD : BAD + 1] != SEGMENTS

    @jax.jit
    @jax.grad
    def gradient(x):
        out = m(**x, segment_ids=jax.numpy.asarray(SEGMENTS))
        return (jax.numpy.where(other[:, :, None, None], out, 0.0) ** 2).sum()

    with jax.enable_x64():
        expected = gradient(inputs_of(m))
        for name, found in gradient(inputs_of(m, v=np.nan)).items():
            np.testing.assert_allclose(found[other], expected[name][other], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_a_gate_of_minus_infinity_is_not_bad(name):
    m = pa.GatedDelta()
    library, x = moved(name, inputs_of(m, g=-np.inf))
    assert np.isfinite(library.numpy(m(**x, segment_ids=library.array(SEGMENTS)))).all()
    _, x = moved(name, inputs_of(m, g=-np.inf, k=np.nan))
    assert np.isnan(library.numpy(m(**x))[0, BAD:, :2]).all()


@pytest.mark.parametrize(
    ("text", "bad", "packed", "expected"),
    [
        ("gla", "q", True, [BAD]),
        ("softmax[window=2]", "v", True, [BAD, BAD + 1]),
        ("softmax[window=2,causal=false]", "v", True, [BAD - 1, BAD, BAD + 1]),
        ("lucid", "k", False, [5, 6, 7, 8]),
    ],
)
def test_which_outputs_a_bad_entry_spoils(text, bad, packed, expected):
    m = pa.parse(text)
    x = inputs_of(m, **{bad: np.nan})
    start = 0 if packed else 3  # The last queries, or all of one segment.
    x["q"] = x["q"][:, start:]
    out = m(**x, **({"segment_ids": np.zeros((2, T), dtype=int)} if packed else {}))
    is_bad = np.isnan(out).any(axis=(0, 2, 3))
    assert (start + np.flatnonzero(is_bad)).tolist() == expected


@pytest.mark.parametrize(
    ("name", "expression"),
    [
        *(("torch", "lucid"), ("numpy", "gated_delta"), ("numpy", "path")),
        *(("torch", "gated_delta"), ("torch", "lucid(path[flush=3])")),
    ],
)
def test_a_block_of_new_tokens_leaves_nan_in_the_cache(name, expression):
    m = pa.parse(expression)
    expected = m(**inputs_of(m))
    library, x = moved(name, inputs_of(m, k=np.nan))
    cache = m.init_cache(**x, capacity=T)
    first = {name: array[:, :-1] for name, array in x.items()}
    last = {name: array[:, -1:] for name, array in x.items()}
    out, cache = m.extend(cache, **first, backend="reference")
    after, _ = m.extend(cache, **last, backend="reference")
    out, after = library.numpy(out), library.numpy(after)
    np.testing.assert_allclose(out[0, :BAD], expected[0, :BAD], rtol=1e-9)
    np.testing.assert_allclose(out[1], expected[1, :-1], rtol=1e-9)
    assert np.isnan(out[0, BAD:, :2]).all()
    assert np.isnan(after[0, :, :2]).all()
    np.testing.assert_allclose(after[0, :, 2:], expected[0, -1:, 2:], rtol=1e-9)


def test_the_cotangent_of_a_nan_state_is_not_used():
    m = pa.parse("gated_delta")
    x = inputs_of(m, k=np.nan)
    out, extended, pullback = m.extend_vjp(m.init_cache(**x), **x)
    gradients, d_past = pullback(np.ones_like(out), extended)
    for array in (*gradients.values(), *d_past.values()):
        assert np.isfinite(array).all()


@pytest.mark.parametrize("expression", ["lucid", "ccq"])
def test_a_masked_key_reaches_no_output_and_no_gradient(expression):
    m = pa.parse(expression)
    masks = {"key_mask": np.broadcast_to(np.arange(T) != BAD, (2, T))}
    expected, pullback = m.vjp(**inputs_of(m), **masks)
    cotangent = np.random.default_rng(1).normal(size=expected.shape)
    out, pullback_of_bad = m.vjp(**inputs_of(m, k=np.nan, v=np.inf), **masks)
    assert np.array_equal(out, expected)
    exact = pullback(cotangent)
    for name, gradient in pullback_of_bad(cotangent).items():
        assert np.array_equal(gradient, exact[name])


def test_a_sum_that_overflows_is_not_taken_for_infinity():
    torch = pytest.importorskip("torch")
    x = {name: torch.tensor(a) for name, a in inputs_of(pa.parse("linear")).items()}
    k = torch.full_like(x["k"], 1e307)
    expected = pa.linear(x["q"], torch.ones_like(k), x["v"]) * 1e307
    torch.testing.assert_close(pa.linear(x["q"], k, x["v"]), expected)


def test_on_an_accelerator_an_examined_input_is_read_in_one_pass():
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    class Written(TorchDispatchMode):
        """The operators with a result as large as the keys."""

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.numel() >= x["k"].numel():
                found.append(str(function))
            return out

    found = []
    m = pa.GatedDelta()
    x = {name: torch.from_numpy(array).to("meta") for name, array in inputs_of(m).items()}
    m(**x, backend="reference")
    with Written(), torch.no_grad():
        m(**x, backend="reference")
    # The keys with 0 in bad rows, the call itself, and its output with NaN.
    assert [each for each in found if "where" in each] == ["aten.where.self"] * 2
    assert not [each for each in found if each.split(".")[1] in ("isfinite", "abs", "eq", "ne")]


def test_the_largest_numbers_of_a_dtype_are_not_taken_for_infinity():
    torch = pytest.importorskip("torch")
    pattern = pa.GatedDelta().inputs["k"]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        keys = torch.full((2, 3, 1, 33), torch.finfo(dtype).max, dtype=dtype)
        keys[0, 1, 0, 32], keys[1, 2, 0, 0] = NAN, -INF
        good = of(keys).good_along(keys, (3,), pattern.low)
        assert good.reshape(2, 3).tolist() == [[True, False, True], [True, True, False]], dtype


@pytest.mark.parametrize("expression", ["lucid", "gated_delta", "gla", "path", "ccq(gated_delta)"])
def test_pytorchs_few_operators_find_the_rows_that_numpy_finds(expression):
    """Each example has a bad entry of one input, of one key/value head."""
    m = pa.parse(expression)
    for name, bad in product(examined(m, is_packed=False), (NAN, INF, -INF)):
        x = inputs_of(m, **{name: bad})
        out, pullback = m.vjp(**x)
        library, x = moved("torch", x)
        x = {each: array.requires_grad_() for each, array in x.items()}
        found = m(**x)
        np.testing.assert_allclose(found.detach(), out, rtol=1e-9, err_msg=f"{name}, {bad}")
        cotangent = np.random.default_rng(1).normal(size=out.shape)
        found.backward(library.array(cotangent, "float64"))
        for each, gradient in pullback(cotangent).items():
            np.testing.assert_allclose(x[each].grad, gradient, rtol=1e-9, atol=1e-12)


def test_softmax_and_pieces_of_single_tokens_are_not_examined():
    for expression in ("softmax", "laser", "differential"):
        assert not examined(pa.parse(expression), is_packed=False)
        assert examined(pa.parse(expression), is_packed=True)
    assert not examined(pa.parse("l2_norm"), is_packed=True)
    assert tuple(examined(pa.parse("path"), is_packed=False)) == ("k", "w", "beta")


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_running_maximum(library):
    numbers = np.random.default_rng(0).integers(0, 99, size=(3, 13, 2))
    expected = np.maximum.accumulate(numbers, axis=1)
    np.testing.assert_array_equal(running_maximum(numbers, axis=1), expected)
    assert_same_in(library, running_maximum, numbers, axis=1)
