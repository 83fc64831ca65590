"""CCQ in PyTorch, token by token, and random problems for it; equations as in `test_ccq`."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import precondattn as pa
from tests.mathematics.identities import assert_close

sampled = settings(
    max_examples=8, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)


RUNNING = [
    "ccq",
    "ccq(softmax[window=3])",
    "ccq(temperature)",
    "ccq(laser)",
    "ccq(lucid)",
    "ccq(path)",
    "ccq(linear)",
    "ccq(retention)",
    "ccq(ssd)",
    "ccq(gla)",
    "ccq(delta)",
    "ccq(gated_delta)",
    "ccq(gsa)",
    "ccq(elu1(linear[normalize=true]))",
    "ccq(hedgehog(gla))",
    "ccq(row_normalized(gla))",
]


DECAYED = [
    "ccq[covariance=decayed](gated_delta)",
    "ccq[covariance=decayed](ssd)",
    "ccq[covariance=decayed](gla)",
    "ccq[covariance=decayed](retention)",
    "ccq[covariance=decayed](softmax[forget=unscaled])",
    "ccq[covariance=decayed](path[forget=unscaled])",
    "ccq[covariance=decayed](hedgehog(gla))",
]


QUERY_WEIGHTED = [
    "ccq[covariance=query_weighted]",
    "ccq[covariance=query_weighted](delta)",
    "ccq[covariance=query_weighted,tau=0.3](gla)",
]


OPTIONS = [
    "ccq[backbone_key=raw](gated_delta)",
    "ccq[backbone_key=unit](gla)",
    "ccq[covariance=decayed,backbone_key=unit](gla)",
    "ccq[eps=0.1](delta)",
]


LAYERS = RUNNING + DECAYED + QUERY_WEIGHTED + OPTIONS


KEYS = ["random", "some zero", "zero", "equal", "clustered", "opposite"]


def keys(kind, rng, shape):
    k, first = rng.normal(size=shape), rng.normal(size=(shape[0], 1, *shape[2:]))
    match kind:
        case "some zero":
            return k * rng.integers(2, size=(*shape[:3], 1))
        case "zero":
            return 0 * k
        case "equal":
            return 0 * k + first
        case "clustered":
            return first + 1e-3 * k
        case "opposite":
            return first * rng.choice([-1, 1], size=(*shape[:3], 1))
    return k


class DeclaredProblem:
    """Random inputs of any mechanism, of the shapes and in the ranges that it declares."""

    def __init__(self, rng, *, t, s=None, n=1, group=1, values=1, d=3, b=2, kind="random"):
        self.rng, self.kind, self.group = rng, kind, group
        self.sizes = {"b": b, "t": t, "s": t if s is None else s, "n": n, "h": n * group}
        self.sizes |= {"u": values * n * group, "d": d, "e": 2, "m": 3}

    def array(self, name, spec):
        shape = tuple(axis.multiple * self.sizes[axis.letter] for axis in spec.axes)
        if name == "k":
            return keys(self.kind, self.rng, shape)
        if spec.low == -np.inf:
            return -self.rng.exponential(0.3, size=shape)
        if name == "tau":
            return np.asarray(self.rng.uniform(0.5, 2, size=shape))
        if spec.high is not None:
            return self.rng.uniform(spec.low, spec.high, size=shape)
        x = self.rng.normal(size=shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True) if spec.unit else x

    def x(self, layer, **others):
        if "decayed" in str(layer):
            self.sizes["u"] = self.sizes["h"]
        return {name: self.array(name, spec) for name, spec in layer.inputs.items()} | others

    def like(self, x):
        return self.rng.normal(size=x.shape)


@st.composite
def problems(draw, square=True, longest=7, kinds=KEYS, values=2):
    s = draw(st.integers(1, longest))
    return DeclaredProblem(
        np.random.default_rng(draw(st.integers(0, 2**32 - 1))),
        t=s if square else draw(st.integers(1, s)),
        s=s,
        n=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 3)),
        values=draw(st.integers(1, values)),
        d=draw(st.integers(1, 5)),
        kind=draw(st.sampled_from(kinds)),
    )


def in_torch(x, requires_grad=False):
    return {n: torch.tensor(array, requires_grad=requires_grad) for n, array in x.items()}


def unit(x, eps):
    return x / (torch.sum(x * x, -1, keepdim=True) + eps) ** 0.5


def to_heads(x, heads):
    return torch.repeat_interleave(x, heads // x.shape[2], 2)


def log_decay(covariance, x):
    """The log of the factor by which a token decays the statistics, (b, s, h)."""
    (b, s), h = x["k"].shape[:2], x["q"].shape[2]
    if covariance != "decayed":
        return torch.zeros(b, s, h, dtype=torch.float64)
    if "g" not in x:
        gamma = 1 - 2.0 ** (-5 - torch.arange(h, dtype=torch.float64))
        return torch.log(gamma).expand(b, s, h)
    return to_heads(x["g"].mean(-1), h) if x["g"].ndim == 4 else x["g"]


def conditioned(x, covariance="running", tau=1.0, eps=1e-6, state=None):
    """q^c, and the sums (Σ k̄k̄ᵀ, Σ k̄, Σ 1) of each query head after the last token."""
    (_, t, h, _), s = x["q"].shape, x["k"].shape[1]
    q, k = unit(x["q"], eps), to_heads(unit(x["k"], eps), h)
    decay, out = torch.exp(log_decay(covariance, x)), []
    second, first, count = (0.0, 0.0, 0.0) if state is None else state
    for j in range(s):
        alpha, key = decay[:, j], k[:, j]
        second = alpha[..., None, None] * second + key[..., :, None] * key[..., None, :]
        first = alpha[..., None] * first + key
        count = alpha * count + 1
        if (i := j - (s - t)) < 0:
            continue
        if covariance == "query_weighted":
            visible = k[:, : j + 1]
            p = torch.softmax(torch.einsum("bhd,bjhd->bjh", q[:, i], visible) / tau, 1)[..., None]
            centred = visible - torch.sum(p * visible, 1, keepdim=True)
            sigma = torch.einsum("bjhc,bjhd->bhcd", p * centred, centred)
        else:
            mean = first / count[..., None]
            sigma = second / count[..., None, None] - mean[..., :, None] * mean[..., None, :]
        moved = torch.einsum("bhcd,bhd->bhc", sigma, q[:, i])
        out.append(q[:, i] - x["contraction"][:, i, :, None] * moved)
    return torch.stack(out, 1), (second, first, count)


def conditioned_for(layer, x, state=None):
    return conditioned(x, layer.covariance, layer.tau, layer.eps, state)


def key_for(layer, k):
    """The keys that reach the base."""
    automatic = "unit" if "delta" in str(layer.base) else "raw"
    chosen = automatic if layer.backbone_key == "auto" else layer.backbone_key
    return unit(k, layer.eps) if chosen == "unit" else k


def recurrence(base, q, k, v, g=None, beta=None, state=None):
    """o_t = s S_tᵀ q_t of the linear family, and S after the last token."""
    (b, t, h, d), s = q.shape, k.shape[1]
    heads = max(h, v.shape[2])
    scale = 1.0 if base == "ssd" else d**-0.5
    if base == "retention":
        g = log_decay("decayed", {"q": q, "k": k})
    q, k, v = to_heads(q, heads), to_heads(k, heads), to_heads(v, heads)
    if state is None:
        state = torch.zeros(b, heads, d, v.shape[-1], dtype=torch.float64)
    if g is not None:
        g = to_heads(g if g.ndim == 4 else g[..., None], heads)
    out = []
    for j in range(s):
        state = state if g is None else torch.exp(g[:, j])[..., None] * state
        write = v[:, j]
        if beta is not None:
            write = write - torch.einsum("bhde,bhd->bhe", state, k[:, j])
            write = to_heads(beta, heads)[:, j, :, None] * write
        state = state + k[:, j, ..., None] * write[..., None, :]
        if (i := j - (s - t)) >= 0:
            out.append(scale * torch.einsum("bhde,bhd->bhe", state, q[:, i]))
    return torch.stack(out, 1), state


def naive(layer, x):
    base_inputs = {name: x[name] for name in ("v", "g", "beta") if name in x}
    query, key = conditioned_for(layer, x)[0], key_for(layer, x["k"])
    return recurrence(str(layer.base), query, key, **base_inputs)[0]


def assert_is(actual, expected, size=None):
    expected = expected.detach().numpy()
    assert actual.shape == expected.shape
    assert_close(actual, expected, size or 1 + np.max(np.abs(expected), initial=0.0))


def assert_output_and_gradients(layer, p, x, by):
    out, pullback = layer.vjp(**x)
    leaves = in_torch(x, requires_grad=True)
    expected = by(layer, leaves)
    assert_is(out, expected)
    cotangent = p.like(out)
    gradients = pullback(cotangent)
    assert set(gradients) == set(x)
    wanted = torch.autograd.grad(
        torch.sum(expected * torch.tensor(cotangent)), [*leaves.values()], allow_unused=True
    )
    for name, gradient in zip(leaves, wanted, strict=True):
        assert_is(gradients[name], torch.zeros_like(leaves[name]) if gradient is None else gradient)


PIECES = [
    (pa.ConditionedQuery(), {}),
    (pa.ConditionedQuery(decay="head", eps=0.0), {"covariance": "decayed", "eps": 0.0}),
    (pa.ConditionedQuery(decay="channel"), {"covariance": "decayed"}),
    (pa.ConditionedQuery(decay="retention"), {"covariance": "decayed"}),
    (pa.QueryWeightedQuery(), {"covariance": "query_weighted"}),
    (pa.QueryWeightedQuery(tau=0.1), {"covariance": "query_weighted", "tau": 0.1}),
]
