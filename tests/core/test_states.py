"""States that one holds: their short names, and caches that begin from given states.

That a split call gives the output of a full one, for every mechanism, is a conformance check; here
the states are taken from one cache and given to another.
"""

import numpy as np
import pytest

import precondattn as pa
from precondattn.cache.kinds import Kind
from precondattn_conformance.inputs import CallLayout, make_inputs, slice_tokens

LENGTH, SPLIT = 9, 5
NAMES = {
    "linear": ["S"],
    "linear[normalize=true]": ["S", "z"],
    "rwkv6": ["S"],
    "delta_product": ["S"],
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
    x = make_inputs(m, CallLayout("test", b=2, t=LENGTH, s=LENGTH), "random")
    cache = m.init_cache(**x, capacity=LENGTH)
    assert [*cache.states] == NAMES[expression]
    assert [*pa.Cache.from_state_dict(cache.reorder([1, 0]).state_dict()).states] == [*cache.states]
    states = [cache.store[n] for n, kind in cache.kinds.items() if "state" in next(iter(kind))]
    assert all(a is b for a, b in zip(cache.states.values(), states, strict=True))
    with pytest.raises(TypeError, match="does not support item assignment"):
        cache.states["S"] = None
    if states:
        _, prompt = m.extend(m.init_cache(**x), **slice_tokens(m, x, 0, SPLIT))
        begun = m.init_cache(**x, states=prompt.states)
        for name, state in begun.states.items():
            assert not np.shares_memory(state, prompt.states[name])
        rest = slice_tokens(m, x, SPLIT, LENGTH)
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


STATE, MASS = np.zeros((2, 4, 8, 8)), np.zeros((2, 4, 8))
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
    "sequences": (
        NORMALISED,
        {"S": STATE[:1]},
        pa.ShapeError,
        r"found \(1, 4, 8, 8\); write sequences=1",
    ),
    "dtype": (NORMALISED, {"S": STATE.astype("f4")}, TypeError, "float64; found float32"),
    "list": (NORMALISED, {"S": STATE.tolist()}, TypeError, "an array of numpy, .*; found list"),
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


def test_half_precision_takes_states_in_float32():
    torch = pytest.importorskip("torch")
    q, m = torch.from_numpy(Q).half(), pa.Linear()
    state = m.init_cache(q, q, q).states["S"]
    assert m.init_cache(q, q, q, states={"S": state}).states["S"].dtype == torch.float32
    with pytest.raises(TypeError, match=r"states\['S'\] must have dtype float32; found float16"):
        m.init_cache(q, q, q, states={"S": state.half()})


@pytest.mark.parametrize("sequences", [0, 2.0, True])
def test_the_number_of_sequences_is_a_whole_number(sequences):
    with pytest.raises(ValueError, match="sequences must be a whole number, 1 or above"):
        pa.Linear().init_cache(Q[:1], Q[:1], Q[:1], sequences=sequences)
