"""DeltaFormer against a loop over tokens, and against identities that hold for any implementation.

u_t = v_t − β_t Σ_{j<t} P_tj u_j with P the softmax over the keys before the token's own, and
o = softmax(s q kᵀ) u. Everything is float64.
"""

import numpy as np
import pytest

import precondattn as pa
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


def softmax(x):
    weights = np.exp(x - np.max(x))
    return weights / np.sum(weights)


def by_loops(q, k, v, beta, scale=None):
    scale = q.shape[3] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        keys, u = k[b, :, h // group], v[b, :, h // group].copy()
        for t in range(q.shape[1]):
            scores = scale * keys[: t + 1] @ q[b, t, h]
            if t:
                u[t] -= beta[b, t, h] * softmax(scores[:t]) @ u[:t]
            out[b, t, h] = softmax(scores) @ u[: t + 1]
    return out


@pytest.mark.parametrize("kind", KEYS)
def test_it_is_its_definition_token_by_token(kind):
    x = problem(kind=kind)
    assert_close(pa.deltaformer(**x), by_loops(**x))
    assert_close(pa.deltaformer(**x, scale=2.0), by_loops(**x, scale=2.0))


@pytest.mark.parametrize("backend", ["reference", "portable"])
def test_without_strength_it_is_softmax_attention(backend):
    x = problem()
    x["beta"] = np.zeros_like(x["beta"])
    without = {name: x[name] for name in "qkv"}
    result = pa.deltaformer(**x, backend=backend)
    assert_close(result, pa.softmax(**without, backend="reference"))


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


@pytest.mark.parametrize("backend", ["reference", "portable"])
def test_many_blocks_of_rows_are_the_definition(backend):
    x = problem(b=1, s=300, h=2, n=1, kind="clustered")
    assert_close(pa.deltaformer(**x, backend=backend), by_loops(**x))


@pytest.mark.parametrize("backend", ["reference", "portable"])
def test_a_masked_token_is_removed_from_both_maps_and_reads_nothing(backend):
    x = problem()
    kept = np.ones((2, 9), dtype=bool)
    kept[:, 4] = False
    out = pa.deltaformer(**x, key_mask=kept, backend=backend)
    rest = {name: np.delete(array, 4, axis=1) for name, array in x.items()}
    assert_close(np.delete(out, 4, axis=1), pa.deltaformer(**rest, backend="reference"))
    assert not np.any(out[:, 4])
