"""Outlook attention of grids against loops over their windows."""

import numpy as np
import pytest

import precondattn as pa
from tests.mathematics.definitions import assert_is_defined

B, H, N, E = 2, 4, 2, 3


def problem(tokens, w, seed=0):
    rng = np.random.default_rng(seed)
    logits, v = rng.normal(size=(B, tokens, H, w, w)), rng.normal(size=(B, tokens, N, E))
    return {"logits": logits, "v": v}


GRIDS = [
    ((4, 5), (3, 3), (1, 1)),
    ((4, 6), (3, 3), (2, 2)),
    ((5, 7), (3, 3), (2, 2)),
    ((3, 4), (2, 5), (1, 1)),
    ((5, 4), (4, 1), (2, 3)),
    ((2, 2), (5, 5), (3, 1)),
]


@pytest.mark.parametrize(("grid", "size", "stride"), GRIDS)
def test_output_and_gradients_are_those_of_the_definition(grid, size, stride):
    tokens = grid[0] * grid[1]
    x, keep = problem(tokens, size[0] * size[1]), np.random.default_rng(2).random((B, tokens)) < 0.6
    fixed = pa.Outlook(size=size, stride=stride, grid=grid, scale=0.7)
    assert_is_defined(fixed, x)
    assert_is_defined(fixed, x, key_mask=keep)
    free = pa.Outlook(size=size, stride=stride, grid=grid[1])
    cut = {"segment_ids": np.asarray([[0] * (tokens - 1) + [1], [2] * tokens])}
    assert_is_defined(free, x, key_mask=keep, lengths=np.asarray([tokens, tokens - 1]), **cut)
