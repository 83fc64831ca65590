"""The Pallas kernels of softmax attention against the definition, interpreted."""

import numpy as np
import pytest

pytest.importorskip("jax")

import jax.numpy as jnp

import precondattn as pa
from precondattn_pallas.softmax.attention import SoftmaxKernels
from precondattn_pallas.softmax.score_tiles import (
    StaticMask,
    met_by_keys,
    met_by_queries,
    segments_of,
)
from tests.backends.pallas.tiles import BOUNDS, check, frame_of

KERNELS = SoftmaxKernels(interpret=True)


def problem(t, s, h=4, n=2, d=12, e=20, b=2, spread=1.0):
    rng = np.random.default_rng(t)
    x = {
        "q": spread * rng.normal(size=(b, t, h, d)),
        "k": rng.normal(size=(b, s, n, d)),
        "v": rng.normal(size=(b, s, n, e)),
    }
    return x, rng.normal(size=(b, t, h, e))


@pytest.mark.parametrize(
    ("options", "t", "s", "masks", "dtype"),
    [
        ({}, 65, 65, {}, "float32"),
        ({}, 33, 65, {}, "bfloat16"),
        ({"causal": False}, 31, 63, {}, "float16"),
        ({"window": 20}, 40, 65, {}, "float32"),
        ({"window": 5, "causal": False}, 64, 64, {}, "float32"),
        ({}, 40, 50, {"lengths": (50, 3)}, "float32"),
        ({}, 49, 65, {"segments": (20, 9)}, "float32"),
        ({"causal": False}, 65, 65, {"segments": (20, 9), "masked": True}, "bfloat16"),
        ({"scale": 0.1}, 1, 1, {}, "float32"),
    ],
)
def test_every_mask_across_tiles(options, t, s, masks, dtype):
    x, cotangent = problem(t, s)
    if masks.pop("masked", False):
        # Full tiles of keys and full segments are masked.
        masks = {
            **masks,
            "key_mask": (np.arange(s) % 3 > 0) & (np.arange(s) > 35) & np.ones((2, 1), bool),
        }
    frame = frame_of(t, s, 2, **masks)
    check(KERNELS, pa.Softmax(**options), x, cotangent, frame, dtype, BOUNDS[dtype])


def test_huge_logits_do_not_overflow():
    x, cotangent = problem(40, 40, h=2, b=1, spread=1000.0)
    check(KERNELS, pa.Softmax(), x, cotangent, frame_of(40, 40, 1), "float32", 1e-4)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("t", "s"), [(50, 50), (23, 50)])
def test_exactly_the_tiles_with_a_visible_pair_are_visited(t, s, causal, window):
    """No tile is missed; tiles masked by causality, window or segments are not visited."""
    mask = StaticMask(t, s, causal, window)
    segment = np.stack([np.arange(s) // 13, np.arange(s) // 30])
    frame = frame_of(t, s, 2, segments=(13, 30))
    is_visible = np.broadcast_to(frame.visible(causal=causal, window=window)[:, 0], (2, t, s))
    segments = segments_of(mask, 2, None, jnp.asarray(segment))
    for met, sees in (
        (met_by_queries(mask, segments, 8, 4), is_visible),
        (met_by_keys(mask, segments, 8, 4), is_visible.transpose(0, 2, 1)),
    ):
        low, high = map(np.asarray, met)
        for b, i in np.ndindex(*low.shape):
            columns = np.flatnonzero(sees[b, 8 * i : 8 * i + 8].any(0)) // 4
            if columns.size:
                assert (low[b, i], high[b, i]) == (columns.min(), columns.max() + 1)
            else:
                assert low[b, i] >= high[b, i]
