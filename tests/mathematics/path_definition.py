"""PaTH and LUCID over it as loops, and random problems; the equations are in `test_path`."""

from itertools import pairwise

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import precondattn as pa
from tests.mathematics.identities import causal_mask

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


def unit(x):
    """Rows of length 1; a zero row stays."""
    size = np.linalg.norm(x, axis=-1, keepdims=True)
    return x / np.where(size == 0, 1, size)


def make_keys(rng, kind, shape):
    """Keys (b, s, n, d), of kinds in which keys are hard to distinguish."""
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
    """Directions w of length 1, of any length (raw), or zero."""
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


class PathProblem:
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
    return PathProblem(
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
    """The entries at an index of every input that has batch and time axes."""
    return {name: x[index] if x.ndim > 1 else x for name, x in inputs.items()}


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
        visible = np.flatnonzero(mask[i])
        shift = {"none": 0.0, "rows": scores[i, visible].max()}.get(normalize, scale * d)
        matrix[i, visible] = np.exp(scores[i, visible] - shift)
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


def with_flush(layer, flush):
    return pa.parse(layer.format(f"flush={flush}"))
