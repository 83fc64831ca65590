"""States that are kept between new tokens, so that `crop` can go back to them."""

import re

import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance import libraries
from precondattn_conformance.inputs import CallLayout, make_inputs, slice_tokens

HELD, LENGTH = 3, 9
MECHANISMS = ["linear", "mlstm", "gated_delta", "differential(ccq(gla))", "ccq(softmax)"]


def inputs_of(m):
    return make_inputs(m, CallLayout("test", b=2, t=LENGTH, s=LENGTH), "random")


def start(m, x, **named):
    cache = m.init_cache(**x, capacity=20, **named)
    return m.extend(cache, **slice_tokens(m, x, 0, HELD))[1]


def assert_same(cropped, expected):
    np.testing.assert_array_equal(cropped.length, expected.length)
    for name, buffer in expected.store.items():
        np.testing.assert_allclose(cropped.store[name], buffer, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("keep", [2, 6, 8])
@pytest.mark.parametrize("expression", MECHANISMS)
def test_a_cropped_state_never_had_the_tokens(expression, keep):
    m = pa.parse(expression)
    x = inputs_of(m)
    cache, new = start(m, x), slice_tokens(m, x, HELD, LENGTH)
    before = {name: buffer.copy() for name, buffer in cache.store.items()}
    out, longer = m.extend(cache, **new, keep=keep)
    np.testing.assert_allclose(out, m.extend(cache, **new)[0], atol=1e-12)
    assert all((cache.store[name] == buffer).all() for name, buffer in before.items())
    fewest = max(LENGTH - keep, HELD)
    for left in range(fewest, LENGTH + 1):
        expected = cache
        if left > HELD:
            _, expected = m.extend(cache, **slice_tokens(m, x, HELD, left))
        assert_same(longer.crop(left), expected)
        assert longer.crop(left).kinds == cache.kinds
    with pytest.raises(ValueError, match=f"holds the states of .*tokens; found {fewest - 1}"):
        longer.crop(fewest - 1)


def test_sequences_are_cropped_by_themselves_and_ragged_ones_too():
    m = pa.parse("gla")
    x = inputs_of(m)
    cache, new = start(m, x), slice_tokens(m, x, HELD, LENGTH)
    _, longer = m.extend(cache, **new, lengths=[6, 4], keep=6)
    _, expected = m.extend(cache, **new, lengths=[2, 3])
    assert_same(longer.crop([5, 6]), expected)
    assert_same(longer.reorder([1, 0]).crop([6, 5]), expected.reorder([1, 0]))
    assert_same(pa.Cache.from_state_dict(longer.state_dict()).crop([5, 6]), expected)
    _, longer = m.extend(cache, **new, lengths=[6, 4], keep=1)
    assert longer.checkpoints == [[8], [6]]
    assert_same(longer.crop([8, 6]), m.extend(cache, **new, lengths=[5, 3])[1])
    with pytest.raises(ValueError, match=r"states of 6, 7 tokens; found 5 \(sequence 1"):
        longer.crop([8, 5])


def test_a_cache_with_kept_states_is_extended_donated_and_restored_as_any_other():
    m = pa.parse("gla")
    x = inputs_of(m)
    new = slice_tokens(m, x, HELD, LENGTH)
    _, longer = m.extend(start(m, x), **new, keep=2)
    assert [*longer.states] == ["S"]
    expected, plain = m.extend(m.extend(start(m, x), **new)[1], **new)
    snapshot = longer.snapshot()
    out, after = m.extend(longer, **new)
    np.testing.assert_allclose(out, expected, atol=1e-12)
    assert set(after.store) == set(plain.store)
    _, again = m.extend(after, **new, keep=3)
    assert_same(again.restore(snapshot), m.extend(start(m, x), **new)[1])
    out, _, _ = m.extend_vjp(longer, **new)
    np.testing.assert_allclose(out, expected, atol=1e-12)
    m.extend(longer, **new, donate=True)
    with pytest.raises(ValueError, match="was donated"):
        m.extend(longer, **new)


def test_masked_keys_and_a_bias_of_pairs_are_divided_too():
    m = pa.parse("ccq(softmax[bias=true])")
    x = make_inputs(m, CallLayout("test", b=2, t=LENGTH, s=LENGTH), "random")
    x["bias"] = np.random.default_rng(0).normal(size=(1, 1, LENGTH, 20))
    mask = np.ones((2, LENGTH), bool)
    mask[:, [1, 7]] = False
    cache = m.init_cache(**x, capacity=20, key_mask=True)
    expected, whole = m.extend(cache, **x, key_mask=mask)
    out, longer = m.extend(cache, **x, key_mask=mask, keep=3)
    np.testing.assert_allclose(out, expected, atol=1e-12)
    assert_same(longer, whole)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_gradients_pass_through_a_crop(library):
    pytest.importorskip(library)
    lib, m = libraries.named(library), pa.Linear(scale=1.0)
    x = {name: lib.array(a, "float64") for name, a in inputs_of(m).items()}

    def total(v):
        _, cache = m.extend(m.init_cache(**x), x["q"], x["k"], v, keep=4)
        return cache.crop([6, 8]).states["S"].sum()

    if library == "jax":
        import jax

        gradient = jax.grad(jax.jit(total))(x["v"])
    else:
        v = x["v"].requires_grad_()
        total(v).backward()
        gradient = v.grad
    gradient = np.asarray(gradient)
    is_read = np.abs(gradient).sum((2, 3)) > 0
    assert is_read.sum(1).tolist() == [6, 8]


def test_a_traced_length_before_the_kept_states_gives_nan():
    jax = pytest.importorskip("jax")
    m = pa.parse("linear")
    x = {name: jax.numpy.asarray(a) for name, a in inputs_of(m).items()}
    _, cache = m.extend(m.init_cache(**x), **x, keep=2)

    @jax.jit
    def cropped(length):
        return m.extend(cache.crop(length), **x)[0]

    assert not np.isnan(cropped(jax.numpy.asarray([7, 8]))).any()
    is_nan = np.isnan(cropped(jax.numpy.asarray([6, 8])))
    assert is_nan[0].all()
    assert not is_nan[1].any()


def test_half_precision_keeps_states_in_float32():
    pytest.importorskip("torch")
    lib, m = libraries.named("torch"), pa.parse("gla")
    x = {name: lib.array(a, "float16") for name, a in inputs_of(m).items()}
    _, cache = m.extend(m.init_cache(**x), **x, keep=2)
    cropped = cache.to(dtype="float16").crop(8)
    assert str(cropped.states["S"].dtype) == "torch.float32"


Q, K, V = np.random.default_rng(0).normal(size=(3, 1, 6, 2, 4))
BAD = {
    "negative": ({"keep": -1}, "keep must be a whole number, 0 or above; found -1"),
    "boolean": ({"keep": True}, "keep must be a whole number, 0 or above; found True"),
    "every": (
        {"states_every": 0},
        "states_every must be a whole number, 1 or above; found 0",
    ),
    "both": ({"keep": 1, "states_every": 64}, "keep and states_every are two ways to keep states"),
    "lengths": ({"keep": 1, "lengths": [7]}, "lengths must lie between 0 and t = 6"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_keep_is_refused(case):
    options, text = BAD[case]
    linear = pa.Linear()
    with pytest.raises(ValueError, match="^linear: " + re.escape(text)):
        linear.extend(linear.init_cache(Q, K, V), Q, K, V, **options)


def test_rewritten_rows_and_windows_can_not_be_kept():
    for m, name in ((pa.Path(), "path(k,w,beta)"), (pa.Softmax(window=2), "first_token")):
        x = inputs_of(m)
        cache = m.init_cache(**x, capacity=20)
        with pytest.raises(ValueError, match=f"keep is for states; {re.escape(repr(name))} of"):
            m.extend(cache, **x, keep=1)


def test_tokens_that_do_not_fit_leave_a_donated_cache_as_it_was():
    m = pa.parse("ccq(softmax)")
    x = inputs_of(m)
    cache = m.init_cache(**x, capacity=LENGTH - 1)
    with pytest.raises(ValueError, match="capacity exceeded: the cache holds at most 8 tokens"):
        m.extend(cache, **x, keep=2, donate=True)
    assert not cache.store["k"].any()
