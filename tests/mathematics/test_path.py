"""PaTH, and LUCID over it: what follows from reflections, and what their caches hold.

With H_t = I − β_t w_t w_tᵀ the scores are A_ij = q_iᵀ H_i H_{i−1} … H_{j+1} k_j. LUCID over PaTH
solves with Φ_ij = exp(s A_ij − s d), whose A is that of the normalised keys with themselves and the
same reflections. Outputs and gradients of ordinary inputs are compared in `test_definitions.py`.
Unless a test says so everything is float64, and has to hold to 1e-10 of the largest number.
"""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import precondattn as pa
from tests.mathematics.base_definitions import KeptTokens, path_scores
from tests.mathematics.definitions import assert_is_defined, definition, normed
from tests.mathematics.identities import assert_close, causal_mask, identity_values
from tests.mathematics.problems import Problem, problems

BETAS = {"zeros": 0.0, "ones": 1.0, "twos": 2.0, "mixed": (0.0, 0.5, 1.0, 2.0)}
DIRECTIONS = ("unit", "keys", "repeated", "raw", "zero")
FLUSHES = (1, 2, 3, 5)
BOTH = ("path[{}]", "lucid(path[{}])")


def inputs_of(p, m, directions="unit", betas="mixed"):
    """Directions w of length 1, of any length (raw), or zero, and β of a kind."""
    x = p.x(m)
    match directions:
        case "keys":
            size = np.linalg.norm(p.k, axis=-1, keepdims=True)
            x["w"] = p.k / np.where(size == 0, 1, size)
        case "repeated":
            x["w"] = np.broadcast_to(x["w"][:, :1], x["w"].shape).copy()
        case "raw":
            x["w"] = x["w"] * p.rng.uniform(0.2, 1.1, size=(*p.k.shape[:3], 1))
        case "zero":
            x["w"] = 0 * x["w"]
    x["beta"] = p.rng.choice(np.atleast_1d(BETAS[betas]), size=x["beta"].shape)
    return x


def at(x, tokens):
    return {name: array[:, tokens] for name, array in x.items()}


def scores_by_loops(x, q=None):
    """A (b, n, t, s), of queries of as many heads as keys."""
    q = x["q"] if q is None else q
    everywhere = np.arange(x["k"].shape[1])
    tokens = KeptTokens(everywhere[len(everywhere) - q.shape[1] :], everywhere, len(everywhere))
    rows = [(q[b], *(x[name][b] for name in ("k", "w", "beta"))) for b in range(len(q))]
    return np.stack([path_scores(*row, tokens).real for row in rows])


@pytest.mark.parametrize("kind", ["random", "clustered", "duplicate", "zero"])
@pytest.mark.parametrize("directions", DIRECTIONS)
@pytest.mark.parametrize("text", ["path", "lucid(path)"])
def test_reflections_of_every_kind_give_the_output_and_gradient_of_the_definition(
    text, directions, kind
):
    m = pa.parse(text)
    for betas in BETAS:
        p = Problem(0, kind, s=7, t=5 if kind == "random" else 7, n=2, group=2)
        assert_is_defined(m, inputs_of(p, m, directions, betas))


def test_scores_are_those_of_the_closed_form():
    """A = tril(q kᵀ) − tril(q wᵀ) (I + diag(β) stril(w wᵀ))⁻¹ diag(β) stril(w kᵀ)."""
    x = inputs_of(Problem(s=9, n=2, d=4), pa.Path(), "raw")
    scores = scores_by_loops(x)
    for b, n in np.ndindex(2, 2):
        q, k, w, beta = (x[name][b, :, n] for name in ("q", "k", "w", "beta"))
        z = np.linalg.inv(np.eye(9) + beta[:, None] * np.tril(w @ w.T, -1)) * beta
        closed = np.tril(q @ k.T) - np.tril(q @ w.T) @ z @ np.tril(w @ k.T, -1)
        assert_close(scores[b, n], closed)


@given(problems(["random", "clustered"], square=True, grouped=False), st.sampled_from(list(BETAS)))
def test_scores_are_bounded_by_the_lengths_of_query_and_key(p, betas):
    """A zero key comes first: a key's weight divided by that of the zero key is e^A."""
    m = pa.Path(scale=1.0)
    x = inputs_of(p, m, "unit", betas) | {"q": p.q / 2, "k": p.k / 2}
    lengths = [np.linalg.norm(x[name], axis=-1) for name in "qk"]
    bound = np.einsum("btn,bsn->bnts", *lengths)
    before = {n: np.concatenate([0 * x[n][:, :1], x[n]], axis=1) for n in ("k", "w", "beta")}
    weights = m(
        x["q"],
        before.pop("k"),
        identity_values(np.pad(x["k"], [(0, 0), (1, 0), *[(0, 0)] * 2])),
        **before,
    )
    weights = weights.transpose(0, 2, 1, 3)
    scores = np.zeros_like(weights)
    np.log(weights / weights[..., :1], out=scores, where=weights > 0)
    assert np.all(np.abs(scores[..., 1:]) <= bound + 1e-10)
    assert_close(scores[..., 1:], scores_by_loops(x), size=1 + np.abs(scores).max())


@pytest.mark.parametrize("length", [1.3, -1.3])
def test_directions_are_used_as_they_are_and_may_expand(length):
    k = np.ones((1, 5, 1, 1))
    m, x = pa.Path(scale=1.0), {"w": np.full_like(k, length), "beta": np.full((1, 5, 1), 2.0)}
    factor = 1 - 2 * length**2  # −2.38
    steps = np.arange(5)[:, None] - np.arange(5)
    scores = np.where(steps >= 0, 0.5 * factor ** np.maximum(steps, 0), -np.inf)
    weights = np.exp(scores - np.logaddexp.reduce(scores, axis=-1, keepdims=True))
    assert_close(m(0.5 * k, k, identity_values(k), **x)[0, :, 0], weights)


def test_beta_of_two_is_a_dot_product_of_reflected_queries_and_keys():
    p = Problem(s=8, n=2)
    x = inputs_of(p, pa.Path(), "unit", "twos")
    q, k = np.zeros_like(p.q), np.zeros_like(p.k)
    for b, n in np.ndindex(2, 2):
        product = np.eye(3)
        for t in range(8):
            w = x["w"][b, t, n]
            product = product @ (np.eye(3) - 2 * np.outer(w, w))  # H_1 … H_t
            q[b, t, n], k[b, t, n] = product @ p.q[b, t, n], product @ p.k[b, t, n]
    assert_close(pa.Path()(**x), pa.Softmax()(q, k, p.v))


@pytest.mark.parametrize("text", ["path", "lucid(path)"])
def test_the_reflection_of_the_first_token_and_signs_and_lengths_have_no_effect(text):
    """Only β w wᵀ matters, from the second token on."""
    m, p = pa.parse(text), Problem(s=8, n=2, group=2)
    x = inputs_of(p, m)
    out = m(**x)
    changed = {name: x[name].copy() for name in ("w", "beta")}
    changed["w"][:, 0], changed["beta"][:, 0] = 5.0, 1.7
    assert_close(m(**x | changed), out)
    c = p.rng.choice([-3.0, -1.0, 0.5], size=x["beta"].shape)
    assert_close(m(**x | {"w": c[..., None] * x["w"], "beta": x["beta"] / c**2}), out)


@pytest.mark.parametrize("forget", ["unscaled", "scaled"])
def test_a_closed_gate_forgets_all_that_came_before(forget):
    m, plain, p = pa.Path(forget=forget), pa.Path(), Problem(s=8, n=2, group=2)
    x = inputs_of(p, m)
    for cut in (0, 3, 7):
        g = np.where(np.arange(8)[:, None] == cut, -1e4, 0.0) + np.zeros_like(x["g"])
        assert_is_defined(m, x | {"g": g})
        rest = {name: a for name, a in x.items() if name != "g"}
        out = m(**x | {"g": g})
        assert_close(out[:, cut:], plain(**at(rest, slice(cut, None))))
    closed, pullback = m.vjp(**x | {"g": np.full_like(x["g"], -1e4)})
    assert_close(closed, np.repeat(p.v, 2, axis=2))
    gradients = pullback(p.like_output())
    for name in ("q", "k", "w", "beta", "g"):
        assert_close(gradients[name], 0.0, size=1)


@pytest.mark.parametrize("text", ["path", "path[forget=unscaled]"])
def test_enormous_reflections_of_the_future_change_no_bit_of_past_outputs(text):
    m, p = pa.parse(text), Problem(s=8, n=2, group=2)
    x = inputs_of(p, m)
    before = m(**x)[:, :5]
    moved = {
        name: np.concatenate([a[:, :5], 1e3 * a[:, 5:] - 0.5], axis=1) for name, a in x.items()
    }
    for changed in (moved, *({name: moved[name]} for name in x)):
        np.testing.assert_array_equal(m(**x | changed)[:, :5], before)


def test_long_directions_of_one_segment_do_not_affect_the_next():
    p = Problem(s=9)
    x, first = inputs_of(p, pa.Path()), np.arange(9) < 4
    x["w"] = np.where(first[:, None, None], 1e3 * x["w"], x["w"])
    packed, pullback = pa.Path().vjp(**x, segment_ids=np.tile(1 - first, (2, 1)))
    alone, pullback_alone = pa.Path().vjp(**at(x, ~first))
    assert_close(packed[:, ~first], alone)
    cotangent = np.where(first[:, None, None], 0, p.like_output())
    gradients, expected = pullback(cotangent), pullback_alone(cotangent[:, ~first])
    for name in expected:
        assert_close(gradients[name][:, ~first], expected[name])
        assert np.all(gradients[name][:, first] == 0)


# LUCID over PaTH


def kernels(x, eps):
    """I + stril(Φ) of every head, (b, n, s, s)."""
    keys = normed(x["k"], "rms", eps)
    d, scores = keys.shape[-1], scores_by_loops(x | {"k": keys}, keys)
    below = np.tril(np.ones(scores.shape[-2:]), -1)
    return np.exp((scores - d) * d**-0.5) * below + np.eye(len(below))


def inverse_of(m, k, **named):
    """P (b, n, s, s), by which LUCID maps values to the solved values that a cache stores."""
    cache, values = m.init_cache(k, k, identity_values(k), capacity=k.shape[1]), identity_values(k)
    return m.extend(cache, k, k, values, **named)[1].store["y"].transpose(0, 2, 1, 3)


@pytest.mark.parametrize("kind", ["random", "clustered", "duplicate"])
def test_a_normalised_query_equal_to_its_key_retrieves_its_value_scaled(kind):
    p, m = Problem(0, kind, s=8, n=2), pa.Lucid(pa.Path(), eps=0)
    x = inputs_of(p, m)
    expected = p.v / kernels(x, 0).sum(-1).transpose(0, 2, 1)[..., None]
    kn, size = normed(p.k, "rms", 0), np.abs(p.v).max()
    assert_close(m(**x | {"q": kn, "k": kn}), expected, size)
    both = pa.Lucid(pa.Path(), eps=0, normalize="queries_and_keys")
    assert_close(both(**x | {"q": p.k}), expected, size)


@pytest.mark.parametrize("flush", [1, 3])
@pytest.mark.parametrize("directions", ["unit", "keys", "repeated"])
def test_unit_directions_bound_the_kernel_and_its_inverse_whatever_the_keys(directions, flush):
    m = pa.Lucid(pa.Path(flush=flush))
    for kind in ("random", "clustered", "duplicate", "zero"):
        x = inputs_of(Problem(1, kind, s=20, n=2), m, directions)
        inverse = inverse_of(m, x["k"], w=x["w"], beta=x["beta"])
        n = inverse.shape[-1]
        assert np.abs(inverse).max() <= 1 + 1e-12
        assert np.sum(inverse**2, axis=-2).max() <= 2 + 1e-12
        assert np.linalg.cond(inverse).max() <= n * np.sqrt(n + 1) * (1 + 1e-10)
        matrix = np.linalg.inv(inverse)
        assert matrix.max() <= 1 + 1e-9
        assert_close(matrix, kernels(x, 1e-6), size=10)


def test_long_directions_exceed_the_bound():
    k = np.ones((1, 7, 1, 2))
    w, beta = 1.1 * k / np.sqrt(2), np.full((1, 7, 1), 2.0)  # Factors of −1.42.
    assert np.abs(inverse_of(pa.Lucid(pa.Path()), k, w=w, beta=beta)).max() > 10


def test_the_dot_product_is_refused_where_it_is_the_base_s_own():
    for base in (pa.Softmax(), pa.Laser(), pa.Softmax(causal=False)):
        with pytest.raises(TypeError, match=r"path transports keys, .* none; write lucid"):
            pa.Lucid(base, metric="dot")


# Caches


def decode(m, x, widths):
    """The output of blocks of these widths, and the last cache."""
    cuts = [0, *np.cumsum(widths).tolist()]
    cache, outs = m.init_cache(*(x[name] for name in "qkv"), capacity=cuts[-1]), []
    for start, stop in pairwise(cuts):
        out, cache = m.extend(cache, **at(x, slice(start, stop)))
        outs.append(out)
    return np.concatenate(outs, axis=1), cache


def with_flush(text, flush):
    return pa.parse(text.format(f"flush={flush}"))


@pytest.mark.parametrize("directions", DIRECTIONS)
@pytest.mark.parametrize("flush", FLUSHES)
@pytest.mark.parametrize("text", BOTH)
def test_decoding_one_by_one_over_many_flushes_is_the_definition(text, flush, directions):
    m, length = with_flush(text, flush), max(6, 3 * flush + 1)
    x = inputs_of(Problem(0, "clustered", s=length, group=2), m, directions)
    out, _ = decode(m, x, [1] * length)
    assert_close(out, definition(m, x)[0].real)


@pytest.mark.parametrize("text", BOTH)
@pytest.mark.parametrize("flush", FLUSHES)
def test_the_cache_stores_keys_as_of_the_last_flush_and_the_reflections_since(text, flush):
    m, p = with_flush(text, flush), Problem(s=8, n=2)
    x = inputs_of(p, m)
    for length in range(1, 9):
        caches = [decode(m, at(x, slice(length)), widths)[1] for widths in ([length], [1] * length)]
        flushed = length - length % flush
        for cache in caches:
            keys = cache.store["path(k,w,beta)"]
            for b, j, n in np.ndindex(2, flushed, 2):
                key = p.k[b, j, n]
                for t in range(j + 1, flushed):
                    w = x["w"][b, t, n]
                    key = key - x["beta"][b, t, n] * w * (w @ key)
                assert_close(keys[b, j, n], key, size=1)
            for name in ("w", "beta") if flush > 1 else ():
                since = cache.store[f"pending({name})"][:, : length - flushed]
                np.testing.assert_array_equal(since, x[name][:, flushed:length])


@pytest.mark.parametrize("flush", FLUSHES)
def test_a_cache_stores_the_norm_of_the_original_key(flush):
    m, p = pa.Lucid(pa.Path(flush=flush)), Problem(0, "clustered", s=11, n=2, group=2)
    x = inputs_of(p, m, "keys")
    x["beta"] = np.full_like(x["beta"], 0.5)  # Keys shrink by half each time.
    out, cache = decode(m, x, [1] * 11)
    assert_close(out, m(**x))
    original = np.sqrt(np.mean(p.k**2, axis=-1) + 1e-6)
    assert_close(cache.store["rms(k)"], original)
    moved = np.sqrt(np.mean(cache.store["path(k,w,beta)"][:, 0] ** 2, axis=-1))
    assert np.all(moved < 0.01 * original[:, 0])


@pytest.mark.parametrize("flush", FLUSHES)
def test_a_cache_with_the_dot_product_holds_both_keys(flush):
    m = pa.Lucid(pa.Path(flush=flush), metric="dot")
    x = inputs_of(Problem(s=11, n=2, group=2), m)
    out, cache = decode(m, x, [1, 4, 1, 1, 4])
    assert_close(out, definition(m, x)[0].real)
    assert {"k", "path(k,w,beta)", "rms(k)", "y"} <= set(cache.store)


@pytest.mark.parametrize(
    "text", ["path[{}]", "path[{},window=3]", "path[{},forget=unscaled]", "lucid(path[{}])"]
)
@pytest.mark.parametrize("flush", [1, 3])
def test_masked_keys_in_a_ragged_cache_neither_reflect_nor_are_attended_to(text, flush):
    m = with_flush(text, flush)
    x = inputs_of(Problem(s=10, group=2), m)
    mask = np.random.default_rng(1).random((2, 10)) < 0.6
    cache, outs = m.init_cache(*(x[name] for name in "qkv"), capacity=10, key_mask=True), []
    for start, stop, counts in ((0, 4, [4, 1]), (4, 5, [0, 1]), (5, 10, [3, 5])):
        part, seen = at(x, slice(start, stop)), mask[:, start:stop]
        out, cache = m.extend(cache, **part, key_mask=seen, lengths=counts)
        outs.append(out)
    out = np.concatenate(outs, axis=1)
    for i, valid in enumerate(([0, 1, 2, 3, 5, 6, 7], [0, 4, 5, 6, 7, 8, 9])):
        alone = {name: a[i : i + 1, valid] for name, a in x.items()}
        expected = definition(m, alone, key_mask=mask[i : i + 1, valid])[0].real
        assert_close(out[i : i + 1, valid], expected, size=1 + np.abs(expected).max())
        assert np.all(np.delete(out[i], valid, axis=0) == 0)


def scores_by_key_cache(q, k, w, beta):
    """A of one head by reflecting every past key at every token, in linear memory."""
    scores, keys = np.zeros((len(q), len(k))), k.copy()
    for i in range(len(q)):
        keys[:i] -= beta[i] * np.outer(keys[:i] @ w[i], w[i])
        scores[i, : i + 1] = keys[: i + 1] @ q[i]
    return scores


def long_reference(q, k, v, w, beta, lucid):
    """The output in float64 for one head of each sequence, which may be hundreds of tokens long."""
    out, d = np.zeros_like(v), q.shape[-1]
    for b in range(len(q)):
        q1, k1, y, w1, beta1 = (x[b, :, 0].copy() for x in (q, k, v, w, beta))
        if lucid:
            kn = normed(k1, "rms", 1e-6)
            phi = np.exp((scores_by_key_cache(kn, kn, w1, beta1) - d) * d**-0.5)
            for t in range(len(y)):
                y[t] -= phi[t, :t] @ y[:t]
        logits = scores_by_key_cache(q1, k1, w1, beta1) * d**-0.5
        logits = np.where(causal_mask(len(y), len(y)), logits, -np.inf)
        out[b, :, 0] = np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)) @ y
    return out


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("flush", [1, 7])
@pytest.mark.parametrize("text", BOTH)
def test_hundreds_of_single_steps_stay_accurate(text, flush, dtype):
    """In float64 the few steps are those of the definition, which checks the long reference."""
    m, is_lucid = with_flush(text, flush), text.startswith("lucid")
    p = Problem(s=9 if dtype == "float64" else 200, d=8)
    x = inputs_of(p, m)
    if dtype == "float64":
        assert_close(long_reference(**x, lucid=is_lucid), definition(m, x)[0].real)
        return
    if dtype == "bfloat16":
        torch = pytest.importorskip("torch")
        given = {name: torch.tensor(a).to(torch.bfloat16) for name, a in x.items()}
        exact = {name: a.double().numpy() for name, a in given.items()}
    else:
        given = {name: a.astype(dtype) for name, a in x.items()}
        exact = {name: a.astype(np.float64) for name, a in given.items()}
    cache, outs = m.init_cache(*(given[name] for name in "qkv"), capacity=200), []
    for t in range(200):
        out, cache = m.extend(cache, **at(given, slice(t, t + 1)), donate=True)
        assert dtype in str(out.dtype)
        outs.append(out.double().numpy() if dtype == "bfloat16" else out)
    expected = long_reference(**exact, lucid=is_lucid)
    within = 2e-2 if dtype == "bfloat16" else 2e-5
    assert np.abs(np.concatenate(outs, axis=1) - expected).max() <= within * np.abs(expected).max()


@pytest.mark.parametrize("how", ["at once", "one by one"])
@pytest.mark.parametrize("forget", ["unscaled", "scaled"])
def test_a_closed_gate_in_single_precision_leaves_later_gates_accurate(forget, how):
    m = pa.Path(forget=forget)
    x = inputs_of(Problem(s=12), m)
    x["g"][:, 3] = -1e4
    x = {name: a.astype(np.float32) for name, a in x.items()}
    out = m(**x) if how == "at once" else decode(m, x, [1] * 12)[0]
    expected = definition(m, {name: a.astype(np.float64) for name, a in x.items()})[0].real
    assert np.abs(out - expected).max() <= 2e-5 * np.abs(expected).max()
