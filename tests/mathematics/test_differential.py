"""Differential attention: what its two maps share, and the pairs of heads that are its inputs.

The definition is o = f(q, k, v) − λ f(q2, k2, v), f being the base and λ one number, one for each
head, or one for each token and head. `test_definitions.py` compares outputs and gradients.
"""

import numpy as np
import pytest

import precondattn as pa
from tests.mathematics.identities import assert_close
from tests.mathematics.problems import Problem

SHARED = [
    # The mechanism, its inputs of the second map, and what its cache holds.
    ("differential", "q2 k2", {"k", "k2", "v"}),
    ("differential[paired=q]", "q2", {"k", "v"}),
    ("differential[per=token,paired=k]", "k2", {"k", "k2", "v"}),
    ("differential(laser)", "q2 k2", {"k", "k2", "v"}),
    ("differential(path)", "q2 k2", 3),
    ("differential[paired=q](path)", "q2", 2),
    ("differential[paired=q/k/w/beta](path)", "q2 k2 w2 beta2", 3),
    ("differential[paired=q/k/tau](temperature)", "q2 k2 tau2", {"k", "k2", "v"}),
    ("differential(lucid)", "q2 k2", 4),  # y, y₂, k, k₂
    ("differential[paired=q](lucid)", "q2", 2),  # One solve, read twice.
]


@pytest.mark.parametrize(("text", "second", "stored"), SHARED)
def test_the_two_maps_share_what_is_not_paired(text, second, stored):
    m = pa.parse(text)
    assert set(m.inputs) == {*m.base.inputs, *second.split(), "lam"}
    store = m.init_cache(**Problem(s=4).x(m), capacity=4).store
    wide = {name for name, buffer in store.items() if buffer.ndim == 4 and "pending" not in name}
    assert (len(wide) if isinstance(stored, int) else wide) == stored


PAIRS = {"adjacent": lambda i, h: (2 * i, 2 * i + 1), "halves": lambda i, h: (i, i + h)}


@pytest.mark.parametrize("library", ["numpy", "torch", "jax.numpy"])
@pytest.mark.parametrize("layout", PAIRS)
@pytest.mark.parametrize("pairs", [1, 3, 4])
def test_heads_split_and_values_join_by_their_layout(layout, pairs, library):
    array = pytest.importorskip(library).asarray
    x = np.arange(2 * 3 * 2 * pairs * 5.0).reshape(2, 3, 2 * pairs, 5)
    parts = pa.split_heads(array(x), layout)
    paired = pa.pair_values(array(x), layout)
    assert {type(a) for a in (*parts, paired)} == {type(array(x))}
    first, second = (np.asarray(a) for a in parts)
    for i in range(pairs):
        one, other = PAIRS[layout](i, pairs)
        np.testing.assert_array_equal(first[:, :, i], x[:, :, one])
        np.testing.assert_array_equal(second[:, :, i], x[:, :, other])
    np.testing.assert_array_equal(np.asarray(paired), np.concatenate([first, second], axis=-1))


@pytest.mark.parametrize("layout", PAIRS)
def test_grouped_heads_pair_as_queries_and_keys_of_one_pair(layout):
    """Pair i of four reads key/value pair ⌊i/2⌋ of two: eight query heads, four key/value heads."""
    rng = np.random.default_rng(0)
    queries, keys, values = (rng.normal(size=(1, 5, heads, 3)) for heads in (8, 4, 4))
    (q, q2), (k, k2) = pa.split_heads(queries, layout), pa.split_heads(keys, layout)
    out = pa.Differential()(q, k, pa.pair_values(values, layout), q2=q2, k2=k2, lam=np.asarray(0.7))
    assert out.shape == (1, 5, 4, 6)
    for i in range(4):
        heads, shared = PAIRS[layout](i, 4), PAIRS[layout](i // 2, 2)
        v = np.concatenate([values[:, :, [j]] for j in shared], axis=-1)
        first, second = (
            pa.Softmax()(queries[:, :, [head]], keys[:, :, [j]], v)
            for head, j in zip(heads, shared, strict=True)
        )
        assert_close(out[:, :, [i]], first - 0.7 * second, size=10)


def test_arrays_without_pairs_of_heads_are_refused():
    x = np.zeros((1, 2, 4, 3))
    with pytest.raises(ValueError, match=r"even number of heads; found \(1, 2, 3, 3\)"):
        pa.pair_values(x[:, :, :3], "halves")
    with pytest.raises(ValueError, match=r"shape \(b, t, 2h, d\).*found \(2, 4, 3\)"):
        pa.pair_values(x[0], "adjacent")
    with pytest.raises(ValueError, match="layout must be 'adjacent' or 'halves'; found 'pairs'"):
        pa.pair_values(x, "pairs")
    with pytest.raises(TypeError, match="list"):
        pa.pair_values(x.tolist(), "halves")
    with pytest.raises(TypeError):
        pa.pair_values(x)
