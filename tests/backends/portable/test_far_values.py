"""LASER of values too far apart for one shift, in blocks of keys whose own values are close."""

import numpy as np
import pytest

import precondattn as pa
from precondattn_portable import read_log_mean_exp

TOKENS, BLOCK, D, E = 24, 8, 4, 3


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(read_log_mean_exp, "BLOCK", BLOCK)
    monkeypatch.setattr(read_log_mean_exp, "ELEMENTS", 3)


def inputs(levels):
    """Values around one level for each block of keys, and scores that outweigh the difference."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, TOKENS, 2, width)) for width in (D, D, E))
    level = np.repeat(levels, BLOCK)[None, :, None, None]
    q[..., 0], k[..., 0] = 20 * np.sqrt(D), -level[..., 0] / 20 * 0.9
    return q, k, v + level


LEVELS = {
    "rising": (-900.0, -300.0, 300.0),
    "falling": (300.0, -300.0, -900.0),
    "all_negative": (-2500.0, -1200.0, -1900.0),
}
MASK = np.arange(TOKENS)[None] >= np.asarray([[0], [BLOCK + 3]])


@pytest.mark.parametrize("key_mask", [None, MASK])
@pytest.mark.parametrize("levels", LEVELS)
def test_output_and_gradient_are_the_definition(levels, key_mask):
    x = inputs(LEVELS[levels])
    mechanism, results = pa.parse("laser"), []
    cotangent = np.random.default_rng(1).normal(size=(2, TOKENS, 2, E))
    for backend in ("reference", "portable"):
        out, pullback = mechanism.vjp(*x, key_mask=key_mask, backend=backend)
        results.append({"out": out, **pullback(cotangent)})
    for name, expected in results[0].items():
        size = np.abs(expected).max()
        np.testing.assert_allclose(results[1][name], expected, rtol=0, atol=1e-9 * size)


def test_values_far_apart_in_a_block_too():
    q, k, v = inputs((0.0, 0.0, 0.0))
    # The sum of the largest and the largest is within any range.
    v = v - 1500.0 * (np.arange(TOKENS) % 3)[None, :, None, None] - 1000.0
    q[..., 0], k[..., 0] = 60.0, 40.0 * (np.arange(TOKENS) % 3)[None, :, None]
    expected, found = (pa.parse("laser")(q, k, v, backend=b) for b in ("reference", "portable"))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
