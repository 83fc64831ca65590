"""States: their short names, caches that begin from given ones, and those that `extend` keeps.

`crop` goes back to a kept state, and gives the cache of the prefix alone.
"""

import re
from functools import partial

import numpy as np
import pytest

import precondattn as pa
from precondattn.cache.kinds import Kind
from precondattn_conformance.inputs import slice_tokens
from precondattn_portable.backend import Portable
from precondattn_portable.sizes import ON_CPU
from tests.core import inputs

HELD, LENGTH, CAPACITY = 4, 29, 58
EVERY, KEEP = {"states_every": 8}, {"keep": 6}
inputs_of = partial(inputs.inputs_of, b=2, t=LENGTH)


def empty(m, x, **named):
    return m.init_cache(**x, capacity=CAPACITY, **named)


def start(m, x, lengths=None, **named):
    return m.extend(empty(m, x), **slice_tokens(m, x, 0, HELD), lengths=lengths, **named)[1]


def assert_same(cache, expected):
    assert cache.kinds == expected.kinds
    np.testing.assert_array_equal(np.asarray(cache.length), np.asarray(expected.length))
    for name, buffer in expected.store.items():
        found = np.asarray(cache.store[name])
        np.testing.assert_allclose(found, np.asarray(buffer), atol=1e-12, err_msg=name)


@pytest.fixture(params=[4, 64])
def chunk(request, monkeypatch):
    """Chunks between which the states are known, and longer ones."""
    monkeypatch.setattr(ON_CPU, "chunk", request.param)


ROWS = [
    *(
        (text, EVERY, "numpy", None)
        for text in (
            *("linear[normalize=true]", "gla", "rwkv6", "gsa", "mlstm", "gated_delta", "dplr"),
            *("delta_product", "mesa(linear)", "ccq(softmax)", "differential(ccq(gla))"),
        )
    ),
    *((text, KEEP, "numpy", None) for text in ("mlstm", "ccq(gated_delta)", "ccq(softmax)")),
    *((text, EVERY, "numpy", "reference") for text in ("gated_delta", "ccq(gla)")),
    *((text, EVERY, "torch", None) for text in ("kda", "ccq(gated_delta)")),
    ("gated_delta", EVERY, "jax", None),
]


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize(("expression", "option", "library", "backend"), ROWS)
def test_a_cropped_cache_never_had_the_tokens(expression, option, library, backend):
    m = pa.parse(expression)
    x = inputs_of(m, library)
    cache, new = start(m, x, backend=backend), slice_tokens(m, x, HELD, LENGTH)
    before = {name: np.asarray(buffer).copy() for name, buffer in cache.store.items()}
    out, longer = m.extend(cache, **new, **option, backend=backend)
    expected, plain = m.extend(cache, **new, backend=backend)
    np.testing.assert_allclose(np.asarray(out), np.asarray(expected), atol=1e-12)
    for name, buffer in before.items():
        np.testing.assert_array_equal(np.asarray(cache.store[name]), buffer)
    kept = [8, 16, 24] if option is EVERY else [*range(LENGTH - 6, LENGTH)]
    assert longer.checkpoints == [kept] * 2
    assert_same(longer.crop(LENGTH), plain)
    for n in (kept[0], kept[-1]):
        checkpoint = longer.crop(n)
        prefix = slice_tokens(m, x, HELD, n)
        assert_same(checkpoint, m.extend(cache, **prefix, backend=backend)[1])
        rest, last = m.extend(checkpoint, **slice_tokens(m, x, n, LENGTH), backend=backend)
        np.testing.assert_allclose(
            np.asarray(rest), np.asarray(expected)[:, n - HELD :], atol=1e-12
        )
        assert_same(last, plain)
    with pytest.raises(ValueError, match=f"holds the states of .*tokens; found {kept[0] - 1}"):
        longer.crop(kept[0] - 1)


KEPT = [[5, 6, 7, 8], [2, 3, 4, 5]]
RAGGED = {
    8: (EVERY, [9, 22], [[8], [8, 16, 24]], [(8, 8), (12, 16), (8, 24)], (12, 17, "24, 24")),
    4: ({"keep": 4}, [6, 4], KEPT, [(5, 4), (8, 2)], (9, 1, "2, 3, 4, 5, 6")),
    1: ({"keep": 1}, [6, 4], [[8], [5]], [(8, 5), (9, 6)], (8, 4, "5, 6")),
}


@pytest.mark.parametrize(
    ("expression", "row"),
    [("gla", 8), ("mlstm", 8), ("ccq(softmax)", 8), ("gated_delta", 4), ("rwkv6", 1)],
)
def test_ragged_sequences_are_cropped_by_themselves(expression, row):
    m, (option, counts, kept, crops, message) = pa.parse(expression), RAGGED[row]
    x = inputs_of(m)
    cache, new = start(m, x, lengths=[3, 2]), slice_tokens(m, x, HELD, LENGTH)
    out, longer = m.extend(cache, **new, lengths=counts, **option)
    expected, plain = m.extend(cache, **new, lengths=counts)
    np.testing.assert_allclose(out, expected, atol=1e-12)
    assert_same(longer.crop([3 + counts[0], 2 + counts[1]]), plain)
    assert longer.checkpoints == kept
    saved = pa.Cache.from_state_dict(longer.state_dict())
    for first, second in crops:
        alone = m.extend(cache, **new, lengths=[first - 3, second - 2])[1]
        assert_same(longer.crop([first, second]), alone)
        assert_same(saved.crop([first, second]), alone)
        assert_same(longer.reorder([1, 0]).crop([second, first]), alone.reorder([1, 0]))
    first, second, words = message
    with pytest.raises(ValueError, match=rf"{words} tokens; found {second} \(sequence 1"):
        longer.crop([first, second])


def test_packed_sequences_have_checkpoints_of_their_own():
    m = pa.parse("ccq(gla)")
    x = inputs_of(m, b=1, t=70)
    bounds = [0, 20, 20, 61, 70]
    cache = m.init_cache(**x, sequences=4)
    for option, lengths in (
        (EVERY, [[8, 16], [], [8, 16, 24, 32, 40], [8]]),
        ({"keep": 2}, [[18, 19], [0], [39, 40], [7, 8]]),
    ):
        out, longer = m.extend(cache, **x, cu_seqlens=bounds, **option)
        np.testing.assert_allclose(out, m(**x, cu_seqlens=bounds), atol=1e-12)
        assert longer.checkpoints == lengths
        for n in lengths[2]:
            alone = m.extend(m.init_cache(**x), **slice_tokens(m, x, 20, 20 + n))[1]
            assert_same(longer.select([2]).crop(n), alone)


def test_masked_keys_and_a_bias_of_pairs_are_those_of_the_tokens():
    m = pa.parse("ccq(softmax[bias=true])")
    x = inputs_of(m)
    x["bias"] = np.random.default_rng(0).normal(size=(1, 1, LENGTH, CAPACITY))
    mask = np.random.default_rng(1).random((2, LENGTH)) < 0.7
    cache = empty(m, x, key_mask=True)
    expected, plain = m.extend(cache, **x, key_mask=mask)
    first = m.extend(cache, **slice_tokens(m, x, 0, 16), key_mask=mask[:, :16])[1]
    for option in (EVERY, {"keep": 13}):
        out, longer = m.extend(cache, **x, key_mask=mask, **option)
        np.testing.assert_allclose(out, expected, atol=1e-12)
        assert_same(longer.crop(LENGTH), plain)
        assert_same(longer.crop(16), first)


def test_a_cache_with_kept_states_is_extended_donated_and_restored_as_any_other():
    m = pa.parse("gla")
    x = inputs_of(m)
    new = slice_tokens(m, x, HELD, LENGTH)
    _, longer = m.extend(start(m, x), **new, keep=2)
    assert [*longer.states] == ["S"]
    expected, plain = m.extend(m.extend(start(m, x), **new)[1], **new)
    out, after = m.extend(longer, **new)
    np.testing.assert_allclose(out, expected, atol=1e-12)
    assert set(after.store) == set(plain.store)
    _, again = m.extend(after, **new, keep=3)
    assert_same(again.restore(longer.snapshot()), m.extend(start(m, x), **new)[1])
    out, _, _ = m.extend_vjp(longer, **new)
    np.testing.assert_allclose(out, expected, atol=1e-12)
    states = longer.crop(28).store
    before = {name: state.copy() for name, state in states.items()}
    m.extend(longer, **new, donate=True)
    assert all((states[name] == state).all() for name, state in before.items())
    with pytest.raises(ValueError, match="was donated"):
        m.extend(longer, **new)


def test_a_nan_reaches_the_states_after_it_and_no_others():
    m = pa.parse("gated_delta")
    x = inputs_of(m)
    x["k"][0, 10] = np.nan
    _, longer = m.extend(empty(m, x), **x, **EVERY)
    for n, is_nan in ((8, False), (16, True), (24, True)):
        states = longer.crop(n).states["S"]
        assert np.isnan(states[0]).any() == is_nan
        assert not np.isnan(states[1]).any()


@pytest.mark.parametrize(("library", "option"), [("torch", EVERY), ("jax", {"keep": 22})])
def test_gradients_pass_through_a_crop(library, option):
    m = pa.Linear(scale=1.0)
    x = inputs_of(m, library)

    def total(v):
        _, cache = m.extend(m.init_cache(**x), x["q"], x["k"], v, **option)
        return cache.crop([8, 24]).states["S"].sum()

    if library == "jax":
        import jax

        gradient = jax.grad(jax.jit(total))(x["v"])
    else:
        v = x["v"].requires_grad_()
        total(v).backward()
        gradient = v.grad
    is_read = np.abs(np.asarray(gradient)).sum((2, 3)) > 0
    np.testing.assert_array_equal(is_read, np.arange(LENGTH) < [[8], [24]])


def test_traced_lengths_give_the_same_states_and_nan_where_none_is_kept():
    jax = pytest.importorskip("jax")
    m = pa.parse("linear")
    x = inputs_of(m, "jax")
    cache, new = start(m, x, lengths=[3, 2]), slice_tokens(m, x, HELD, LENGTH)

    @jax.jit
    def cropped(cache, lengths):
        options = EVERY, {"keep": 13}
        caches = [m.extend(cache, **new, **option)[1].crop(lengths) for option in options]
        return [(cache.states["S"], m.extend(cache, **new)[0]) for cache in caches]

    for lengths in ([16, 16], [28, 24]):
        counts = [lengths[0] - 3, lengths[1] - 2]
        expected = m.extend(cache, **new, lengths=counts)[1].states["S"]
        for found, out in cropped(cache, jax.numpy.asarray(lengths)):
            assert not np.isnan(out).any()
            np.testing.assert_allclose(found, expected, atol=1e-5)
    for _, out in cropped(cache, jax.numpy.asarray([9, 16])):
        assert np.isnan(out[0]).all()
        assert not np.isnan(out[1]).any()


def test_caches_of_tokens_and_calls_of_few_tokens_keep_no_states():
    for expression in ("softmax", "lucid(laser)"):
        m = pa.parse(expression)
        x = inputs_of(m)
        _, longer = m.extend(empty(m, x), **x, **EVERY)
        assert longer.can_crop
        assert longer.checkpoints == [[], []]
        assert_same(longer.crop(8), m.extend(empty(m, x), **slice_tokens(m, x, 0, 8))[1])
    m = pa.parse("gla")
    x = inputs_of(m, t=5)
    out, longer = m.extend(m.init_cache(**x), **x, **EVERY)
    np.testing.assert_allclose(out, m(**x), atol=1e-12)
    assert longer.checkpoints == [[], []]
    nothing = slice_tokens(m, x, 0, 0)
    assert m.extend(longer, **nothing, **EVERY)[1].length.tolist() == [5, 5]


def test_parts_of_ragged_lengths_are_planned_for_a_backend_that_has_them(register):
    class Unmasked(Portable):
        name = "unmasked"

        def prepare(self, piece, request):
            if "lengths" in request.masks:
                return "has no lengths"
            return super().prepare(piece, request)

    m = pa.parse("gla")
    x = inputs_of(m)
    cache = start(m, x, lengths=[3, 2])
    register(Unmasked())
    m.extend(cache, **x, backend="unmasked")
    m.extend(empty(m, x), **x, **EVERY, backend="unmasked")
    with pytest.raises(pa.UnsupportedError, match="has no lengths"):
        m.extend(cache, **x, **EVERY, backend="unmasked")


REFUSED = [
    ("linear", {"keep": -1}, "linear: keep must be a whole number, 0 or above; found -1"),
    ("linear", {"states_every": 0}, "states_every must be a whole number, 1 or above; found 0"),
    ("linear", {**EVERY, **KEEP}, "keep and states_every are two ways to keep states"),
    ("linear", {**KEEP, "lengths": [7, 99]}, "lengths must lie between 0 and t = 29"),
    *(
        (text, option, f"{next(iter(option))} is for states; {name!r} of")
        for text, name, option in (
            ("path", "path(k,w,beta)", KEEP),
            ("softmax[window=2]", "first_token", EVERY),
        )
    ),
]


@pytest.mark.parametrize(("expression", "options", "words"), REFUSED)
def test_bad_ways_to_keep_states_are_refused(expression, options, words):
    m = pa.parse(expression)
    x = inputs_of(m)
    with pytest.raises(
        ValueError, match=f"^{re.escape(expression)}: .*{re.escape(words)}|^{words}"
    ):
        m.extend(empty(m, x), **x, **options)


@pytest.mark.parametrize("option", [KEEP, EVERY])
def test_a_pullback_keeps_no_states_and_a_donated_cache_that_is_too_small_stays(option):
    m = pa.parse("gla")
    x = inputs_of(m)
    words = f"unknown keyword {next(iter(option))!r}"
    with pytest.raises(TypeError, match=words):
        m.extend_vjp(m.init_cache(**x), **x, **option)
    m = pa.parse("ccq(softmax)")
    x = inputs_of(m)
    cache = m.init_cache(**x, capacity=LENGTH - 1)
    with pytest.raises(ValueError, match="capacity exceeded: the cache holds at most 28 tokens"):
        m.extend(cache, **x, **option, donate=True)
    assert not cache.store["k"].any()


NAMES = {
    "linear": ["S"],
    "linear[normalize=true]": ["S", "z"],
    "gsa": ["K", "V"],
    "mlstm": ["C", "n", "m"],
    "atk(kda)": ["A", "S"],
    "mesa(ssd)": ["H", "S"],
    "ccq(gated_delta)": ["second_moment", "first_moment", "count", "S"],
    "differential(linear)": ["S(k, v)", "S(k2, v)"],
    "lucid": [],
}


@pytest.mark.parametrize("expression", NAMES)
def test_states_have_the_names_of_their_page_and_begin_another_cache(expression):
    m = pa.parse(expression)
    x = inputs_of(m, t=9)
    cache = m.init_cache(**x, capacity=9)
    assert [*cache.states] == NAMES[expression]
    assert [*pa.Cache.from_state_dict(cache.reorder([1, 0]).state_dict()).states] == [*cache.states]
    states = [cache.store[n] for n, kind in cache.kinds.items() if "state" in next(iter(kind))]
    assert all(a is b for a, b in zip(cache.states.values(), states, strict=True))
    with pytest.raises(TypeError, match="does not support item assignment"):
        cache.states["S"] = None
    if states:
        _, prompt = m.extend(m.init_cache(**x), **slice_tokens(m, x, 0, 5))
        begun = m.init_cache(**x, states=prompt.states)
        for name, state in begun.states.items():
            assert not np.shares_memory(state, prompt.states[name])
        rest = slice_tokens(m, x, 5, 9)
        np.testing.assert_array_equal(m.extend(begun, **rest)[0], m.extend(prompt, **rest)[0])


def test_the_gradient_passes_to_the_initial_state():
    torch = pytest.importorskip("torch")
    q, k, v = torch.randn(3, 1, 4, 2, 3, dtype=torch.float64)
    linear = pa.Linear(scale=1.0)
    initial = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    out, _ = linear.extend(linear.init_cache(q, k, v, states={"S": initial}), q, k, v)
    out.sum().backward()
    expected = q.sum(1)[..., None].expand(1, 2, 3, 3)
    torch.testing.assert_close(initial.grad, expected)


def test_the_text_of_a_kind_is_read_back_and_another_is_refused():
    for text in ("state S", "wide state S", "state", "wide tokens", "window 8"):
        assert str(Kind.read(text)) == text
    for text in ("tokens S", "state ", "states"):
        with pytest.raises(ValueError, match="is no kind of a buffer"):
            Kind.read(text)


STATE = np.zeros((2, 4, 8, 8))
Q = np.zeros((2, 5, 4, 8))
NORMALISED = "linear[normalize=true]"
BAD = {
    "missing": (NORMALISED, {"S": STATE}, ValueError, "S, z belong together; missing z"),
    "name": (NORMALISED, {"s": STATE}, ValueError, "states has no 's'; the states are S, z"),
    "twice": (
        NORMALISED,
        {"S": STATE, "linear.state(k, v)": STATE},
        ValueError,
        r"states\['linear.state\(k, v\)'\] is given by two names",
    ),
    "layout": (
        NORMALISED,
        {"S": np.swapaxes(STATE, 0, 1)},
        pa.ShapeError,
        r"states\['S'\] must have shape \(b, n, d, e\), here \(2, 4, 8, 8\); found \(4, 2, 8, 8\)",
    ),
    "dtype": (NORMALISED, {"S": STATE.astype("f4")}, TypeError, "float64; found float32"),
    "list": (NORMALISED, {"S": STATE.tolist()}, TypeError, "an array of numpy, .*; found list"),
    "number": (NORMALISED, {"S": STATE[:1]}, pa.ShapeError, "write sequences=1"),
    "array": (NORMALISED, STATE, TypeError, "must be a dict of arrays by name, .*; found ndarray"),
    "tokens": ("softmax", {"S": STATE}, ValueError, "holds tokens and no states; found states"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_states_are_refused_by_name(case):
    expression, states, error, words = BAD[case]
    m = pa.parse(expression)
    with pytest.raises(error, match=words) as caught:
        m.init_cache(Q, Q, Q, states=states, capacity=5)
    assert str(caught.value).startswith(f"{expression}: ")
    with pytest.raises(ValueError, match="sequences must be a whole number, 1 or above"):
        m.init_cache(Q[:1], Q[:1], Q[:1], capacity=5, sequences=0)


def test_half_precision_takes_states_in_float32():
    torch = pytest.importorskip("torch")
    q, m = torch.from_numpy(Q).half(), pa.Linear()
    state = m.init_cache(q, q, q).states["S"]
    assert m.init_cache(q, q, q, states={"S": state}).states["S"].dtype == torch.float32
    with pytest.raises(TypeError, match=r"states\['S'\] must have dtype float32; found float16"):
        m.init_cache(q, q, q, states={"S": state.half()})
    _, kept = m.extend(m.init_cache(q, q, q), q, q, q, keep=2)
    assert kept.to(dtype="float16").crop(3).states["S"].dtype == torch.float32
