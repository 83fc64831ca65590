"""PaTH's caches: any split gives the full call's output, and many steps stay accurate."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import precondattn as pa
from tests.mathematics.identities import causal_mask
from tests.mathematics.path_definition import (
    DIRECTIONS,
    FLUSHES,
    PathProblem,
    assert_close,
    at,
    decode,
    lucid_by_loops,
    path_by_loops,
    reflection,
    rms_norm,
    sampled,
    softmax,
    with_flush,
)


@st.composite
def splits(draw, longest=12):
    """Widths of blocks that add up to at most `longest`."""
    widths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    while sum(widths) > longest:
        widths.pop()
    return widths


LAYERS = ["path[{}]", "path[{}, window=3]", "path[{}, forget=unscaled]", "lucid(path[{}])"]


@pytest.mark.parametrize("directions", DIRECTIONS)
@pytest.mark.parametrize("flush", FLUSHES)
@pytest.mark.parametrize("layer", ["path[{}]", "lucid(path[{}])"])
def test_decoding_one_by_one_over_many_flushes_is_the_definition(layer, flush, directions):
    length = max(6, 3 * flush + 1)
    p = PathProblem(np.random.default_rng(0), "clustered", directions, "mixed", s=length, group=2)
    out, _ = decode(with_flush(layer, flush), p.inputs, [1] * length)
    by_loops = path_by_loops if layer.startswith("path") else lucid_by_loops
    assert_close(out, by_loops(**p.inputs))


def valid(cache, flush):
    """The valid parts of the cache's buffers, by name."""
    length = int(cache.length[0])
    assert np.all(cache.length == length)
    return {
        name: x[:, : length % flush if name.startswith("pending") else length]
        for name, x in cache.store.items()
    }


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("flush", FLUSHES)
@settings(sampled, max_examples=8)
@given(widths=splits(), seed=st.integers(0, 2**32 - 1))
def test_the_cache_does_not_depend_on_how_it_was_filled(layer, flush, widths, seed):
    p = PathProblem(np.random.default_rng(seed), s=sum(widths), group=2)
    inputs = p.gated if "forget" in layer else p.inputs
    layer, length = with_flush(layer, flush), sum(widths)
    stores = [
        valid(decode(layer, inputs, blocks)[1], flush)
        for blocks in (widths, [length], [1] * length)
    ]
    for store in stores[1:]:
        assert store.keys() == stores[0].keys()
        for name, x in store.items():
            assert_close(x, stores[0][name])


@pytest.mark.parametrize("layer", ["path[{}]", "lucid(path[{}])"])
@pytest.mark.parametrize("flush", FLUSHES)
def test_the_cache_stores_keys_as_of_the_last_flush_and_the_reflections_since(layer, flush):
    p = PathProblem(np.random.default_rng(0), s=8, n=2)
    for length in range(1, 9):
        _, cache = decode(
            with_flush(layer, flush), at(p.inputs, slice(None), slice(length)), [length]
        )
        keys, flushed = cache.store["path(k,w,beta)"], length - length % flush
        for b, j, n in np.ndindex(2, flushed, 2):
            key = p.k[b, j, n]
            for t in range(j + 1, flushed):
                key = reflection(p.w[b, t, n], p.beta[b, t, n]) @ key
            assert_close(keys[b, j, n], key, size=1)
        for name in ("w", "beta") if flush > 1 else ():
            since = cache.store[f"pending({name})"][:, : length - flushed]
            np.testing.assert_array_equal(since, getattr(p, name)[:, flushed:length])


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("flush", FLUSHES)
@settings(sampled, max_examples=10)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_a_ragged_batch_equals_each_sequence_alone(layer, flush, data, seed):
    gated, layer, rng = "forget" in layer, with_flush(layer, flush), np.random.default_rng(seed)
    blocks, fed = [], [[], [], []]
    for _ in range(data.draw(st.integers(1, 6))):
        width = data.draw(st.integers(1, 4))
        p = PathProblem(rng, b=3, s=width, group=2)
        lengths = np.array([data.draw(st.integers(0, width)) for _ in range(3)])
        blocks.append((p.gated if gated else p.inputs, lengths))
    cache = layer.init_cache(*(blocks[0][0][x] for x in "qkv"), capacity=24)
    outs = [[], [], []]
    for inputs, lengths in blocks:
        beyond = np.arange(inputs["q"].shape[1]) >= lengths[:, None]
        padded = {
            name: np.where(beyond.reshape(*beyond.shape, *[1] * (x.ndim - 2)), np.nan, x)
            for name, x in inputs.items()
        }
        out, cache = layer.extend(cache, **padded, lengths=lengths)
        assert np.all(out[beyond] == 0)
        for i, length in enumerate(lengths):
            outs[i].append(out[i : i + 1, :length])
            fed[i].append(at(inputs, slice(i, i + 1), slice(length)))
    for i in range(3):
        alone = {name: np.concatenate([x[name] for x in fed[i]], axis=1) for name in blocks[0][0]}
        out = np.concatenate(outs[i], axis=1)
        assert cache.length[i] == out.shape[1]
        if out.shape[1]:
            assert_close(out, layer(**alone), size=1 + np.abs(out).max())


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("flush", [1, 3])
@settings(sampled, max_examples=10)
@given(widths=splits(), seed=st.integers(0, 2**32 - 1))
def test_masked_keys_in_a_cache_neither_reflect_nor_are_attended_to(layer, flush, widths, seed):
    p = PathProblem(np.random.default_rng(seed), s=sum(widths), group=2)
    inputs = p.gated if "forget" in layer else p.inputs
    windowed, layer = "window" in layer, with_flush(layer, flush)
    mask = p.rng.random((2, sum(widths))) < 0.6
    cache = layer.init_cache(p.q, p.k, p.v, capacity=sum(widths), key_mask=True)
    outs = []
    for start, stop in pairwise([0, *np.cumsum(widths).tolist()]):
        part = at(inputs, slice(None), slice(start, stop))
        out, cache = layer.extend(cache, **part, key_mask=mask[:, start:stop])
        outs.append(out)
    out = np.concatenate(outs, axis=1)
    at_once = layer(**inputs, key_mask=mask)
    assert_close(out, at_once, size=1 + np.abs(at_once).max())
    for i, kept in enumerate(mask):
        if kept.any() and not windowed:  # A window counts masked tokens too.
            alone = layer(**{name: x[i : i + 1, kept] for name, x in inputs.items()})
            assert_close(out[i : i + 1, kept], alone, size=1 + np.abs(alone).max())


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("flush", [1, 3])
def test_donating_a_cache_or_keeping_it_gives_the_same_output(layer, flush):
    p = PathProblem(np.random.default_rng(0), s=11, group=2)
    inputs = p.gated if "forget" in layer else p.inputs
    layer, widths = with_flush(layer, flush), [4, 1, 1, 2, 1, 2]
    kept, donated = (decode(layer, inputs, widths, donate=donate) for donate in (False, True))
    np.testing.assert_array_equal(donated[0], kept[0])
    for name, x in valid(donated[1], flush).items():
        np.testing.assert_array_equal(x, valid(kept[1], flush)[name])


@pytest.mark.parametrize("flush", [1, 3])
@pytest.mark.parametrize("layer", ["path[{}]", "lucid(path[{}])"])
def test_two_continuations_of_one_cache_are_independent(layer, flush):
    p = PathProblem(np.random.default_rng(0), s=8)
    layer = with_flush(layer, flush)
    cache = layer.init_cache(p.q, p.k, p.v, capacity=6)
    _, cache = layer.extend(cache, **at(p.inputs, slice(None), slice(4)))
    for tail in ([4, 5], [6, 7]):
        branch = at(p.inputs, slice(None), [0, 1, 2, 3, *tail])
        out, longer = layer.extend(cache, **at(p.inputs, slice(None), tail[:1]))
        last, _ = layer.extend(longer, **at(p.inputs, slice(None), tail[1:]))
        assert_close(np.concatenate([out, last], axis=1), layer(**branch)[:, 4:], size=1)


def scores_by_key_cache(q, k, w, beta):
    """A of one head by reflecting every past key at every token, in linear memory."""
    scores, keys = np.zeros((len(q), len(k))), k.copy()
    for i in range(len(q)):
        keys[:i] -= beta[i] * np.outer(keys[:i] @ w[i], w[i])
        scores[i, : i + 1] = keys[: i + 1] @ q[i]
    return scores


def long_reference(q, k, v, w, beta, lucid):
    """The output in float64 for one head of each sequence, which may be hundreds of tokens long."""
    out, d = np.zeros_like(v), q.shape[-1]
    for b in range(len(q)):
        head = [x[b, :, 0] for x in (q, k, v, w, beta)]
        y = head[2]
        if lucid:
            kn = rms_norm(head[1])
            phi = np.exp(np.tril(scores_by_key_cache(kn, kn, *head[3:]) - d, -1) * d**-0.5)
            y = forward_substitution_by_rows(np.tril(phi, -1), y)
        logits = scores_by_key_cache(head[0], head[1], *head[3:]) * d**-0.5
        out[b, :, 0] = softmax(logits, causal_mask(len(y), len(y))) @ y
    return out


def forward_substitution_by_rows(below, v):
    y = v.copy()
    for t in range(len(v)):
        y[t] -= below[t, :t] @ y[:t]
    return y


@pytest.mark.parametrize("lucid", [False, True])
def test_the_reference_for_long_sequences_is_the_definition(lucid):
    p = PathProblem(np.random.default_rng(0), s=9)
    expected = (lucid_by_loops if lucid else path_by_loops)(**p.inputs)
    assert_close(long_reference(**p.inputs, lucid=lucid), expected)


@pytest.mark.parametrize("betas", ["random", "twos"])
@pytest.mark.parametrize("flush", [1, 7])
@pytest.mark.parametrize("layer", ["path[{}]", "lucid(path[{}])"])
def test_hundreds_of_single_steps_in_single_precision_stay_accurate(layer, flush, betas):
    p = PathProblem(np.random.default_rng(0), betas=betas, s=300, d=8)
    inputs = {name: x.astype(np.float32) for name, x in p.inputs.items()}
    out, _ = decode(with_flush(layer, flush), inputs, [1] * 300, donate=True)
    assert out.dtype == np.float32
    exact = {name: x.astype(np.float64) for name, x in inputs.items()}
    expected = long_reference(**exact, lucid="lucid" in layer)
    assert_close(out, expected, tolerance=2e-5)


@pytest.mark.parametrize("how", ["at once", "one by one"])
@pytest.mark.parametrize("forget", ["unscaled", "scaled"])
def test_a_closed_gate_in_single_precision_leaves_later_gates_accurate(forget, how):
    p = PathProblem(np.random.default_rng(0), s=12)
    p.g[:, 3] = -1e4
    layer, inputs = pa.Path(forget=forget), {n: x.astype(np.float32) for n, x in p.gated.items()}
    out = layer(**inputs) if how == "at once" else decode(layer, inputs, [1] * 12)[0]
    exact = {name: x.astype(np.float64) for name, x in inputs.items()}
    assert_close(out, path_by_loops(**exact, forget=forget), tolerance=2e-5)


@pytest.mark.parametrize("half", ["qkv", "all"])
@pytest.mark.parametrize("flush", [1, 7])
@pytest.mark.parametrize("layer", ["path[{}]", "lucid(path[{}])"])
def test_many_single_steps_in_bfloat16_stay_accurate(layer, flush, half):
    torch = pytest.importorskip("torch")
    p = PathProblem(np.random.default_rng(0), s=200, d=8)
    inputs = {
        name: torch.tensor(x).to(torch.bfloat16 if half == "all" or name in half else torch.float32)
        for name, x in p.inputs.items()
    }
    layer_, outs = with_flush(layer, flush), []
    cache = layer_.init_cache(*(inputs[x] for x in "qkv"), capacity=200)
    with torch.no_grad():
        for t in range(200):
            out, cache = layer_.extend(
                cache, **at(inputs, slice(None), slice(t, t + 1)), donate=True
            )
            outs.append(out)
    out = torch.cat(outs, dim=1)
    assert out.dtype == torch.bfloat16
    exact = {name: x.double().numpy() for name, x in inputs.items()}
    expected = long_reference(**exact, lucid="lucid" in layer)
    assert_close(out.double().numpy(), expected, tolerance=2e-2)
