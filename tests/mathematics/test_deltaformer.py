"""DeltaFormer against a loop over tokens, and against identities that hold for any implementation.

u_t = v_t − β_t Σ_{j<t} P_tj u_j with P the softmax over the keys before the token's own, and
o = softmax(s q kᵀ) u. Everything is float64.
"""

import numpy as np
import pytest

import precondattn as pa
from tests.mathematics.definitions import assert_is_defined
from tests.mathematics.identities import assert_close

KEYS = ["random", "clustered", "duplicate", "zero"]


def problem(seed=0, kind="random", b=2, s=9, h=4, n=2, d=3, e=5):
    rng = np.random.default_rng(seed)
    k = rng.normal(size=(b, s, n, d))
    if kind == "clustered":
        k = k[:, :1] + 1e-3 * k
    elif kind == "duplicate":
        k = k[:, rng.integers(2, size=s)]
    elif kind == "zero":
        k[:, ::2] = 0
    x = {"q": rng.normal(size=(b, s, h, d)), "k": k, "v": rng.normal(size=(b, s, n, e))}
    return x | {"beta": rng.uniform(size=(b, s, h))}


@pytest.mark.parametrize("kind", KEYS)
def test_keys_of_every_kind_have_the_output_and_gradient_of_the_definition(kind):
    assert_is_defined(pa.DeltaFormer(), problem(kind=kind, s=20))


def test_equal_keys_subtract_the_mean_of_what_is_left():
    x = problem(s=4, h=1, n=1)
    x["k"], x["beta"] = np.ones_like(x["k"]), np.ones_like(x["beta"])
    u = x["v"].copy()
    for t in range(1, 4):
        u[:, t] -= u[:, :t].mean(axis=1)
    assert_close(pa.deltaformer(**x), np.cumsum(u, axis=1) / np.arange(1, 5)[:, None, None])


@pytest.mark.parametrize("kind", KEYS)
def test_solved_values_are_at_most_as_many_times_the_largest_value_as_there_are_tokens(kind):
    x = problem(kind=kind, s=40)
    x["beta"] = np.ones_like(x["beta"])
    m = pa.DeltaFormer()
    _, cache = m.extend(m.init_cache(**x, capacity=40), **x)
    (u,) = (buffer for name, buffer in cache.store.items() if "solved" in name)
    largest = np.max(np.linalg.vector_norm(x["v"], axis=-1))
    tokens = np.arange(1, 41)[:, None]
    assert np.all(np.linalg.vector_norm(u, axis=-1) <= largest * tokens * (1 + 1e-12))
