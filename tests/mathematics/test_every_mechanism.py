"""Caches of every expression, and identities of the pieces that have no definition, in float64.

What a mechanism computes is compared with its definition in `test_definitions.py`, also with masks
and fewer key heads than query heads.
"""

from dataclasses import replace

import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance.declared import expressions
from precondattn_conformance.inputs import CallLayout, make_inputs, slice_tokens
from tests.mathematics.identities import assert_close

T = 9
LAYOUT = CallLayout("identities", b=2, t=T, s=T, h=4, n=2, d=3, e=3, m=3)
EVERY = expressions()
MECHANISMS = {text: pa.parse(text) for text in EVERY}
CACHED = [text for text, m in MECHANISMS.items() if m.offers.causal and m.program.slots]
PIECES = [text for text, m in MECHANISMS.items() if m.role == "piece" or "log_sum" in text]
"""Those that `test_definitions.py` does not compare."""
RAGGED = [text for text in CACHED if not any(x.is_pairwise for x in pa.parse(text).inputs.values())]
"""Without those with an input of pairs, whose columns are slots of the cache of all sequences."""
MADE = {}


def called(text):
    """A mechanism, its inputs and its output."""
    if text not in MADE:
        mechanism = pa.parse(text)
        x = make_inputs(mechanism, LAYOUT, "random")
        if "beta" in x:
            x["beta"] = (
                0.1 + 0.8 * x["beta"]
            )  # A strength of 0 makes rows of 0, which have no norm.
        MADE[text] = mechanism, x, mechanism(**x)
    return MADE[text]


def at(mechanism, x, tokens=slice(None), sequences=slice(None), letters="ts"):
    """Views of some tokens of some sequences, by the letters of the declared axes."""
    by_letter = {"b": sequences, **dict.fromkeys(letters, tokens)}
    views = {}
    for name, pattern in mechanism.inputs.items():
        index = (
            slice(None)
            if axis.broadcasts and size == 1
            else by_letter.get(axis.letter, slice(None))
            for axis, size in zip(pattern.axes, x[name].shape, strict=True)
        )
        views[name] = x[name][tuple(index)]
    return views


def copies(x):
    return {name: array.copy() for name, array in x.items()}


def without_constants(text):
    """The piece with norms and shifts that are differentiated, not constant to the gradient."""
    piece = pa.parse(text)
    options = {name: False for name in ("detach", "detach_max") if hasattr(piece, name)}
    return str(replace(piece, **options))


@pytest.mark.parametrize("text", sorted(set(map(without_constants, PIECES))))
def test_gradients_are_those_of_central_differences(text):
    """Along a random direction of each input, which every entry of the gradient changes."""
    mechanism, x, out = called(text)
    rng, step = np.random.default_rng(0), 1e-6
    cotangent = rng.normal(size=out.shape)
    gradients = mechanism.vjp(**x)[1](cotangent)
    assert set(gradients) == set(x)
    for name, gradient in gradients.items():
        assert gradient.shape == x[name].shape
        direction = rng.normal(size=gradient.shape)
        ends = [
            np.sum(cotangent * mechanism(**(x | {name: x[name] + move * direction})))
            for move in (step, -step)
        ]
        terms = gradient * direction
        difference = (ends[0] - ends[1]) / (2 * step)
        assert abs(difference - np.sum(terms)) <= 1e-7 * max(1, np.abs(terms).sum()), name


@pytest.mark.parametrize("text", PIECES)
def test_padded_and_packed_sequences_are_what_they_are_alone(text):
    mechanism, x, _ = called(text)
    count = 6
    padded = copies(x)
    for name, view in at(mechanism, padded, slice(count, None), slice(0, 1)).items():
        pattern = mechanism.inputs[name]
        if pattern.time_axis is not None and not pattern.is_pairwise:
            view[...] = np.nan
    out, pullback = mechanism.vjp(**padded, lengths=[count, T])
    assert np.all(out[0, count:] == 0)
    assert all(np.all(np.isfinite(d)) for d in pullback(np.ones_like(out)).values())
    second = mechanism(**at(mechanism, x, sequences=slice(1, 2)))
    parts = [mechanism(**at(mechanism, x, p, slice(0, 1))) for p in (slice(0, 6), slice(6, T))]
    assert_close(out[:1, :count], parts[0])
    assert_close(out[1:], second)
    packed = mechanism(**x, segment_ids=np.asarray([[0] * count + [1] * (T - count), [3] * T]))
    assert_close(packed[:1], np.concatenate(parts, axis=1))
    assert_close(packed[1:], second)


@pytest.mark.parametrize("text", CACHED)
def test_a_cache_split_anywhere_gives_the_same_output(text):
    mechanism, x, out = called(text)
    cache, outs = mechanism.init_cache(**x, capacity=T), []
    for start, stop in ((0, 1), (1, 6), (6, 7), (7, T)):
        new, cache = mechanism.extend(cache, **slice_tokens(mechanism, x, start, stop))
        outs.append(new)
    assert_close(np.concatenate(outs, axis=1), out)


@pytest.mark.parametrize("text", RAGGED)
def test_a_ragged_batch_equals_each_sequence_alone(text):
    mechanism, x, _ = called(text)
    cache, outs = mechanism.init_cache(**x, capacity=T), []
    for start, stop, counts in ((0, 4, [1, 4]), (4, 5, [1, 0]), (5, T, [4, 2])):
        new, cache = mechanism.extend(
            cache, **slice_tokens(mechanism, x, start, stop), lengths=counts
        )
        outs.append(new)
    out = np.concatenate(outs, axis=1)
    for i, valid in enumerate(([0, 4, 5, 6, 7, 8], [0, 1, 2, 3, 5, 6])):
        alone = at(mechanism, x, sequences=slice(i, i + 1))
        assert_close(out[i : i + 1, valid], mechanism(**at(mechanism, alone, valid)))
        assert np.all(np.delete(out[i], valid, axis=0) == 0)
