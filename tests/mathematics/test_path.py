"""PaTH, and LUCID over it, against their definitions and what follows from them.

With H_t = I − β_t w_t w_tᵀ the scores are A_ij = q_iᵀ H_i H_{i−1} … H_{j+1} k_j, written here as
products of matrices, pair by pair. LUCID over PaTH solves with Φ_ij = exp(s A_ij − s d), whose A is
that of the normalised keys with themselves and the same reflections.
Unless a test says so everything is float64, and has to hold to 1e-10 of the largest number it
speaks of. Gradients are those of the loops by complex steps, f(x + iε)/ε, which round nothing off.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import precondattn as pa
from precondattn.spec.transported import key_cache_form, product_form
from tests.mathematics.identities import causal_mask, identity_values

sampled = settings(
    max_examples=20, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
KEYS = ["random", "clustered", "duplicate", "zero"]
DIRECTIONS = ["unit", "keys", "repeated", "raw", "zero"]
UNIT = ["unit", "keys", "repeated"]
BETAS = ["random", "zeros", "ones", "twos", "mixed"]
FLUSHES = [1, 2, 3, 5]


def assert_close(actual, expected, size=None, tolerance=1e-10):
    """Equality to 1e-10 of `size`, by default the largest expected number."""
    expected = np.broadcast_to(expected, np.shape(actual))
    size = np.max(np.abs(expected), initial=0.0) if size is None else size
    assert np.max(np.abs(actual - expected), initial=0.0) <= tolerance * size


# Problems


def unit(x):
    """Rows of length 1; a zero row stays."""
    size = np.linalg.norm(x, axis=-1, keepdims=True)
    return x / np.where(size == 0, 1, size)


def make_keys(rng, kind, shape):
    """Keys (b, s, n, d) of the kinds that are hard to tell apart."""
    k = rng.normal(size=shape)
    chosen = rng.integers(2, size=shape[1])
    match kind:
        case "clustered":
            return rng.normal(size=(shape[0], 1, *shape[2:])) + 1e-3 * k
        case "duplicate":
            return k[:, chosen % shape[1]]
        case "zero":
            return k * chosen[:, None, None]
    return k


def make_directions(rng, kind, k):
    """Directions w of length 1, or of any length (raw), or none."""
    w = unit(rng.normal(size=k.shape))
    match kind:
        case "keys":
            return unit(k)
        case "repeated":
            return np.broadcast_to(w[:, :1], w.shape).copy()
        case "raw":
            return w * rng.uniform(0.2, 1.1, size=(*k.shape[:3], 1))
        case "zero":
            return 0 * w
    return w


def make_betas(rng, kind, shape):
    match kind:
        case "mixed":
            return rng.choice([0.0, 0.5, 1.0, 2.0], size=shape)
        case "random":
            return rng.uniform(0, 2, size=shape)
    return np.full(shape, {"zeros": 0.0, "ones": 1.0, "twos": 2.0}[kind])


class Problem:
    """Random q, v and forget gates, and keys, directions and β of chosen kinds."""

    def __init__(self, rng, keys="random", directions="unit", betas="random", **sizes):
        b, s, n, d = (
            sizes.get(name, size) for name, size in zip("bsnd", (2, 5, 1, 3), strict=True)
        )
        self.rng, self.group = rng, sizes.get("group", 1)
        self.q = rng.normal(size=(b, sizes.get("t") or s, n * self.group, d))
        self.k = make_keys(rng, keys, (b, s, n, d))
        self.v = rng.normal(size=(b, s, n, 2))
        self.w = make_directions(rng, directions, self.k)
        self.beta = make_betas(rng, betas, (b, s, n))
        self.g = -np.exp(rng.normal(size=(b, s, n * self.group)))

    @property
    def inputs(self):
        return {name: getattr(self, name) for name in ("q", "k", "v", "w", "beta")}

    @property
    def gated(self):
        return self.inputs | {"g": self.g}

    def like_output(self):
        return self.rng.normal(size=(*self.q.shape[:3], self.v.shape[-1]))


@st.composite
def problems(
    draw, square=True, keys=KEYS, directions=DIRECTIONS, betas=BETAS, longest=8, grouped=True
):
    s = draw(st.integers(1, longest))
    return Problem(
        np.random.default_rng(draw(st.integers(0, 2**32 - 1))),
        draw(st.sampled_from(keys)),
        draw(st.sampled_from(directions)),
        draw(st.sampled_from(betas)),
        s=s,
        t=None if square else draw(st.integers(1, s)),
        n=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 3)) if grouped else 1,
        d=draw(st.integers(1, 5)),
    )


def at(inputs, *index):
    """The same index into every input that has a batch and time."""
    return {name: x[index] if x.ndim > 1 else x for name, x in inputs.items()}


# The definitions


def reflection(w, beta):
    return np.eye(len(w)) - beta * np.outer(w, w)


def path_scores(q, k, w, beta):
    """A (t, s) of one head, from the products of all H between a query and a key."""
    t, s = len(q), len(k)
    scores = np.zeros((t, s), dtype=np.result_type(q, k, w, beta))
    for i in range(t):
        product = np.eye(k.shape[-1])
        for j in range(i + s - t, -1, -1):
            scores[i, j] = q[i] @ product @ k[j]
            product = product @ reflection(w[j], beta[j])
    return scores


def scores_of_all_heads(q, k, w, beta):
    """A (b, h, t, s) for arrays (b, t, h, d), with shared key heads."""
    group = q.shape[2] // k.shape[2]
    return np.stack(
        [
            [
                path_scores(*(x[b, :, h // (1 if x is q else group)] for x in (q, k, w, beta)))
                for h in range(q.shape[2])
            ]
            for b in range(q.shape[0])
        ]
    )


def softmax(logits, mask):
    logits = np.where(mask, logits, 0)
    highest = np.max(np.where(mask, logits.real, -np.inf), axis=-1, keepdims=True)
    weights = np.where(mask, np.exp(np.where(mask, logits - highest, 0)), 0)
    return weights / np.sum(weights, axis=-1, keepdims=True)


def weights_by_loops(q, k, w, beta, g=None, *, scale=None, window=None, forget="unscaled", bias=0):
    t, s = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = scale * scores_of_all_heads(q, k, w, beta) + bias
    if g is not None:
        passed = np.cumsum(g, axis=1).transpose(0, 2, 1)
        gate = passed[:, :, s - t :, None] - passed[:, :, None, :]
        logits = logits + (scale if forget == "scaled" else 1) * gate
    return softmax(logits, causal_mask(t, s, window))


def read(weights, y):
    """A y, with shared value heads."""
    return np.einsum("bhts,bshe->bthe", weights, np.repeat(y, weights.shape[1] // y.shape[2], 2))


def path_by_loops(q, k, v, w, beta, g=None, **options):
    return read(weights_by_loops(q, k, w, beta, g, **options), v)


def rms_norm(x, eps=1e-6):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def kernel(k, w, beta, normalize="keys", *, scale=None, eps=1e-6, window=None):
    """The matrix E of E y = v for one head (s, d), entry by entry; I + stril(Φ) if normalised."""
    s, d = k.shape
    scale = d**-0.5 if scale is None else scale
    k = rms_norm(k, eps) if normalize in ("keys", "queries_and_keys") else k
    scores, mask = scale * path_scores(k, k, w, beta), causal_mask(s, s, window)
    matrix = np.zeros_like(scores)
    for i in range(s):
        seen = np.flatnonzero(mask[i])
        shift = {"none": 0.0, "rows": scores[i, seen].max()}.get(normalize, scale * d)
        matrix[i, seen] = np.exp(scores[i, seen] - shift)
        if normalize in ("keys", "queries_and_keys"):
            matrix[i, i] = 1.0
    return matrix


def forward_substitution(matrix, v, lucid_beta=None):
    known = (matrix, v) if lucid_beta is None else (matrix, v, lucid_beta)
    y = np.zeros(v.shape, dtype=np.result_type(*known))
    for t in range(len(v)):
        rest = v[t] - sum((matrix[t, j] * y[j] for j in range(t)), np.zeros_like(y[t]))
        y[t] = rest / matrix[t, t] if lucid_beta is None else lucid_beta[t] * rest
    return y


def solve_by_loops(k, v, w, beta, lucid_beta=None, normalize="keys", **options):
    """y for arrays (b, s, n, ·), head by head."""
    given = [x for x in (k, v, w, beta, lucid_beta) if x is not None]
    y = np.zeros(v.shape, dtype=np.result_type(*given))
    for head in np.ndindex(k.shape[0], k.shape[2]):
        head = (head[0], slice(None), head[1])
        matrix = kernel(k[head], w[head], beta[head], normalize, **options)
        y[head] = forward_substitution(
            matrix, v[head], None if lucid_beta is None else lucid_beta[head]
        )
    return y


def lucid_by_loops(
    q, k, v, w, beta, g=None, *, lucid_beta=None, normalize="keys", eps=1e-6, **options
):
    shared = {name: options[name] for name in options.keys() & {"scale", "window"}}
    if "lucid_scale" in options:
        shared["scale"] = options.pop("lucid_scale")
    y = solve_by_loops(k, v, w, beta, lucid_beta, normalize, eps=eps, **shared)
    if normalize == "queries_and_keys":
        q, k = rms_norm(q, eps), rms_norm(k, eps)
    return path_by_loops(q, k, y, w, beta, g, **options)


def gradients_by_complex_steps(function, inputs, cotangent):
    gradients = {}
    for name, x in inputs.items():
        gradients[name] = np.zeros_like(x)
        for index in np.ndindex(x.shape):
            moved = np.array(x, dtype=complex)
            moved[index] += 1e-30j
            change = function(**inputs | {name: moved}).imag / 1e-30
            gradients[name][index] = np.sum(cotangent * change)
    return gradients


def assert_gradients(layer, function, inputs, tolerance=1e-9):
    out, pullback = layer.vjp(**inputs)
    assert_close(out, function(**inputs))
    cotangent = np.random.default_rng(0).normal(size=out.shape)
    gradients = pullback(cotangent)
    assert set(gradients) == set(inputs)
    for name, expected in gradients_by_complex_steps(function, inputs, cotangent).items():
        assert_close(gradients[name], expected, 1 + np.abs(expected).max(), tolerance)


# What the library says of its matrices


def scores_of(q, k, w, beta):
    """A (b, h, t, s) as the library has it: behind a zero key, whose score is 0, the weight of a
    key divided by that of the zero key is e^A.
    """

    def behind_a_zero(x):
        return np.concatenate([np.zeros_like(x[:, :1]), x], axis=1)

    k, w, beta = (behind_a_zero(x) for x in (k, w, beta))
    weights = pa.Path(scale=1.0)(q, k, identity_values(k), w=w, beta=beta).transpose(0, 2, 1, 3)
    scores = np.zeros_like(weights)
    np.log(weights / weights[..., :1], out=scores, where=weights > 0)
    return scores[..., 1:]


def solved_by_cache(layer, q, k, v, **named):
    """y (b, s, n, e), as a cache keeps it."""
    cache = layer.init_cache(q, k, v, capacity=k.shape[1])
    return layer.extend(cache, q, k, v, **named)[1].store["y"]


def inverse_of(layer, k, **named):
    """P (b, n, s, s), by which LUCID maps values to solved values."""
    return solved_by_cache(layer, k, k, identity_values(k), **named).transpose(0, 2, 1, 3)


def decode(layer, inputs, widths, donate=False):
    """The output of blocks of these widths, and the last cache."""
    cuts = [0, *np.cumsum(widths).tolist()]
    cache, outs = layer.init_cache(*(inputs[x] for x in "qkv"), capacity=cuts[-1]), []
    for start, stop in pairwise(cuts):
        out, cache = layer.extend(
            cache, **at(inputs, slice(None), slice(start, stop)), donate=donate
        )
        outs.append(out)
    return np.concatenate(outs, axis=1), cache


@st.composite
def splits(draw, longest=12):
    """Widths of blocks that add up to at most `longest`."""
    widths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    while sum(widths) > longest:
        widths.pop()
    return widths


# Scores


def closed_form(q, k, w, beta):
    """A of one head, tril(q kᵀ) − tril(q wᵀ) Z stril(w kᵀ)."""
    s = len(k)
    z = np.linalg.inv(np.eye(s) + beta[:, None] * np.tril(w @ w.T, -1)) * beta
    return np.tril(q @ k.T) - np.tril(q @ w.T) @ z @ np.tril(w @ k.T, -1)


@sampled
@given(problems(grouped=False))
def test_scores_are_the_same_in_every_form(p):
    per_head = [np.swapaxes(x, 1, 2) for x in (p.q, p.k, p.w, p.beta)]
    expected = scores_of_all_heads(p.q, p.k, p.w, p.beta)
    size = 1 + np.abs(expected).max()
    assert_close(product_form(*per_head), expected, size)
    assert_close(key_cache_form(*per_head), expected, size)
    assert_close(scores_of(p.q, p.k, p.w, p.beta), expected, size)
    closed = [
        [closed_form(*head) for head in zip(*heads, strict=True)]
        for heads in zip(*per_head, strict=True)
    ]
    assert_close(np.array(closed), expected, size)


@sampled
@given(problems(directions=["unit", "keys", "repeated"], betas=BETAS, longest=16))
def test_scores_are_bounded_by_the_lengths_of_query_and_key(p):
    q, k = p.q / 2, p.k / 2
    keys = np.repeat(k, p.group, axis=2)
    bound = np.einsum("bth,bsh->bhts", np.linalg.norm(q, axis=-1), np.linalg.norm(keys, axis=-1))
    assert np.all(np.abs(scores_of(q, k, p.w, p.beta)) <= bound + 1e-10)
    repeated = (np.repeat(x, p.group, axis=2).swapaxes(1, 2) for x in (k, p.w, p.beta))
    assert np.all(np.abs(product_form(q.swapaxes(1, 2), *repeated)) <= bound + 1e-12)


@pytest.mark.parametrize("length", [1.3, -1.3])
def test_directions_are_used_as_they_are_and_may_expand(length):
    k = np.ones((1, 5, 1, 1))
    w, beta = np.full_like(k, length), np.full((1, 5, 1), 2.0)
    factor = 1 - 2 * length**2  # −2.38
    steps = np.arange(5)[:, None] - np.arange(5)
    expected = np.where(steps >= 0, factor ** np.maximum(steps, 0), 0)
    assert_close(scores_of(0.5 * k, k, w, beta)[0, 0], 0.5 * expected)


@sampled
@given(problems(directions=UNIT, betas=["twos"], grouped=False))
def test_beta_of_two_is_a_dot_product_of_reflected_queries_and_keys(p):
    q, k = np.zeros_like(p.q), np.zeros_like(p.k)
    for b, n in np.ndindex(p.k.shape[0], p.k.shape[2]):
        product = np.eye(p.k.shape[-1])
        for t in range(p.k.shape[1]):
            product = product @ reflection(p.w[b, t, n], 2.0)  # H_1 … H_t
            q[b, t, n], k[b, t, n] = product @ p.q[b, t, n], product @ p.k[b, t, n]
    assert_close(pa.Path()(**p.inputs), pa.Softmax()(q, k, p.v), size=np.abs(p.v).max())


# The output


@sampled
@given(p=problems(square=False), scale=st.none() | st.floats(0.1, 2))
def test_output_is_the_definition_written_as_loops(p, scale):
    expected = path_by_loops(**p.inputs, scale=scale)
    assert_close(pa.Path(scale=scale)(**p.inputs), expected, size=np.abs(p.v).max())
    assert_close(pa.Path(scale=scale, flush=3)(**p.inputs), expected, size=np.abs(p.v).max())


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("directions", DIRECTIONS)
@pytest.mark.parametrize("betas", BETAS)
def test_output_is_the_definition_for_every_kind_of_input(keys, directions, betas):
    p = Problem(np.random.default_rng(0), keys, directions, betas, s=7, n=2, group=2)
    assert_close(pa.Path()(**p.inputs), path_by_loops(**p.inputs))


@sampled
@given(problems(square=False))
def test_grouped_heads_equal_repeated_heads(p):
    shared = {"k", "v", "w", "beta"}
    repeated = {
        name: np.repeat(x, p.group, axis=2) if name in shared else x for name, x in p.inputs.items()
    }
    assert_close(pa.Path()(**p.inputs), pa.Path()(**repeated), size=np.abs(p.v).max())


@pytest.mark.parametrize("layer", ["path", "path[window=3]", "lucid(path)"])
@sampled
@given(p=problems(), count=st.integers(1, 8))
def test_fewer_queries_than_keys_are_the_last_ones(layer, p, count):
    layer = pa.parse(layer)
    out = layer(**p.inputs)
    last = layer(**p.inputs | {"q": p.q[:, -count:]})
    assert_close(last, out[:, -count:], size=1 + np.abs(out).max())


@pytest.mark.parametrize("layer", ["path", "path[forget=scaled]", "lucid(path)"])
@sampled
@given(p=problems(), count=st.integers(1, 8), first=st.integers(0, 8))
def test_the_last_queries_alone_see_the_same_masks(layer, p, count, first):
    inputs, t = p.gated if "forget" in layer else p.inputs, p.k.shape[1]
    layer, segments = pa.parse(layer), np.tile(np.arange(t) >= first, (2, 1)).astype(int)
    seen = p.rng.random((2, t)) < 0.7
    for masks in ({"key_mask": seen}, {"segment_ids": segments}):
        out = layer(**inputs, **masks)
        last = layer(**inputs | {"q": p.q[:, -count:]}, **masks)
        assert_close(last, out[:, -count:], size=1 + np.abs(out).max())


def test_a_bias_is_added_to_the_scaled_logits():
    p = Problem(np.random.default_rng(0), s=6, t=4, group=2)
    bias = p.rng.normal(size=(2, 2, 4, 6))
    out = pa.Path(bias=True)(**p.inputs, bias=bias)
    assert_close(out, path_by_loops(**p.inputs, bias=bias))


@sampled
@given(p=problems(square=False), g=st.booleans(), window=st.integers(1, 9))
def test_a_window_hides_keys_and_changes_no_score(p, g, window):
    inputs = p.gated if g else p.inputs
    layer = pa.Path(window=window, forget="unscaled" if g else "none")
    out = layer(**inputs)
    assert_close(out, path_by_loops(**inputs, window=window), size=np.abs(p.v).max())


# Special values and invariances


@pytest.mark.parametrize("nothing", ["w", "beta"])
@sampled
@given(p=problems(square=False))
def test_without_reflections_path_is_softmax(nothing, p):
    named = {"w": p.w, "beta": p.beta} | {nothing: 0 * getattr(p, nothing)}
    expected = pa.Softmax()(p.q, p.k, p.v)
    assert_close(pa.Path()(p.q, p.k, p.v, **named), expected, size=np.abs(p.v).max())
    gated = pa.Softmax(forget="scaled")(p.q, p.k, p.v, g=p.g)
    out = pa.Path(forget="scaled")(p.q, p.k, p.v, g=p.g, **named)
    assert_close(out, gated, size=np.abs(p.v).max())


@pytest.mark.parametrize("layer", ["path", "lucid(path)"])
@sampled
@given(p=problems(), c=st.floats(0.1, 10))
def test_only_beta_times_the_square_of_a_direction_matters(layer, p, c):
    layer = pa.parse(layer)
    out = layer(**p.inputs)
    size = 1 + np.abs(out).max()
    signs = p.rng.choice([-1.0, 1.0], size=(*p.beta.shape, 1))
    assert_close(layer(**p.inputs | {"w": -p.w}), out, size)
    assert_close(layer(**p.inputs | {"w": signs * p.w}), out, size)
    assert_close(layer(**p.inputs | {"w": c * p.w, "beta": p.beta / c**2}), out, size)


@pytest.mark.parametrize("layer", ["path", "lucid(path)"])
@sampled
@given(p=problems())
def test_a_common_rotation_of_queries_keys_and_directions_does_not_matter(layer, p):
    layer, d = pa.parse(layer), p.k.shape[-1]
    rotation, _ = np.linalg.qr(p.rng.normal(size=(d, d)))
    rotated = {name: getattr(p, name) @ rotation for name in "qkw"}
    out = layer(**p.inputs)
    assert_close(layer(**p.inputs | rotated), out, size=1 + np.abs(out).max())


@pytest.mark.parametrize("layer", ["path", "lucid(path)"])
@sampled
@given(p=problems())
def test_the_reflection_of_the_first_token_moves_no_key(layer, p):
    out = pa.parse(layer)(**p.inputs)
    changed = {name: getattr(p, name).copy() for name in ("w", "beta")}
    changed["w"][:, 0], changed["beta"][:, 0] = 5.0, 1.7
    assert_close(pa.parse(layer)(**p.inputs | changed), out, size=1 + np.abs(out).max())


# The forget gate


@pytest.mark.parametrize("forget", ["unscaled", "scaled"])
@sampled
@given(p=problems(square=False), scale=st.none() | st.floats(0.1, 2))
def test_output_with_a_forget_gate_is_the_definition(forget, p, scale):
    out = pa.Path(forget=forget, scale=scale)(**p.gated)
    expected = path_by_loops(**p.gated, forget=forget, scale=scale)
    assert_close(out, expected, size=np.abs(p.v).max())


@sampled
@given(p=problems(square=False), scale=st.floats(0.1, 2))
def test_a_scaled_gate_is_an_unscaled_one_times_the_scale(p, scale):
    out = pa.Path(forget="scaled", scale=scale)(**p.gated)
    scaled = p.inputs | {"g": scale * p.g}
    assert_close(pa.Path(forget="unscaled", scale=scale)(**scaled), out, size=np.abs(p.v).max())


@pytest.mark.parametrize("forget", ["unscaled", "scaled"])
@sampled
@given(p=problems(square=False))
def test_a_gate_of_zero_is_no_gate(forget, p):
    out = pa.Path(forget=forget)(**p.inputs, g=0 * p.g)
    assert_close(out, pa.Path()(**p.inputs), size=np.abs(p.v).max())


@pytest.mark.parametrize("forget", ["unscaled", "scaled"])
@sampled
@given(p=problems(), data=st.data())
def test_a_closed_gate_forgets_all_that_came_before(forget, p, data):
    layer, t = pa.Path(forget=forget), p.k.shape[1]
    cut = data.draw(st.integers(0, t - 1))
    g = np.where(np.arange(t)[:, None] == cut, -1e4, 0.0) + np.zeros_like(p.g)
    out, pullback = layer.vjp(**p.inputs, g=g)
    parts = [
        pa.Path()(**at(p.inputs, slice(None), x))
        for x in (slice(cut), slice(cut, t))
        if x != slice(0)
    ]
    assert_close(out, np.concatenate(parts, axis=1), size=np.abs(p.v).max())
    assert all(np.all(np.isfinite(x)) for x in pullback(p.like_output()).values())
    closed, pullback = layer.vjp(**p.inputs, g=np.full_like(p.g, -1e4))
    assert_close(closed, np.repeat(p.v, p.group, axis=2))
    gradients = pullback(p.like_output())
    for name in ("q", "k", "w", "beta", "g"):
        assert_close(gradients[name], 0.0, size=1)


# Causality


def assert_past_is_untouched(layer, now, moved, past):
    """All of the future may move, or any one input of it."""
    later = np.arange(now["k"].shape[1]) >= past
    moved = {
        name: np.where(later.reshape(-1, *[1] * (x.ndim - 2)), moved[name], x)
        for name, x in now.items()
    }
    before = layer(**now)[:, :past]
    for changed in (moved, *({name: moved[name]} for name in now)):
        np.testing.assert_array_equal(layer(**now | changed)[:, :past], before)


@pytest.mark.parametrize(
    "layer", ["path", "path[forget=scaled]", "lucid(path)", "lucid(path[window=3])"]
)
@sampled
@given(p=problems(directions=UNIT), past=st.integers(1, 8))
def test_the_future_does_not_touch_the_past_by_a_single_bit(layer, p, past):
    now = p.gated if "forget" in layer else p.inputs
    moved = {name: 3 * x + 1 for name, x in p.inputs.items()} | {"g": 2 * p.g}
    moved |= {"v": p.v + 1000, "w": unit(p.w[..., ::-1] + 0.1), "beta": 2 - p.beta}
    assert_past_is_untouched(pa.parse(layer), now, moved, past)


@pytest.mark.parametrize("layer", ["path", "path[forget=unscaled]"])
@sampled
@given(p=problems(), past=st.integers(1, 8))
def test_enormous_reflections_of_the_future_do_not_touch_the_past_either(layer, p, past):
    now = p.gated if "forget" in layer else p.inputs
    moved = {name: 1e3 * x - 0.5 for name, x in p.gated.items()}
    assert_past_is_untouched(pa.parse(layer), now, moved, past)


# Masks


@pytest.mark.parametrize("layer", ["path", "path[forget=unscaled]", "lucid(path)"])
@sampled
@given(p=problems())
def test_hidden_keys_neither_reflect_nor_are_seen_even_when_nan(layer, p):
    inputs = p.gated if "forget" in layer else p.inputs
    layer, mask = pa.parse(layer), p.rng.random(p.k.shape[1]) < 0.7
    mask[-1] = True
    holes = inputs | {
        name: np.where(mask.reshape(-1, *[1] * (x.ndim - 2)), x, np.nan)
        for name, x in inputs.items()
        if name != "q"
    }
    out, pullback = layer.vjp(**holes, key_mask=np.tile(mask, (2, 1)))
    alone = layer(**at(inputs, slice(None), mask))
    assert_close(out[:, mask], alone)
    gradients = pullback(p.like_output())
    assert all(np.all(np.isfinite(x)) for x in gradients.values())
    assert all(np.all(gradients[name][:, ~mask] == 0) for name in gradients if name != "q")


@sampled
@given(problems())
def test_a_query_at_a_hidden_key_is_not_reflected_there(p):
    mask = p.rng.random(p.k.shape[1]) < 0.6
    mask[0] = True
    out = pa.Path()(**p.inputs, key_mask=np.tile(mask, (2, 1)))
    still = np.where(mask[:, None], p.beta, 0)
    logits = scores_of_all_heads(p.q, p.k, p.w, still) * p.k.shape[-1] ** -0.5
    seen = causal_mask(len(mask), len(mask)) & mask
    assert_close(out, read(softmax(logits, seen), p.v), size=np.abs(p.v).max())


@pytest.mark.parametrize(
    "layer", ["path", "path[forget=unscaled]", "path[window=2]", "lucid(path)"]
)
@sampled
@given(p=problems(), data=st.data())
def test_padding_and_segments_leave_each_sequence_as_if_alone(layer, p, data):
    inputs = p.gated if "forget" in layer else p.inputs
    layer, t = pa.parse(layer), p.q.shape[1]
    lengths = np.array([data.draw(st.integers(0, t)) for _ in range(2)])
    behind = np.arange(t) >= lengths[:, None]

    def holding(x):
        return behind.reshape(2, t, *[1] * (x.ndim - 2))

    padded = layer(
        **{name: np.where(holding(x), np.nan, x) for name, x in inputs.items()}, lengths=lengths
    )
    packed = layer(**inputs, segment_ids=behind.astype(int))
    for i, length in enumerate(lengths):
        assert np.all(padded[i, length:] == 0)
        for out, part in [
            (padded, slice(0, length)),
            (packed, slice(0, length)),
            (packed, slice(length, t)),
        ]:
            if part.stop > part.start:
                alone = layer(**at(inputs, slice(i, i + 1), part))
                assert_close(out[i : i + 1, part], alone)


def test_long_directions_of_one_segment_do_not_reach_the_next():
    p = Problem(np.random.default_rng(0), s=9)
    first = np.arange(9) < 4
    p.w = np.where(first[:, None, None], 1e3 * p.w, p.w)
    packed, pullback = pa.Path().vjp(**p.inputs, segment_ids=np.tile(1 - first, (2, 1)))
    alone, pullback_alone = pa.Path().vjp(**at(p.inputs, slice(None), ~first))
    assert_close(packed[:, ~first], alone)
    cotangent = np.where(first[:, None, None], 0, p.like_output())
    gradients, expected = pullback(cotangent), pullback_alone(cotangent[:, ~first])
    for name in expected:
        assert_close(gradients[name][:, ~first], expected[name])
        assert np.all(gradients[name][:, first] == 0)


# Gradients


@pytest.mark.parametrize("betas", BETAS)
@pytest.mark.parametrize("directions", DIRECTIONS)
def test_gradient_is_that_of_the_definition(directions, betas):
    p = Problem(np.random.default_rng(0), "random", directions, betas, s=4, t=3, group=2, d=2)
    assert_gradients(pa.Path(), path_by_loops, p.inputs)


@pytest.mark.parametrize("keys", KEYS)
def test_gradient_is_that_of_the_definition_for_keys_of_every_kind(keys):
    p = Problem(np.random.default_rng(1), keys, "unit", "mixed", s=5, n=2, group=2, d=3, b=1)
    assert_gradients(
        pa.Path(window=3, scale=0.7), lambda **x: path_by_loops(**x, window=3, scale=0.7), p.inputs
    )


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("forget", ["unscaled", "scaled"])
def test_gradient_with_a_forget_gate_is_that_of_the_definition(forget, t):
    p = Problem(np.random.default_rng(0), s=4, t=t, group=2, d=2)
    layer = pa.Path(forget=forget)
    assert_gradients(layer, lambda **x: path_by_loops(**x, forget=forget), p.gated)
    extreme = p.gated | {"g": p.rng.choice([-1e4, 0.0], size=p.g.shape)}
    assert_gradients(layer, lambda **x: path_by_loops(**x, forget=forget), extreme)


def test_gradient_at_beta_of_zero_agrees_with_finite_differences():
    p = Problem(np.random.default_rng(0), betas="zeros", s=5, group=2)
    cotangent, step = p.like_output(), 1e-6
    _, pullback = pa.Path().vjp(**p.inputs)
    gradient = pullback(cotangent)["beta"]
    assert np.abs(gradient[:, 1:]).min() > 1e-4
    for index in np.ndindex(p.beta.shape):
        sides = []
        for sign in (1, -1):
            beta = p.beta.copy()
            beta[index] += sign * step
            sides.append(np.sum(cotangent * pa.Path()(**p.inputs | {"beta": beta})))
        assert abs((sides[0] - sides[1]) / (2 * step) - gradient[index]) < 1e-7


# Caches


LAYERS = ["path[{}]", "path[{}, window=3]", "path[{}, forget=unscaled]", "lucid(path[{}])"]


def with_flush(layer, flush):
    return pa.parse(layer.format(f"flush={flush}"))


@pytest.mark.parametrize("layer", [*LAYERS, "laser(path[{}])", "lucid(laser(path[{}, window=4]))"])
@pytest.mark.parametrize("flush", FLUSHES)
@settings(sampled, max_examples=10)
@given(widths=splits(), p=problems(longest=1), seed=st.integers(0, 2**32 - 1))
def test_splitting_a_sequence_anywhere_gives_the_same_output(layer, flush, widths, p, seed):
    p = Problem(
        np.random.default_rng(seed),
        betas="mixed" if seed % 2 else "random",
        s=sum(widths),
        n=p.k.shape[2],
        group=p.group,
        d=p.k.shape[3],
    )
    inputs = p.gated if "forget" in layer else p.inputs
    layer = with_flush(layer, flush)
    out, cache = decode(layer, inputs, widths)
    expected = layer(**inputs)
    assert_close(out, expected, size=1 + np.abs(expected).max())
    np.testing.assert_array_equal(cache.length, sum(widths))


@pytest.mark.parametrize("directions", DIRECTIONS)
@pytest.mark.parametrize("flush", FLUSHES)
@pytest.mark.parametrize("layer", ["path[{}]", "lucid(path[{}])"])
def test_decoding_one_by_one_over_many_flushes_is_the_definition(layer, flush, directions):
    length = max(6, 3 * flush + 1)
    p = Problem(np.random.default_rng(0), "clustered", directions, "mixed", s=length, group=2)
    out, _ = decode(with_flush(layer, flush), p.inputs, [1] * length)
    by_loops = path_by_loops if layer.startswith("path") else lucid_by_loops
    assert_close(out, by_loops(**p.inputs))


def valid(cache, flush):
    """The parts of the store that are in use, by name."""
    length = int(cache.length[0])
    assert np.all(cache.length == length)
    return {
        name: x[:, : length % flush if name.startswith("pending") else length]
        for name, x in cache.store.items()
    }


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("flush", FLUSHES)
@settings(sampled, max_examples=8)
@given(widths=splits(), seed=st.integers(0, 2**32 - 1))
def test_a_store_does_not_depend_on_how_it_was_filled(layer, flush, widths, seed):
    p = Problem(np.random.default_rng(seed), s=sum(widths), group=2)
    inputs = p.gated if "forget" in layer else p.inputs
    layer, length = with_flush(layer, flush), sum(widths)
    stores = [
        valid(decode(layer, inputs, blocks)[1], flush)
        for blocks in (widths, [length], [1] * length)
    ]
    for store in stores[1:]:
        assert store.keys() == stores[0].keys()
        for name, x in store.items():
            assert_close(x, stores[0][name])


@pytest.mark.parametrize("layer", ["path[{}]", "lucid(path[{}])"])
@pytest.mark.parametrize("flush", FLUSHES)
def test_a_store_has_the_keys_as_of_the_last_flush_and_the_reflections_since(layer, flush):
    p = Problem(np.random.default_rng(0), s=8, n=2)
    for length in range(1, 9):
        _, cache = decode(
            with_flush(layer, flush), at(p.inputs, slice(None), slice(length)), [length]
        )
        keys, flushed = cache.store["path(k,w,beta)"], length - length % flush
        for b, j, n in np.ndindex(2, flushed, 2):
            key = p.k[b, j, n]
            for t in range(j + 1, flushed):
                key = reflection(p.w[b, t, n], p.beta[b, t, n]) @ key
            assert_close(keys[b, j, n], key, size=1)
        for name in ("w", "beta") if flush > 1 else ():
            since = cache.store[f"pending({name})"][:, : length - flushed]
            np.testing.assert_array_equal(since, getattr(p, name)[:, flushed:length])


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("flush", FLUSHES)
@settings(sampled, max_examples=10)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_a_ragged_batch_equals_each_sequence_alone(layer, flush, data, seed):
    gated, layer, rng = "forget" in layer, with_flush(layer, flush), np.random.default_rng(seed)
    blocks, fed = [], [[], [], []]
    for _ in range(data.draw(st.integers(1, 6))):
        width = data.draw(st.integers(1, 4))
        p = Problem(rng, b=3, s=width, group=2)
        lengths = np.array([data.draw(st.integers(0, width)) for _ in range(3)])
        blocks.append((p.gated if gated else p.inputs, lengths))
    cache = layer.init_cache(*(blocks[0][0][x] for x in "qkv"), capacity=24)
    outs = [[], [], []]
    for inputs, lengths in blocks:
        beyond = np.arange(inputs["q"].shape[1]) >= lengths[:, None]
        padded = {
            name: np.where(beyond.reshape(*beyond.shape, *[1] * (x.ndim - 2)), np.nan, x)
            for name, x in inputs.items()
        }
        out, cache = layer.extend(cache, **padded, lengths=lengths)
        assert np.all(out[beyond] == 0)
        for i, length in enumerate(lengths):
            outs[i].append(out[i : i + 1, :length])
            fed[i].append(at(inputs, slice(i, i + 1), slice(length)))
    for i in range(3):
        alone = {name: np.concatenate([x[name] for x in fed[i]], axis=1) for name in blocks[0][0]}
        out = np.concatenate(outs[i], axis=1)
        assert cache.length[i] == out.shape[1]
        if out.shape[1]:
            assert_close(out, layer(**alone), size=1 + np.abs(out).max())


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("flush", [1, 3])
@settings(sampled, max_examples=10)
@given(widths=splits(), seed=st.integers(0, 2**32 - 1))
def test_keys_hidden_in_a_cache_neither_reflect_nor_are_seen(layer, flush, widths, seed):
    p = Problem(np.random.default_rng(seed), s=sum(widths), group=2)
    inputs = p.gated if "forget" in layer else p.inputs
    windowed, layer = "window" in layer, with_flush(layer, flush)
    mask = p.rng.random((2, sum(widths))) < 0.6
    cache = layer.init_cache(p.q, p.k, p.v, capacity=sum(widths), key_mask=True)
    outs = []
    for start, stop in pairwise([0, *np.cumsum(widths).tolist()]):
        part = at(inputs, slice(None), slice(start, stop))
        out, cache = layer.extend(cache, **part, key_mask=mask[:, start:stop])
        outs.append(out)
    out = np.concatenate(outs, axis=1)
    at_once = layer(**inputs, key_mask=mask)
    assert_close(out, at_once, size=1 + np.abs(at_once).max())
    for i, kept in enumerate(mask):
        if kept.any() and not windowed:  # A window counts hidden tokens too.
            alone = layer(**{name: x[i : i + 1, kept] for name, x in inputs.items()})
            assert_close(out[i : i + 1, kept], alone, size=1 + np.abs(alone).max())


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("flush", [1, 3])
def test_donating_a_cache_or_keeping_it_gives_the_same(layer, flush):
    p = Problem(np.random.default_rng(0), s=11, group=2)
    inputs = p.gated if "forget" in layer else p.inputs
    layer, widths = with_flush(layer, flush), [4, 1, 1, 2, 1, 2]
    kept, donated = (decode(layer, inputs, widths, donate=donate) for donate in (False, True))
    np.testing.assert_array_equal(donated[0], kept[0])
    for name, x in valid(donated[1], flush).items():
        np.testing.assert_array_equal(x, valid(kept[1], flush)[name])


@pytest.mark.parametrize("flush", [1, 3])
@pytest.mark.parametrize("layer", ["path[{}]", "lucid(path[{}])"])
def test_two_continuations_of_one_cache_do_not_meet(layer, flush):
    p = Problem(np.random.default_rng(0), s=8)
    layer = with_flush(layer, flush)
    cache = layer.init_cache(p.q, p.k, p.v, capacity=6)
    _, cache = layer.extend(cache, **at(p.inputs, slice(None), slice(4)))
    for tail in ([4, 5], [6, 7]):
        whole = at(p.inputs, slice(None), [0, 1, 2, 3, *tail])
        out, longer = layer.extend(cache, **at(p.inputs, slice(None), tail[:1]))
        last, _ = layer.extend(longer, **at(p.inputs, slice(None), tail[1:]))
        assert_close(np.concatenate([out, last], axis=1), layer(**whole)[:, 4:], size=1)


# Precision of long caches


def scores_by_key_cache(q, k, w, beta):
    """A of one head by moving every past key at every token, in linear memory."""
    scores, keys = np.zeros((len(q), len(k))), k.copy()
    for i in range(len(q)):
        keys[:i] -= beta[i] * np.outer(keys[:i] @ w[i], w[i])
        scores[i, : i + 1] = keys[: i + 1] @ q[i]
    return scores


def long_reference(q, k, v, w, beta, lucid):
    """The output in float64 for one head of each sequence, which may be hundreds of tokens long."""
    out, d = np.zeros_like(v), q.shape[-1]
    for b in range(len(q)):
        head = [x[b, :, 0] for x in (q, k, v, w, beta)]
        y = head[2]
        if lucid:
            kn = rms_norm(head[1])
            phi = np.exp(np.tril(scores_by_key_cache(kn, kn, *head[3:]) - d, -1) * d**-0.5)
            y = forward_substitution_by_rows(np.tril(phi, -1), y)
        logits = scores_by_key_cache(head[0], head[1], *head[3:]) * d**-0.5
        out[b, :, 0] = softmax(logits, causal_mask(len(y), len(y))) @ y
    return out


def forward_substitution_by_rows(below, v):
    y = v.copy()
    for t in range(len(v)):
        y[t] -= below[t, :t] @ y[:t]
    return y


@pytest.mark.parametrize("lucid", [False, True])
def test_the_reference_for_long_sequences_is_the_definition(lucid):
    p = Problem(np.random.default_rng(0), s=9)
    expected = (lucid_by_loops if lucid else path_by_loops)(**p.inputs)
    assert_close(long_reference(**p.inputs, lucid=lucid), expected)


@pytest.mark.parametrize("betas", ["random", "twos"])
@pytest.mark.parametrize("flush", [1, 7])
@pytest.mark.parametrize("layer", ["path[{}]", "lucid(path[{}])"])
def test_hundreds_of_single_steps_in_single_precision_stay_accurate(layer, flush, betas):
    p = Problem(np.random.default_rng(0), betas=betas, s=300, d=8)
    inputs = {name: x.astype(np.float32) for name, x in p.inputs.items()}
    out, _ = decode(with_flush(layer, flush), inputs, [1] * 300, donate=True)
    assert out.dtype == np.float32
    exact = {name: x.astype(np.float64) for name, x in inputs.items()}
    expected = long_reference(**exact, lucid="lucid" in layer)
    assert_close(out, expected, tolerance=2e-5)


@pytest.mark.parametrize("how", ["at once", "one by one"])
@pytest.mark.parametrize("forget", ["unscaled", "scaled"])
def test_a_closed_gate_in_single_precision_leaves_later_gates_accurate(forget, how):
    p = Problem(np.random.default_rng(0), s=12)
    p.g[:, 3] = -1e4
    layer, inputs = pa.Path(forget=forget), {n: x.astype(np.float32) for n, x in p.gated.items()}
    out = layer(**inputs) if how == "at once" else decode(layer, inputs, [1] * 12)[0]
    exact = {name: x.astype(np.float64) for name, x in inputs.items()}
    assert_close(out, path_by_loops(**exact, forget=forget), tolerance=2e-5)


@pytest.mark.parametrize("half", ["qkv", "all"])
@pytest.mark.parametrize("flush", [1, 7])
@pytest.mark.parametrize("layer", ["path[{}]", "lucid(path[{}])"])
def test_many_single_steps_in_bfloat16_stay_accurate(layer, flush, half):
    p = Problem(np.random.default_rng(0), s=200, d=8)
    inputs = {
        name: torch.tensor(x).to(torch.bfloat16 if half == "all" or name in half else torch.float32)
        for name, x in p.inputs.items()
    }
    layer_, outs = with_flush(layer, flush), []
    cache = layer_.init_cache(*(inputs[x] for x in "qkv"), capacity=200)
    with torch.no_grad():
        for t in range(200):
            out, cache = layer_.extend(
                cache, **at(inputs, slice(None), slice(t, t + 1)), donate=True
            )
            outs.append(out)
    out = torch.cat(outs, dim=1)
    assert out.dtype == torch.bfloat16
    exact = {name: x.double().numpy() for name, x in inputs.items()}
    expected = long_reference(**exact, lucid="lucid" in layer)
    assert_close(out.double().numpy(), expected, tolerance=2e-2)


# LUCID over PaTH


@pytest.mark.parametrize("normalize", ["keys", "queries_and_keys", "rows", "none"])
@sampled
@given(p=problems(square=False), scales=st.tuples(*[st.none() | st.floats(0.1, 2)] * 2))
def test_lucid_is_the_definition_written_as_loops(normalize, p, scales):
    scale, lucid_scale = scales
    layer = pa.Lucid(pa.Path(scale=scale), normalize=normalize, scale=lucid_scale)
    expected = lucid_by_loops(
        **p.inputs, normalize=normalize, scale=scale, lucid_scale=lucid_scale or scale
    )
    assert_close(layer(**p.inputs), expected, size=np.abs(p.v).max() + np.abs(expected).max())


@sampled
@given(
    problems(square=False),
    st.sampled_from([0.0, 1e-6, 0.5]),
    st.none() | st.integers(1, 8),
    st.booleans(),
)
def test_lucid_with_its_own_beta_eps_window_and_gate_is_the_definition(p, eps, window, scaled):
    assume(eps > 0 or np.all(np.any(p.k != 0, axis=-1)))
    forget = "scaled" if scaled else "unscaled"
    lucid_beta = p.rng.uniform(0, 2, size=p.beta.shape)
    layer = pa.Lucid(pa.Path(window=window, forget=forget), eps=eps, beta=True)
    out = layer(**p.gated, lucid_beta=lucid_beta)
    expected = lucid_by_loops(
        **p.gated, lucid_beta=lucid_beta, eps=eps, window=window, forget=forget
    )
    assert_close(out, expected, size=np.abs(p.v).max())


@pytest.mark.parametrize("nothing", ["w", "beta"])
@sampled
@given(p=problems(square=False))
def test_without_reflections_lucid_over_path_is_lucid(nothing, p):
    named = {"w": p.w, "beta": p.beta} | {nothing: 0 * getattr(p, nothing)}
    expected = pa.Lucid()(p.q, p.k, p.v)
    out = pa.Lucid(pa.Path())(p.q, p.k, p.v, **named)
    assert_close(out, expected, size=np.abs(p.v).max())


@sampled
@given(problems(square=False))
def test_lucid_over_path_is_path_over_the_solved_values(p):
    y = solved_by_cache(pa.Lucid(pa.Path()), p.k, p.k, p.v, w=p.w, beta=p.beta)
    assert_close(y, solve_by_loops(p.k, p.v, p.w, p.beta))
    out = pa.Lucid(pa.Path())(**p.inputs)
    assert_close(out, pa.Path()(**p.inputs | {"v": y}), size=np.abs(y).max())


@sampled
@given(problems(keys=["random", "clustered", "duplicate"], grouped=False))
def test_a_normalised_query_equal_to_its_key_retrieves_its_value_scaled(p):
    kn = rms_norm(p.k, 0)
    totals = np.zeros(p.beta.shape)
    for b, n in np.ndindex(2, p.k.shape[2]):
        totals[b, :, n] = kernel(p.k[b, :, n], p.w[b, :, n], p.beta[b, :, n], eps=0).sum(-1)
    expected, named = p.v / totals[..., None], {"w": p.w, "beta": p.beta}
    size = np.abs(p.v).max()
    assert_close(pa.Lucid(pa.Path(), eps=0)(kn, kn, p.v, **named), expected, size)
    both = pa.Lucid(pa.Path(), eps=0, normalize="queries_and_keys")
    assert_close(both(p.k, p.k, p.v, **named), expected, size)


@pytest.mark.parametrize("flush", [1, 3])
@sampled
@given(p=problems(directions=UNIT, longest=20, grouped=False))
def test_unit_directions_bound_the_kernel_and_its_inverse_whatever_the_keys(flush, p):
    inverse = inverse_of(pa.Lucid(pa.Path(flush=flush)), p.k, w=p.w, beta=p.beta)
    assert np.abs(inverse).max() <= 1 + 1e-12
    assert np.sum(inverse**2, axis=-2).max() <= 2 + 1e-12
    n = inverse.shape[-1]
    assert np.linalg.cond(inverse).max() <= n * np.sqrt(n + 1) * (1 + 1e-10)
    matrix = np.linalg.inv(inverse)
    assert matrix.max() <= 1 + 1e-9
    assert np.all(matrix[..., *np.tril_indices(n)] > -1e-9)
    for b, h in np.ndindex(matrix.shape[:2]):
        expected = kernel(p.k[b, :, h], p.w[b, :, h], p.beta[b, :, h])
        assert_close(matrix[b, h], expected, size=10)


def test_long_directions_leave_the_bound():
    k = np.ones((1, 7, 1, 2))
    w, beta = 1.1 * unit(k), np.full((1, 7, 1), 2.0)  # Factors of −1.42.
    inverse = inverse_of(pa.Lucid(pa.Path()), k, w=w, beta=beta)
    assert np.abs(inverse).max() > 10


@pytest.mark.parametrize("flush", FLUSHES)
def test_a_cache_keeps_the_size_of_the_key_as_it_was_given(flush):
    p = Problem(np.random.default_rng(0), "clustered", "keys", s=11, n=2, group=2)
    p.beta = np.full_like(p.beta, 0.5)  # Directions along the keys: they shrink by half each time.
    layer = pa.Lucid(pa.Path(flush=flush))
    out, cache = decode(layer, p.inputs, [1] * 11)
    assert_close(out, lucid_by_loops(**p.inputs))
    assert_close(out, layer(**p.inputs))
    original = np.sqrt(np.mean(p.k**2, axis=-1) + 1e-6)
    assert_close(cache.store["rms(k)"], original)
    moved = np.sqrt(np.mean(cache.store["path(k,w,beta)"][:, 0] ** 2, axis=-1))
    assert np.all(moved < 0.01 * original[:, 0])


@pytest.mark.parametrize("betas", BETAS)
@pytest.mark.parametrize("directions", DIRECTIONS)
def test_gradient_of_lucid_is_that_of_the_definition(directions, betas):
    p = Problem(np.random.default_rng(0), "random", directions, betas, s=4, group=2, d=2, b=1)
    assert_gradients(pa.Lucid(pa.Path()), lucid_by_loops, p.inputs)


@pytest.mark.parametrize("keys", ["clustered", "duplicate"])
def test_gradient_of_lucid_with_every_option_is_that_of_the_definition(keys):
    p = Problem(np.random.default_rng(0), keys, s=4, n=2, group=2, d=3, b=1)
    options = {"window": 3, "forget": "scaled", "scale": 0.6}
    layer = pa.Lucid(pa.Path(**options), scale=0.8, beta=True)
    inputs = p.gated | {"lucid_beta": p.rng.uniform(0, 2, size=p.beta.shape)}
    assert_gradients(layer, lambda **x: lucid_by_loops(**x, lucid_scale=0.8, **options), inputs)


@pytest.mark.parametrize("normalize", ["queries_and_keys", "rows", "none"])
def test_gradient_of_every_normalisation_is_that_of_the_definition(normalize):
    p = Problem(np.random.default_rng(0), s=4, d=2, b=1)

    def by_loops(**inputs):
        return lucid_by_loops(**inputs, normalize=normalize)

    assert_gradients(pa.Lucid(pa.Path(), normalize=normalize), by_loops, p.inputs)


# Compositions


def laser_by_loops(q, k, v, w, beta):
    return np.log(read(weights_by_loops(q, k, w, beta), np.exp(v)))


def row_normalized_by_loops(**inputs):
    out = path_by_loops(**inputs)
    return out / np.sqrt(np.sum(out * out, axis=-1, keepdims=True))


def differential_by_loops(q, k, v, w, beta, q2, k2, lam):
    first, second = (path_by_loops(*x, v, w, beta) for x in ((q, k), (q2, k2)))
    return first - lam * second


@pytest.mark.parametrize("flush", [1, 3])
@pytest.mark.parametrize(
    "layer",
    [
        "differential(path[{}])",
        "differential(lucid(path[{}]))",
        "row_normalized(path[{}])",
        "row_normalized(lucid(laser(path[{}])))",
    ],
)
def test_decoding_a_composition_gives_the_output_of_the_full_call(layer, flush):
    p = Problem(np.random.default_rng(0), s=10, n=2, group=2)
    inputs, composition = p.inputs, with_flush(layer, flush)
    if layer.startswith("differential"):
        second = {"q2": p.rng.normal(size=p.q.shape), "k2": p.rng.normal(size=p.k.shape)}
        inputs |= second | {"lam": np.asarray(0.4)}
    for widths in ([1] * 10, [4, 1, 1, 4]):
        out, _ = decode(composition, inputs, widths)
        assert_close(out, composition(**inputs))


@sampled
@given(problems(square=False))
def test_laser_over_path_is_the_definition(p):
    out = pa.parse("laser(path)")(**p.inputs)
    assert_close(out, laser_by_loops(**p.inputs), size=1)


@sampled
@given(problems(square=False))
def test_row_normalized_path_is_the_definition(p):
    expected = row_normalized_by_loops(**p.inputs)
    long = np.linalg.norm(path_by_loops(**p.inputs), axis=-1) > 1e-3
    assert_close(pa.parse("row_normalized(path)")(**p.inputs)[long], expected[long], size=1)


@sampled
@given(problems(square=False), st.floats(-1, 2))
def test_differential_path_is_the_definition(p, lam):
    second = {"q2": p.rng.normal(size=p.q.shape), "k2": p.rng.normal(size=p.k.shape)}
    inputs = p.inputs | second | {"lam": np.asarray(lam)}
    out = pa.parse("differential(path)")(**inputs)
    assert_close(out, differential_by_loops(**inputs), size=3 * np.abs(p.v).max())


def test_gradients_of_compositions_are_those_of_their_definitions():
    p = Problem(np.random.default_rng(0), s=4, group=2, d=2, b=1)
    assert_gradients(pa.Laser(pa.Path()), laser_by_loops, p.inputs)
    detached = pa.RowNormalized(pa.Path(), detach=False)
    assert_gradients(detached, row_normalized_by_loops, p.inputs)
    second = {"q2": p.rng.normal(size=p.q.shape), "k2": p.rng.normal(size=p.k.shape)}
    inputs = p.inputs | second | {"lam": np.asarray(0.4)}
    assert_gradients(pa.Differential(pa.Path()), differential_by_loops, inputs)
