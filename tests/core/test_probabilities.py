"""The histogram of attention probabilities (LASER, Figure 1), beside counts by NumPy."""

import numpy as np
import pytest

import precondattn as pa
from tests.core.in_every_library import LIBRARIES, assert_same_in
from tests.mathematics.attention_problems import logits
from tests.mathematics.identities import causal_mask

histogram = pa.diagnostics.probability_histogram
DECADES = 10.0 ** np.arange(-7, 0)


def softmax(t=5, s=8, causal=True):
    """Sharp attention of 4 query heads to 2 key heads, of which some keys are equal or zero."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, t, 4, 3)), rng.normal(size=(2, s, 2, 3))
    k[:, 1:3], k[:, -1] = k[:, :1], 0
    scores = logits(12 * q, k)
    if causal:
        scores[..., ~causal_mask(t, s)] = -np.inf
    a = np.exp(scores - scores.max(-1, keepdims=True))
    return a / a.sum(-1, keepdims=True)


@pytest.mark.parametrize(("t", "s"), [(8, 8), (5, 8), (1, 8), (8, 6)])
def test_shares_are_counts_of_what_a_causal_query_sees(t, s):
    a = softmax(t, s, causal=t <= s)
    seen = causal_mask(t, s)
    out = histogram(a)
    for b, h in np.ndindex(2, 4):
        counts, _ = np.histogram(a[b, h][seen], bins=[-1, *DECADES, 2])
        np.testing.assert_allclose(out[b, h], counts / seen.sum(), rtol=1e-14)
    np.testing.assert_allclose(out.sum(-1), 1)


def test_the_cumulative_sum_is_the_share_below_each_edge():
    a, edges = softmax(causal=False), (1e-20, 3e-4, 0.2)
    visible = np.ones(a.shape[-2:], dtype=bool)
    below = np.cumsum(histogram(a, edges, visible), axis=-1)
    for i, edge in enumerate(edges):
        np.testing.assert_allclose(below[..., i], np.mean(a < edge, axis=(-1, -2)))
    assert histogram(np.full((4, 4), 0.25), (0.25,)).tolist() == [0, 1]  # It is not below itself.


def test_pairs_that_are_not_visible_are_not_counted():
    a = softmax(8, 8)
    visible = causal_mask(8, 8)[None] & (np.arange(2) < 1)[:, None, None]
    out = histogram(a, visible=visible[:, None])
    np.testing.assert_array_equal(out[0], histogram(a)[0])
    assert np.all(np.isnan(out[1]))


def test_of_a_sharp_softmax_most_probabilities_are_small():
    """The smaller of two scores that differ by x has the probability 1 / (1 + eˣ)."""
    for x, place in ((1.0, 7), (5.0, 5), (10.0, 3), (17.0, 0)):
        a = 1 / (1 + np.exp(np.array([[-x, x]])))
        assert histogram(a)[place] >= 0.5


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_library_gives_equal_results_in_its_own_arrays(library):
    a = softmax(8, 8)
    assert_same_in(library, histogram, a)
    assert_same_in(library, histogram, a, visible=causal_mask(8, 8, window=3))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_has_shares_in_float32(dtype):
    torch = pytest.importorskip("torch")
    out = histogram(torch.full((300, 300), 0.003, dtype=getattr(torch, dtype)))
    assert out.dtype == torch.float32
    assert out.tolist() == [0, 0, 0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("edges", [(), (0.1, 0.01), (0.1, 0.1), (0.0, 0.1), (-1, 0.1), (np.nan,)])
def test_edges_that_do_not_ascend_are_refused(edges):
    with pytest.raises(ValueError, match="edges must be positive numbers that ascend"):
        histogram(softmax(), edges)


def test_negative_weights_and_other_arrays_are_refused():
    a = softmax()
    with pytest.raises(ValueError, match="must be at least 0 where they are visible"):
        histogram(a - 1e-9)
    histogram(np.where(causal_mask(5, 8), a, -1))  # What is not visible does not matter.
    with pytest.raises(TypeError, match="visible must be a boolean array of numpy"):
        histogram(a, visible=np.ones((5, 8)))
    with pytest.raises(ValueError, match=r"visible must broadcast to the shape \(2, 4, 5, 8\)"):
        histogram(a, visible=np.ones((8, 5), dtype=bool))
    with pytest.raises(ValueError, match=r"probabilities must be an array \(\.\.\., t, s\)"):
        histogram(a[0, 0, 0])
