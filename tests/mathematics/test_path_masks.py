"""PaTH's masks: masked keys, padding and segments."""

import numpy as np
import pytest
from hypothesis import given

import precondattn as pa
from tests.mathematics.identities import causal_mask
from tests.mathematics.path_definition import (
    PathProblem,
    assert_close,
    at,
    problems,
    read,
    sampled,
    scores_of_all_heads,
    softmax,
)


@pytest.mark.parametrize("layer", ["path", "path[forget=unscaled]", "lucid(path)"])
@sampled
@given(p=problems())
def test_masked_keys_neither_reflect_nor_are_attended_to_even_when_nan(layer, p):
    inputs = p.gated if "forget" in layer else p.inputs
    layer, mask = pa.parse(layer), p.rng.random(p.k.shape[1]) < 0.7
    mask[-1] = True
    holes = inputs | {
        name: np.where(mask.reshape(-1, *[1] * (x.ndim - 2)), x, np.nan)
        for name, x in inputs.items()
        if name != "q"
    }
    out, pullback = layer.vjp(**holes, key_mask=np.tile(mask, (2, 1)))
    alone = layer(**at(inputs, slice(None), mask))
    assert_close(out[:, mask], alone)
    gradients = pullback(p.like_output())
    assert all(np.all(np.isfinite(x)) for x in gradients.values())
    assert all(np.all(gradients[name][:, ~mask] == 0) for name in gradients if name != "q")


@sampled
@given(problems())
def test_a_query_at_a_masked_key_is_not_reflected_there(p):
    mask = p.rng.random(p.k.shape[1]) < 0.6
    mask[0] = True
    out = pa.Path()(**p.inputs, key_mask=np.tile(mask, (2, 1)))
    still = np.where(mask[:, None], p.beta, 0)
    logits = scores_of_all_heads(p.q, p.k, p.w, still) * p.k.shape[-1] ** -0.5
    is_visible = causal_mask(len(mask), len(mask)) & mask
    assert_close(out, read(softmax(logits, is_visible), p.v), size=np.abs(p.v).max())


def test_long_directions_of_one_segment_do_not_affect_the_next():
    p = PathProblem(np.random.default_rng(0), s=9)
    first = np.arange(9) < 4
    p.w = np.where(first[:, None, None], 1e3 * p.w, p.w)
    packed, pullback = pa.Path().vjp(**p.inputs, segment_ids=np.tile(1 - first, (2, 1)))
    alone, pullback_alone = pa.Path().vjp(**at(p.inputs, slice(None), ~first))
    assert_close(packed[:, ~first], alone)
    cotangent = np.where(first[:, None, None], 0, p.like_output())
    gradients, expected = pullback(cotangent), pullback_alone(cotangent[:, ~first])
    for name in expected:
        assert_close(gradients[name][:, ~first], expected[name])
        assert np.all(gradients[name][:, first] == 0)
