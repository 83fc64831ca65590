"""Attention of windows of grids: over the pairs of a window, and outlook attention."""

import numpy as np
import pytest

import precondattn as pa
from tests.mathematics.definitions import assert_is_defined
from tests.mathematics.problems import Problem

GRIDS = [
    ((4, 6), (2, 3), (0, 0)),
    ((4, 6), (2, 3), (1, 2)),
    ((4, 4), (2, 2), (1, 1)),
    ((5, 7), (2, 3), (0, 0)),
    ((5, 7), (3, 3), (1, 2)),
    ((3, 4), (3, 4), (0, 0)),
]


@pytest.mark.parametrize(("grid", "size", "shift"), GRIDS)
def test_windows_are_attention_with_a_pair_mask_and_a_gathered_bias(grid, size, shift):
    tokens = grid[0] * grid[1]
    m = pa.Windowed(size=size, shift=shift, grid=grid, bias=True)
    x = Problem(s=tokens, n=2, group=2, d=6, e=5).x(m)
    assert_is_defined(m, x)
    mask = np.random.default_rng(2).random((2, tokens)) < 0.7
    assert_is_defined(m, x, key_mask=mask, lengths=np.asarray([tokens, tokens - 3]))
    free = pa.Windowed(size=size, shift=shift, grid=grid[1], bias=True)
    cut = np.asarray([[0] * grid[1] + [1] * (tokens - grid[1]), [5] * tokens])
    assert_is_defined(free, x, segment_ids=cut)


@pytest.mark.parametrize(
    "text",
    [
        "laser(windowed[size=2,grid=3/5,bias=true])",
        "row_normalized[detach=false](windowed[size=2/3,shift=1,grid=3/5,bias=true])",
        "row_normalized[axis=channel,detach=false](windowed[size=12])",
        "differential(windowed[size=2,grid=3/5,bias=true])",
        "temperature(windowed[size=2,grid=3/5,bias=true])",
        "qk_norm(windowed[size=2,grid=3/5])",
    ],
)
def test_compositions_are_those_of_the_definition(text):
    m = pa.parse(text)
    assert_is_defined(m, Problem(s=15, n=1, group=2).x(m))


def test_options_of_equal_mechanisms_have_equal_text():
    assert pa.Windowed(size=(7, 7), grid=(14, 14)) == pa.Windowed(size=7, grid=(14, 14))
    text = "windowed[size=2/3,shift=1,grid=4/6,bias=true]"
    assert str(pa.parse(text)) == text


B, H, N, E = 2, 4, 2, 3


def outlook_of(tokens, w, seed=0):
    rng = np.random.default_rng(seed)
    logits, v = rng.normal(size=(B, tokens, H, w, w)), rng.normal(size=(B, tokens, N, E))
    return {"logits": logits, "v": v}


OUTLOOKS = [
    ((4, 5), (3, 3), (1, 1)),
    ((4, 6), (3, 3), (2, 2)),
    ((5, 7), (3, 3), (2, 2)),
    ((3, 4), (2, 5), (1, 1)),
    ((5, 4), (4, 1), (2, 3)),
    ((2, 2), (5, 5), (3, 1)),
]


@pytest.mark.parametrize(("grid", "size", "stride"), OUTLOOKS)
def test_outlook_is_that_of_the_definition(grid, size, stride):
    tokens = grid[0] * grid[1]
    x = outlook_of(tokens, size[0] * size[1])
    keep = np.random.default_rng(2).random((B, tokens)) < 0.6
    fixed = pa.Outlook(size=size, stride=stride, grid=grid, scale=0.7)
    assert_is_defined(fixed, x)
    assert_is_defined(fixed, x, key_mask=keep)
    free = pa.Outlook(size=size, stride=stride, grid=grid[1])
    cut = {"segment_ids": np.asarray([[0] * (tokens - 1) + [1], [2] * tokens])}
    assert_is_defined(free, x, key_mask=keep, lengths=np.asarray([tokens, tokens - 1]), **cut)
