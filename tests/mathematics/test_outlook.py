"""Outlook attention against loops over windows of an image, and its own identities."""

import numpy as np
import pytest

import precondattn as pa
from tests.mathematics.definitions import assert_is_defined
from tests.mathematics.identities import assert_close

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


def test_a_sequence_is_a_grid_of_one_row():
    x = problem(11, 3)
    for stride in (1, 2):
        row = pa.Outlook(size=(1, 3), stride=(1, stride), grid=(1, 11))
        assert_close(pa.Outlook(size=3, stride=stride)(**x), row(**x))


def test_inside_an_image_weights_sum_to_the_number_of_windows_that_reach_a_token():
    x = problem(49, 9) | {"v": np.ones((B, 49, N, E))}
    image = pa.Outlook(grid=(7, 7))(**x).reshape(B, 7, 7, H, E)
    assert_close(image[:, 2:5, 2:5], np.full((B, 3, 3, H, E), 9.0))
    assert (image[:, 0] < 6).all()  # Six windows reach it, some of whose weights are outside.
