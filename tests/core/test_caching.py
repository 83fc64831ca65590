"""Caches: any split gives the full call's output, and sequences of a batch are independent."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import precondattn as pa
from precondattn.frame import EXTENSION, Frame, extending_frame
from precondattn.frame import Layout as FrameLayout
from precondattn.frameworks import of
from precondattn_conformance.declared import expressions
from precondattn_conformance.inputs import CallLayout, make_inputs, slice_tokens
from tests.representatives import CACHED

EVERY = [
    text
    for text in expressions(pieces=False)
    if pa.parse(text).offers.causal and "bias" not in text
]
LENGTH = 12


def inputs_of(m, kind="clustered", **sizes):
    return make_inputs(m, CallLayout("test", t=LENGTH, s=LENGTH, **sizes), kind)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_split_of_ragged_sequences_equals_each_sequence_alone(data):
    m = pa.parse(data.draw(st.sampled_from(EVERY), label="mechanism"))
    kind = data.draw(st.sampled_from(["random", "clustered", "zero"]), label="kind")
    x = inputs_of(m, kind, b=3)
    if "normalize" in str(m):
        x["k"] = 0.5 * x["k"]
    expected = m(**x)
    cache = m.init_cache(**x, capacity=LENGTH)
    done = np.zeros(3, dtype=int)
    outs = [[], [], []]
    for _ in range(30):
        counts = np.asarray(
            data.draw(st.lists(st.integers(0, 5), min_size=3, max_size=3), label="new tokens")
        )
        counts = np.minimum(counts, LENGTH - done)
        block = max(int(counts.max()), 1)
        # Each sequence has a length of its own; after its new tokens there is NaN.
        tokens = {n: a for n, a in x.items() if m.inputs[n].time_axis is not None}
        new = {**x, **{n: np.full((3, block, *a.shape[2:]), np.nan) for n, a in tokens.items()}}
        for i in range(3):
            for name in tokens:
                new[name][i, : counts[i]] = x[name][i, done[i] : done[i] + counts[i]]
        out, cache = m.extend(cache, **new, lengths=counts)
        for i in range(3):
            outs[i].append(out[i, : counts[i]])
            np.testing.assert_array_equal(out[i, counts[i] :], 0)
        done += counts
        if done.min() == LENGTH:
            break
    np.testing.assert_array_equal(cache.length, done)
    for i in range(3):
        np.testing.assert_allclose(
            np.concatenate(outs[i]), expected[i, : done[i]], rtol=1e-9, atol=1e-11
        )


@pytest.mark.parametrize("expression", CACHED)
def test_donated_caches_give_the_same_output_and_are_written_in_place(expression):
    m = pa.parse(expression)
    x = inputs_of(m)
    expected = m(**x)
    like = {n: a for n, a in x.items() if not m.inputs[n].is_pairwise}
    cache = m.init_cache(**like, capacity=LENGTH)
    buffers = dict(cache.store)
    outs = []
    for start in range(0, LENGTH, 4):
        old = cache
        out, cache = m.extend(old, **slice_tokens(m, x, start, start + 4), donate=True)
        outs.append(out)
        with pytest.raises(ValueError, match="donated by extend"):
            m.extend(old, **slice_tokens(m, x, start, start + 4))
    assert all(cache.store[key] is buffer for key, buffer in buffers.items())
    np.testing.assert_allclose(np.concatenate(outs, axis=1), expected, rtol=1e-10, atol=1e-12)


VIEWS = {
    "read-only": lambda a: of(a).read_only(np.concatenate([a, a])),
    "broadcast": lambda a: np.broadcast_to(a, (2, *a.shape[1:])),
    "expanded": lambda a: pytest.importorskip("torch").tensor(a).expand(2, *a.shape[1:]),
}
DONATING = {
    "one token": lambda m, x, c, **d: m.extend(c, **slice_tokens(m, x, 6, 7), **d)[1],
    "lengths": lambda m, x, c, **d: m.extend(c, **slice_tokens(m, x, 6, 9), lengths=[3, 1], **d)[1],
    "crop": lambda m, x, c, **d: c.crop([2, 5], **d) if c.can_crop else c,
    "restore": lambda m, x, c, **d: c.restore(c.snapshot(), **d),
}


@pytest.mark.parametrize("operation", DONATING)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("expression", ["softmax", "softmax[window=3]", "lucid(path)", "gla"])
def test_a_donated_cache_that_can_not_be_written_to_is_copied_once(expression, view, operation):
    m, run, viewed = pa.parse(expression), DONATING[operation], VIEWS[view]
    made = inputs_of(m, b=1)
    _, old = m.extend(m.init_cache(**made, capacity=LENGTH), **slice_tokens(m, made, 0, 6))
    x, store = ({n: viewed(a) for n, a in arrays.items()} for arrays in (made, old.store))
    cache = old._replace(length=viewed(old.length), store=dict(store))
    expected, after = run(m, x, cache), run(m, x, cache, donate=True)
    for name, buffer in after.store.items():
        np.testing.assert_array_equal(store[name], np.concatenate([old.store[name]] * 2))
        np.testing.assert_allclose(buffer, expected.store[name], rtol=1e-12, atol=1e-14)
    last, buffers = slice_tokens(m, x, 9, 10), dict(after.store)
    after = m.extend(after, **last, donate=True)[1]
    assert operation == "crop" or all(after.store[name] is buffers[name] for name in buffers)


def test_a_cache_that_is_not_donated_can_be_continued_twice():
    m = pa.Lucid()
    x = inputs_of(m)
    _, cache = m.extend(m.init_cache(**x, capacity=LENGTH), **slice_tokens(m, x, 0, 5))
    first, _ = m.extend(cache, **slice_tokens(m, x, 5, 6))
    m.extend(cache, **slice_tokens(m, x, 8, 12))
    again, _ = m.extend(cache, **slice_tokens(m, x, 5, 6))
    np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("expression", [text for text in CACHED if "bias" not in text])
def test_outputs_depend_neither_on_the_future_nor_on_other_sequences(expression):
    m = pa.parse(expression)
    x = inputs_of(m)
    out = m(**x)
    changed = {name: array.copy() for name, array in x.items()}
    other = make_inputs(m, CallLayout("test", t=LENGTH, s=LENGTH), "clustered", seed=1)
    for name, array in changed.items():
        if m.inputs[name].time_axis is not None:
            array[:, 8:] = other[name][:, 8:]
            array[1] = other[name][1]
    result = m(**changed)
    np.testing.assert_allclose(result[0, :8], out[0, :8], rtol=0, atol=1e-13)
    assert not np.allclose(result[0, 8:], out[0, 8:])
    assert not np.allclose(result[1, :8], out[1, :8])


@pytest.mark.parametrize("normalize", ["keys", "queries_and_keys", "rows", "none"])
def test_the_cache_of_lucid_stores_y_after_a_prefill_and_after_one_token(normalize):
    m = pa.Lucid(normalize=normalize)
    x = inputs_of(m)
    x["k"] = 0.5 * x["k"]
    _, cache = m.extend(m.init_cache(**x, capacity=20), **slice_tokens(m, x, 0, LENGTH - 1))
    _, cache = m.extend(cache, **slice_tokens(m, x, LENGTH - 1, LENGTH))
    k = x["k"] if normalize != "queries_and_keys" else pa.RMSNorm()(x["k"])
    y = m.solve()(k, x["v"])
    np.testing.assert_allclose(cache.store["y"][:, :LENGTH], y, rtol=1e-10, atol=1e-12)
    assert "v" not in cache.store
    if normalize == "keys":
        np.testing.assert_allclose(
            cache.store["rms(k)"][:, :LENGTH], np.sqrt(np.mean(k**2, axis=-1) + 1e-6)
        )


def test_keys_masked_in_an_extension_stay_masked():
    m = pa.Lucid()
    x = inputs_of(m)
    key_mask = np.arange(LENGTH)[None] % 3 != np.asarray([[0], [1]])
    expected = m(**x, key_mask=key_mask)
    cache, outs = m.init_cache(**x, capacity=LENGTH, key_mask=True), []
    for start, stop in ((0, 5), (5, 6), (6, LENGTH)):
        tokens = slice_tokens(m, x, start, stop)
        out, cache = m.extend(cache, **tokens, key_mask=key_mask[:, start:stop])
        outs.append(out)
    np.testing.assert_allclose(np.concatenate(outs, axis=1), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "expression", ["softmax", "lucid", "laser", "lucid(laser)", "path[flush=8]", "lucid(path)"]
)
def test_the_work_of_a_decoded_token_grows_linearly_with_the_context(expression):
    torch = pytest.importorskip("torch")
    counter_of = pytest.importorskip("torch.utils.flop_counter").FlopCounterMode
    m = pa.parse(expression)
    products = []
    for context in (64, 128, 256):
        layout = CallLayout("test", t=context, s=context, d=16, e=16)
        x = {n: torch.tensor(a) for n, a in make_inputs(m, layout, "random").items()}
        cache = m.init_cache(**x, capacity=context)
        _, cache = m.extend(cache, **slice_tokens(m, x, 0, context - 1))
        with counter_of(display=False) as counter:
            m.extend(cache, **slice_tokens(m, x, context - 1, context))
        products.append(counter.get_total_flops())
    assert products[1] <= 2.1 * products[0]
    assert products[2] <= 2.1 * products[1]


def test_a_cache_consists_of_plain_arrays_and_can_be_pickled():
    m = pa.Lucid()
    x = inputs_of(m)
    _, cache = m.extend(m.init_cache(**x, capacity=LENGTH), **slice_tokens(m, x, 0, 6))
    loaded = pickle.loads(pickle.dumps(cache))
    expected, _ = m.extend(cache, **slice_tokens(m, x, 6, LENGTH))
    result, _ = m.extend(loaded, **slice_tokens(m, x, 6, LENGTH))
    np.testing.assert_array_equal(result, expected)


def test_half_precision_caches_keep_norms_in_float32():
    torch = pytest.importorskip("torch")
    m = pa.Lucid()
    x = {n: torch.tensor(a).bfloat16() for n, a in inputs_of(m).items()}
    cache = m.init_cache(**x, capacity=LENGTH)
    assert {key: buffer.dtype for key, buffer in cache.store.items()} == {
        "k": torch.bfloat16,
        "y": torch.bfloat16,
        "rms(k)": torch.float32,
    }


@pytest.mark.parametrize(("b", "held", "t"), [(1, 0, 1), (3, 5, 2), (2, 8, 0)])
def test_the_frame_of_caches_of_equal_length_equals_the_general_frame(b, held, t):
    length = np.full((b,), held, dtype=np.int32)
    few = Frame.of(FrameLayout(EXTENSION, t, 8, held=held, longest=held), length)
    general = extending_frame(length, 8, t, lengths=None, key_mask=None, past_mask=None)
    for mine, wanted in zip(few.arrays, general.arrays, strict=True):
        if wanted is None:
            assert mine is None
        else:
            np.testing.assert_array_equal(mine, wanted)
    filled = few.of_held()
    assert filled.k_valid is None
    np.testing.assert_array_equal(filled.k_position, np.arange(held + t)[None])


def test_arguments_are_checked_again_when_their_type_changes():
    x = make_inputs(pa.Lucid(), CallLayout("test", t=2, s=2), "random")
    cache = pa.Lucid().init_cache(**x, capacity=8)
    pa.Lucid().extend(cache, **x)
    with pytest.raises(TypeError, match="one dtype"):
        pa.Lucid().extend(cache, **x | {"q": x["q"].astype(np.float32)})
    with pytest.raises(TypeError, match="k must be an array"):
        pa.Lucid().extend(cache, **x | {"k": x["k"].tolist()})
    with pytest.raises(ValueError, match="can not be used again"):
        pa.Lucid().extend(cache._replace(store={}), **x)
