"""States that one holds: their short names, and caches that begin from given states.

That a split call gives the output of a full one, for every mechanism, is a conformance check; here
the states are taken from one cache and given to another.
"""

import numpy as np
import pytest

import precondattn as pa
from precondattn.cache.kinds import Kind
from precondattn_conformance import libraries
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


def inputs_of(m, b=2):
    return make_inputs(m, CallLayout("test", b=b, t=LENGTH, s=LENGTH), "random")


@pytest.mark.parametrize("expression", NAMES)
def test_states_have_the_names_of_their_page(expression):
    m = pa.parse(expression)
    cache = m.init_cache(**inputs_of(m), capacity=LENGTH)
    assert [*cache.states] == NAMES[expression]
    states = [cache.store[n] for n, kind in cache.kinds.items() if "state" in next(iter(kind))]
    assert all(a is b for a, b in zip(cache.states.values(), states, strict=True))
    with pytest.raises(TypeError, match="does not support item assignment"):
        cache.states["S"] = None


@pytest.mark.parametrize("expression", NAMES)
def test_a_cache_that_begins_from_states_continues_the_sequence(expression):
    m = pa.parse(expression)
    if not NAMES[expression]:
        return
    x = inputs_of(m)
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


def test_states_keep_their_names_when_they_are_saved_and_reordered():
    m = pa.parse("mlstm")
    cache = m.init_cache(**inputs_of(m))
    assert [*pa.Cache.from_state_dict(cache.reorder([1, 0]).state_dict()).states] == NAMES["mlstm"]


@pytest.mark.parametrize("text", ["state S", "wide state S", "state", "wide tokens", "window 8"])
def test_the_text_of_a_kind_is_read_back(text):
    assert str(Kind.read(text)) == text


@pytest.mark.parametrize("text", ["tokens S", "state ", "states"])
def test_other_texts_are_no_kind(text):
    with pytest.raises(ValueError, match="is no kind of a buffer"):
        Kind.read(text)


def test_half_precision_takes_states_in_float32():
    pytest.importorskip("torch")
    lib, m = libraries.named("torch"), pa.parse("gla")
    x = {name: lib.array(a, "float16") for name, a in inputs_of(m).items()}
    state = m.init_cache(**x).states["S"]
    assert m.init_cache(**x, states={"S": state}).states["S"].dtype == state.dtype
    with pytest.raises(TypeError, match=r"states\['S'\] must have dtype float32; found float16"):
        m.init_cache(**x, states={"S": lib.array(np.asarray(state), "float16")})


STATE, MASS = np.zeros((2, 4, 8, 8)), np.zeros((2, 4, 8))
BAD = {
    "missing": ({"S": STATE}, ValueError, "the states S, z belong together; missing z"),
    "name": ({"s": STATE}, ValueError, "states has no 's'; the states are S, z"),
    "twice": (
        {"S": STATE, "linear.state(k, v)": STATE},
        ValueError,
        r"states\['linear.state\(k, v\)'\] is given by two names",
    ),
    "layout": (
        {"S": np.swapaxes(STATE, 0, 1)},
        pa.ShapeError,
        r"states\['S'\] must have shape \(b, n, d, e\), here \(2, 4, 8, 8\); "
        r"found \(4, 2, 8, 8\)",
    ),
    "sequences": ({"S": STATE[:1]}, pa.ShapeError, r"found \(1, 4, 8, 8\); write sequences=1"),
    "dtype": ({"S": STATE.astype("f4")}, TypeError, "dtype float64; found float32"),
    "list": ({"S": STATE.tolist()}, TypeError, "must be an array of numpy, .*; found list"),
    "array": (STATE, TypeError, "states must be a dict of arrays by name, .*; found ndarray"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_states_are_refused_by_name(case):
    states, error, words = BAD[case]
    q, k, v = np.zeros((3, 2, 5, 4, 8))
    with pytest.raises(error, match=r"^linear\[normalize=true\]: .*" + words):
        pa.parse("linear[normalize=true]").init_cache(q, k, v, states=states)


def test_a_cache_of_tokens_has_no_states_to_give():
    q, k, v = np.zeros((3, 2, 5, 4, 8))
    with pytest.raises(ValueError, match=r"softmax: .* holds tokens and no states; found states"):
        pa.Softmax().init_cache(q, k, v, capacity=5, states={"S": STATE})


@pytest.mark.parametrize("sequences", [0, 2.0, True])
def test_the_number_of_sequences_is_a_whole_number(sequences):
    q, k, v = np.zeros((3, 1, 5, 4, 8))
    with pytest.raises(ValueError, match="sequences must be a whole number, 1 or above"):
        pa.Linear().init_cache(q, k, v, sequences=sequences)
