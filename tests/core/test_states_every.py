"""`extend(..., states_every=m)`: the states of every m-th token, from one prefill."""

import re

import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance import libraries
from precondattn_conformance.inputs import CallLayout, make_inputs, slice_tokens
from precondattn_portable import chunkwise
from precondattn_portable.backend import Portable
from precondattn_portable.stateful import StatefulAlgorithm

EVERY, LENGTH = 8, 29
WITH_STATES = [
    "linear",
    "linear[normalize=true]",
    "retention",
    "ssd",
    "gla",
    "hgrn2",
    "gsa",
    "rwkv6",
    "mlstm",
    "delta",
    "gated_delta",
    "kda",
    "gdn2",
    "comba",
    "dplr",
    "delta_product",
    "mesa(linear)",
    "atk(gated_delta)",
    "ccq(gated_delta)",
    "ccq(softmax)",
    "differential(ccq(gla))",
]


def inputs_of(m, b=2, t=LENGTH):
    return make_inputs(m, CallLayout("test", b=b, t=t, s=t), "random")


def empty(m, x, **named):
    return m.init_cache(**x, capacity=2 * LENGTH, **named)


def assert_same(cache, expected):
    assert cache.kinds == expected.kinds
    np.testing.assert_array_equal(np.asarray(cache.length), np.asarray(expected.length))
    for name, buffer in expected.store.items():
        found = np.asarray(cache.store[name])
        np.testing.assert_allclose(found, np.asarray(buffer), atol=1e-12, err_msg=name)


def check(m, x, backend=None):
    cache = empty(m, x)
    out, longer = m.extend(cache, **x, states_every=EVERY, backend=backend)
    expected, plain = m.extend(cache, **x, backend=backend)
    np.testing.assert_allclose(np.asarray(out), np.asarray(expected), atol=1e-12)
    assert_same(longer.crop(LENGTH), plain)
    assert longer.checkpoints == [[8, 16, 24]] * 2
    for n in (8, 24):
        checkpoint = longer.crop(n)
        assert_same(checkpoint, m.extend(cache, **slice_tokens(m, x, 0, n), backend=backend)[1])
        rest, last = m.extend(checkpoint, **slice_tokens(m, x, n, LENGTH), backend=backend)
        np.testing.assert_allclose(np.asarray(rest), np.asarray(expected)[:, n:], atol=1e-12)
        assert_same(last, plain)


@pytest.fixture(params=[EVERY // 2, 64])
def chunk(request, monkeypatch):
    """Chunks between which the states are known, and longer ones."""
    monkeypatch.setattr(chunkwise, "CHUNK", request.param)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("expression", WITH_STATES)
def test_each_checkpoint_is_the_cache_of_the_prefix_alone(expression):
    m = pa.parse(expression)
    check(m, inputs_of(m))


def test_chunks_that_end_at_checkpoints_are_computed_together(monkeypatch):
    monkeypatch.setattr(chunkwise, "CHUNK", EVERY)
    lengths, step = [], StatefulAlgorithm.step
    monkeypatch.setattr(
        StatefulAlgorithm, "step", lambda *a: lengths.append(a[2]["k"].shape[1]) or step(*a)
    )
    m = pa.parse("gated_delta")
    x = inputs_of(m)
    m.extend(empty(m, x), **x, states_every=EVERY)
    assert lengths == []
    m.extend(empty(m, x), **x, states_every=EVERY + 1)
    assert lengths == [9, 9, 9, 2]


@pytest.mark.parametrize("expression", ["gated_delta", "mlstm", "ccq(gla)"])
def test_the_reference_gives_checkpoints_too(expression):
    m = pa.parse(expression)
    check(m, inputs_of(m), backend="reference")


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("expression", ["gated_delta", "kda", "delta_product", "ccq(gated_delta)"])
def test_pytorch_gives_checkpoints(expression):
    pytest.importorskip("torch")
    m, lib = pa.parse(expression), libraries.named("torch")
    check(m, {name: lib.array(a, "float64") for name, a in inputs_of(m).items()})


@pytest.mark.parametrize(
    "expression", ["gated_delta", pytest.param("ccq(softmax)", marks=pytest.mark.thorough)]
)
def test_jax_gives_checkpoints(expression):
    pytest.importorskip("jax")
    m, lib = pa.parse(expression), libraries.named("jax")
    check(m, {name: lib.array(a, "float64") for name, a in inputs_of(m).items()})


@pytest.mark.parametrize("expression", ["gated_delta", "mlstm", "rwkv6", "ccq(softmax)"])
def test_lengths_are_those_of_each_sequence_from_its_beginning_on(expression):
    m = pa.parse(expression)
    x = inputs_of(m)
    _, cache = m.extend(empty(m, x), **slice_tokens(m, x, 0, 4), lengths=[4, 3])
    new = slice_tokens(m, x, 4, LENGTH)
    out, longer = m.extend(cache, **new, lengths=[9, 22], states_every=EVERY)
    expected, plain = m.extend(cache, **new, lengths=[9, 22])
    np.testing.assert_allclose(out, expected, atol=1e-12)
    assert_same(longer.crop([13, 25]), plain)
    assert longer.checkpoints == [[8], [8, 16, 24]]
    for first, second in ((8, 8), (13, 16), (8, 24)):
        counts = [first - 4, second - 3]
        assert_same(longer.crop([first, second]), m.extend(cache, **new, lengths=counts)[1])
    with pytest.raises(ValueError, match=r"states of 8, 16, 24, 25 tokens; found 17 \(sequence 1"):
        longer.crop([13, 17])


def test_packed_sequences_have_checkpoints_of_their_own():
    m = pa.parse("ccq(gla)")
    x = inputs_of(m, b=1, t=70)
    bounds = [0, 20, 20, 61, 70]
    cache = m.init_cache(**x, sequences=4)
    for option, lengths in (
        ({"states_every": EVERY}, [[8, 16], [], [8, 16, 24, 32, 40], [8]]),
        ({"keep": 2}, [[18, 19], [0], [39, 40], [7, 8]]),
    ):
        out, longer = m.extend(cache, **x, cu_seqlens=bounds, **option)
        np.testing.assert_allclose(out, m(**x, cu_seqlens=bounds), atol=1e-12)
        assert longer.checkpoints == lengths
        of_third = longer.select([2])
        for n in lengths[2]:
            alone = m.extend(m.init_cache(**x), **slice_tokens(m, x, 20, 20 + n))[1]
            assert_same(of_third.crop(n), alone)


def test_masked_keys_and_a_bias_of_pairs_are_those_of_the_tokens():
    m = pa.parse("ccq(softmax[bias=true])")
    x = inputs_of(m)
    x["bias"] = np.random.default_rng(0).normal(size=(1, 1, LENGTH, 2 * LENGTH))
    mask = np.random.default_rng(1).random((2, LENGTH)) < 0.7
    cache = empty(m, x, key_mask=True)
    expected, plain = m.extend(cache, **x, key_mask=mask)
    out, longer = m.extend(cache, **x, key_mask=mask, states_every=EVERY)
    np.testing.assert_allclose(out, expected, atol=1e-12)
    assert_same(longer.crop(LENGTH), plain)
    first = slice_tokens(m, x, 0, 16)
    assert_same(longer.crop(16), m.extend(cache, **first, key_mask=mask[:, :16])[1])


def test_a_nan_reaches_the_states_after_it_and_no_others():
    m = pa.parse("gated_delta")
    x = inputs_of(m)
    x["k"][0, 10] = np.nan
    _, longer = m.extend(empty(m, x), **x, states_every=EVERY)
    for n, is_nan in ((8, False), (16, True), (24, True)):
        states = longer.crop(n).states["S"]
        assert np.isnan(states[0]).any() == is_nan
        assert not np.isnan(states[1]).any()


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_gradients_pass_through_a_checkpoint(library):
    pytest.importorskip(library)
    lib, m = libraries.named(library), pa.Linear(scale=1.0)
    x = {name: lib.array(a, "float64") for name, a in inputs_of(m).items()}

    def total(v):
        _, cache = m.extend(m.init_cache(**x), x["q"], x["k"], v, states_every=EVERY)
        return cache.crop([8, 24]).states["S"].sum()

    if library == "jax":
        import jax

        gradient = jax.grad(jax.jit(total))(x["v"])
    else:
        v = x["v"].requires_grad_()
        total(v).backward()
        gradient = v.grad
    is_read = np.abs(np.asarray(gradient)).sum((2, 3)) > 0
    assert is_read.sum(1).tolist() == [8, 24]
    assert is_read[1, :24].all()


def test_traced_lengths_give_the_same_checkpoints():
    jax = pytest.importorskip("jax")
    m = pa.parse("linear")
    x = {name: jax.numpy.asarray(a) for name, a in inputs_of(m).items()}
    _, cache = m.extend(m.init_cache(**x), **slice_tokens(m, x, 0, 4), lengths=[4, 3])
    new = slice_tokens(m, x, 4, LENGTH)

    @jax.jit
    def checkpoint(cache, length):
        return m.extend(cache, **new, states_every=EVERY)[1].crop(length)

    for lengths in ([8, 16], [29, 24]):
        found = checkpoint(cache, jax.numpy.asarray(lengths)).states["S"]
        counts = [lengths[0] - 4, lengths[1] - 3]
        expected = m.extend(cache, **new, lengths=counts)[1].states["S"]
        np.testing.assert_allclose(found, expected, atol=1e-5)
    found = checkpoint(cache, jax.numpy.asarray([9, 16]))
    is_nan = np.isnan(jax.jit(m.extend)(found, **new)[0])
    assert is_nan[0].all()
    assert not is_nan[1].any()


def test_caches_of_tokens_keep_nothing_and_are_cropped_to_any_length():
    for expression in ("softmax", "lucid(laser)"):
        m = pa.parse(expression)
        x = inputs_of(m)
        _, longer = m.extend(empty(m, x), **x, states_every=EVERY)
        assert longer.can_crop
        assert longer.checkpoints == [[], []]
        assert_same(longer.crop(8), m.extend(empty(m, x), **slice_tokens(m, x, 0, 8))[1])


def test_windows_and_rewritten_rows_have_no_checkpoints():
    for m, name in ((pa.Path(), "path(k,w,beta)"), (pa.Softmax(window=2), "first_token")):
        x = inputs_of(m)
        text = f"states_every is for states; {re.escape(repr(name))} of this cache can not go back"
        with pytest.raises(ValueError, match=text):
            m.extend(empty(m, x), **x, states_every=EVERY)


def test_fewer_tokens_than_to_the_next_checkpoint_keep_no_states():
    m = pa.parse("gla")
    x = inputs_of(m, t=5)
    out, longer = m.extend(m.init_cache(**x), **x, states_every=EVERY)
    np.testing.assert_allclose(out, m(**x), atol=1e-12)
    assert longer.checkpoints == [[], []]
    with pytest.raises(ValueError, match="holds the states of 5 tokens; found 4"):
        longer.crop(4)
    nothing = slice_tokens(m, x, 0, 0)
    assert m.extend(longer, **nothing, states_every=EVERY)[1].length.tolist() == [5, 5]


def test_the_buffers_of_a_donated_cache_share_no_memory_with_checkpoints():
    m = pa.parse("gated_delta")
    x = inputs_of(m)
    _, longer = m.extend(empty(m, x), **x, states_every=EVERY, donate=True)
    expected = longer.crop(8).store
    before = {name: state.copy() for name, state in expected.items()}
    m.extend(longer, **x, donate=True)
    for name, state in before.items():
        np.testing.assert_array_equal(expected[name], state)


def test_a_pullback_of_checkpoints_is_that_of_extend():
    m = pa.parse("gla")
    x = inputs_of(m)
    for option in ("keep", "states_every"):
        with pytest.raises(TypeError, match=f"extend_vjp has no {option}; .* differentiate extend"):
            m.extend_vjp(m.init_cache(**x), **x, **{option: 8})


def test_parts_of_ragged_lengths_are_planned_for_a_backend_that_has_them():
    class Unmasked(Portable):
        name = "unmasked"

        def prepare(self, piece, request):
            if "lengths" in request.masks:
                return "has no lengths"
            return super().prepare(piece, request)

    m = pa.parse("gla")
    x = inputs_of(m)
    _, cache = m.extend(empty(m, x), **slice_tokens(m, x, 0, 4), lengths=[4, 3])
    pa.register_backend(Unmasked())
    try:
        m.extend(cache, **x, backend="unmasked")
        m.extend(empty(m, x), **x, states_every=EVERY, backend="unmasked")
        with pytest.raises(pa.UnsupportedError, match="has no lengths"):
            m.extend(cache, **x, states_every=EVERY, backend="unmasked")
    finally:
        pa.unregister_backend("unmasked")
