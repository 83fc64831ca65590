"""CCQ (arXiv 2606.01294), against identities that hold whatever the implementation.

The definition is q^c = (I − λ Σ) q̄ with q̄ and k̄ of length 1 and Σ the covariance of the keys so
far: all alike, weighted by the base's decay, or by the softmax of the query. Everything is float64,
so an identity has to hold to 1e-10 of the largest number it speaks of. The definition is written
in PyTorch, token by token, and gradients are held against autograd of it and central differences.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import precondattn as pa
from tests.mathematics.identities import assert_close, part

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
RECURRENT = [
    "ccq(linear)",
    "ccq(gla)",
    "ccq(ssd)",
    "ccq(gated_delta)",
    "ccq[covariance=decayed](gla)",
    "ccq[covariance=decayed](ssd)",
    "ccq[covariance=decayed](retention)",
    "ccq[covariance=decayed](gated_delta)",
    "ccq[covariance=query_weighted](gated_delta)",
    "ccq[covariance=query_weighted,tau=0.3](gla)",
    "ccq[backbone_key=raw](delta)",
    "ccq[backbone_key=unit](gla)",
    "ccq[covariance=decayed,eps=0.1](gated_delta)",
]
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


class Problem:
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
    return Problem(
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


# The definitions


def unit(x, eps):
    return x / (torch.sum(x * x, -1, keepdim=True) + eps) ** 0.5


def to_heads(x, heads):
    return torch.repeat_interleave(x, heads // x.shape[2], 2)


def log_decay(covariance, x):
    """The logarithm of what one token leaves of the statistics, (b, s, h)."""
    (b, s), h = x["k"].shape[:2], x["q"].shape[2]
    if covariance != "decayed":
        return torch.zeros(b, s, h, dtype=torch.float64)
    if "g" not in x:
        gamma = 1 - 2.0 ** (-5 - torch.arange(h, dtype=torch.float64))
        return torch.log(gamma).expand(b, s, h)
    return to_heads(x["g"].mean(-1), h) if x["g"].ndim == 4 else x["g"]


def conditioned(x, covariance="running", tau=1.0, eps=1e-6, state=None):
    """q^c, and the sums (Σ k̄k̄ᵀ, Σ k̄, Σ 1) of each query head behind the last token."""
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
            seen = k[:, : j + 1]
            p = torch.softmax(torch.einsum("bhd,bjhd->bjh", q[:, i], seen) / tau, 1)[..., None]
            centred = seen - torch.sum(p * seen, 1, keepdim=True)
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
    """The key that the base reads."""
    automatic = "unit" if "delta" in str(layer.base) else "raw"
    chosen = automatic if layer.backbone_key == "auto" else layer.backbone_key
    return unit(k, layer.eps) if chosen == "unit" else k


def recurrence(base, q, k, v, g=None, beta=None, state=None):
    """o_t = s S_tᵀ q_t of the linear family, and S behind the last token."""
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


def definition(layer, x):
    """By its own base of what is conditioned here."""
    given = {name: array for name, array in x.items() if name in layer.base.inputs}
    return layer.base(**given | {"q": conditioned_for(layer, x)[0], "k": key_for(layer, x["k"])})


def naive(layer, x):
    own = {name: x[name] for name in ("v", "g", "beta") if name in x}
    query, key = conditioned_for(layer, x)[0], key_for(layer, x["k"])
    return recurrence(str(layer.base), query, key, **own)[0]


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


@pytest.mark.parametrize("layer", LAYERS)
@sampled
@given(p=problems(square=False))
def test_the_base_reads_the_definitions_query(layer, p):
    layer = pa.parse(layer)
    x = p.x(layer)
    assert_is(layer(**x), definition(layer, in_torch(x)))


@pytest.mark.parametrize("layer", LAYERS)
@settings(sampled, max_examples=3)
@given(p=problems(square=False, longest=5, kinds=["random", "clustered", "some zero"]))
def test_gradients_through_any_base(layer, p):
    layer = pa.parse(layer)
    assert_output_and_gradients(layer, p, p.x(layer), definition)


@pytest.mark.parametrize("layer", RECURRENT)
@sampled
@given(p=problems(square=False))
def test_output_and_gradients_are_those_of_the_loop(layer, p):
    layer = pa.parse(layer)
    assert_output_and_gradients(layer, p, p.x(layer), naive)


@pytest.mark.parametrize("layer", ["ccq(gated_delta)", "ccq[covariance=decayed](gla)"])
def test_a_longer_sequence_and_its_gradients(layer):
    layer, p = pa.parse(layer), Problem(np.random.default_rng(0), t=71, s=83, n=2, group=2, d=5)
    assert_output_and_gradients(layer, p, p.x(layer), naive)


@pytest.mark.parametrize(
    "layer",
    [
        "ccq(gated_delta)",
        "ccq[covariance=decayed](gla)",
        "ccq[covariance=decayed](retention)",
        "ccq[covariance=query_weighted,tau=0.3](linear)",
        "ccq[covariance=decayed](softmax[forget=unscaled])",
    ],
)
def test_gradients_are_those_of_central_differences(layer):
    layer, step = pa.parse(layer), 1e-5
    p = Problem(np.random.default_rng(1), t=3, s=4, n=2, group=2, d=3, b=1)
    x = p.x(layer)
    out, pullback = layer.vjp(**x)
    cotangent = p.like(out)
    for name, gradient in pullback(cotangent).items():
        expected = np.zeros_like(x[name])
        for index in np.ndindex(x[name].shape):
            ends = []
            for sign in (1, -1):
                moved = x[name].copy()
                moved[index] += sign * step
                ends.append(np.sum(cotangent * layer(**(x | {name: moved}))))
            expected[index] = (ends[0] - ends[1]) / (2 * step)
        assert np.abs(gradient - expected).max() <= 1e-6 * max(1, np.abs(expected).max())


PIECES = [
    (pa.ConditionedQuery(), {}),
    (pa.ConditionedQuery(decay="head", eps=0.0), {"covariance": "decayed", "eps": 0.0}),
    (pa.ConditionedQuery(decay="channel"), {"covariance": "decayed"}),
    (pa.ConditionedQuery(decay="retention"), {"covariance": "decayed"}),
    (pa.QueryWeightedQuery(), {"covariance": "query_weighted"}),
    (pa.QueryWeightedQuery(tau=0.1), {"covariance": "query_weighted", "tau": 0.1}),
]


@pytest.mark.parametrize(("piece", "options"), PIECES, ids=str)
@sampled
@given(p=problems(square=False, kinds=["random", "equal", "clustered", "opposite"]))
def test_the_query_by_itself(piece, options, p):
    def by(_, x):
        return conditioned(x, **options)[0]

    assert_output_and_gradients(piece, p, p.x(piece), by)


@pytest.mark.parametrize("layer", [*RUNNING[:6], "ccq(gla)", "ccq(gsa)", *DECAYED[2:]])
@sampled
@given(p=problems(square=False))
def test_query_heads_share_the_statistics_of_their_key_head(layer, p):
    layer = pa.parse(layer)
    x, shared = p.x(layer), [n for n, spec in layer.inputs.items() if "n" in spec.letters]
    assert "k" in shared
    repeated = x | {name: np.repeat(x[name], p.group, axis=2) for name in shared}
    assert_close(layer(**x), layer(**repeated), size=10 * (1 + np.abs(x["v"]).max()))


@pytest.mark.parametrize("layer", LAYERS)
@sampled
@given(p=problems(), past=st.integers(1, 7))
def test_the_future_does_not_touch_the_past_by_a_single_bit(layer, p, past):
    layer = pa.parse(layer)
    x = p.x(layer)
    changed = {name: array.copy() for name, array in x.items()}
    for array in changed.values():
        if array.ndim >= 3:
            array[:, past:] *= 0.25
    np.testing.assert_array_equal(layer(**changed)[:, :past], layer(**x)[:, :past])


# The operator I − λΣ


def operator(k, lam, decay="none", g=None, eps=0.0):
    """I − λΣ of every token and key head, (b, s, n, d, d): what it makes of the basis vectors."""
    b, s, n, d = k.shape
    q = np.broadcast_to(np.tile(np.eye(d), (n, 1)), (b, s, n * d, d)).copy()
    gates = {} if g is None else {"g": np.repeat(g, d, axis=2) if decay == "head" else g}
    contraction = np.full((b, s, n * d), float(lam))
    out = pa.ConditionedQuery(decay=decay, eps=eps)(q, k, contraction=contraction, **gates)
    return out.reshape(b, s, n, d, d)


def conditioned_query(q, k, lam, piece=None):
    """`ConditionedQuery` with one λ everywhere, and without ε."""
    piece = piece or pa.ConditionedQuery(eps=0.0)
    return piece(q, k, contraction=np.full(q.shape[:3], float(lam)))


def of_length_1(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.parametrize("decay", ["none", "head", "channel"])
@pytest.mark.parametrize("length", [1, 2, 7, 300])
@pytest.mark.parametrize("kind", ["random", "equal", "clustered", "opposite"])
def test_the_spectrum_lies_between_1_minus_lambda_and_1(decay, length, kind):
    rng = np.random.default_rng(length)
    k = 3 * keys(kind, rng, (2, length, 2, 4))
    g = {"none": None, "head": -rng.exponential(1, k.shape[:3])}.get(decay, -rng.random(k.shape))
    for lam in (0.0, 0.1, 0.7, 1.0):
        matrix = operator(k, lam, decay, g)
        assert_close(matrix, matrix.swapaxes(-1, -2), size=0.01)
        eigenvalues = np.linalg.eigvalsh(matrix)
        assert eigenvalues.min() >= 1 - lam - 1e-12
        assert eigenvalues.max() <= 1 + 1e-12


@pytest.mark.parametrize("length", [2, 64, 1000])
def test_both_ends_of_the_spectrum_are_attained(length):
    u = of_length_1(np.random.default_rng(0).normal(size=3))
    k = np.resize([1.0, -1.0], length)[None, :, None, None] * u
    eigenvalues = np.linalg.eigvalsh(operator(k, 0.7)[0, -1, 0])
    assert_close(eigenvalues, np.array([0.3, 1, 1]))
    assert_close(conditioned_query(np.resize(u, k.shape), k, 0.7)[0, -1, 0], 0.3 * u)


@sampled
@given(problems(kinds=["random", "clustered"]))
def test_a_direction_without_keys_is_left_alone(p):
    """A query orthogonal to all keys, and the mean itself where all keys are equal."""
    x = p.x(pa.ConditionedQuery())
    q, k = (np.concatenate([x["q"], 0 * x["q"]], -1), np.concatenate([0 * x["k"], x["k"]], -1))
    assert_close(conditioned_query(q, k, 1), of_length_1(q))
    equal = keys("equal", p.rng, x["k"].shape)
    assert_close(conditioned_query(x["q"], equal, 1), of_length_1(x["q"]))


@pytest.mark.parametrize(("piece", "options"), PIECES, ids=str)
@sampled
@given(p=problems(square=False))
def test_a_query_gets_shorter_by_no_more_than_lambda(piece, options, p):
    x = p.x(piece, k=p.rng.normal(size=[p.sizes[letter] for letter in "bsnd"]))
    before = np.linalg.norm(unit(torch.tensor(x["q"]), options.get("eps", 1e-6)).numpy(), axis=-1)
    after = np.linalg.norm(piece(**x), axis=-1)
    assert np.all(after <= before + 1e-12)
    assert np.all(after >= (1 - x["contraction"]) * before - 1e-12)


@sampled
@given(problems(kinds=["random", "clustered", "opposite"]), st.floats(0, 1))
def test_the_trace_of_the_covariance_is_1_minus_the_squared_mean(p, lam):
    k = p.x(pa.ConditionedQuery())["k"]
    s, d = k.shape[1], k.shape[-1]
    mean = np.cumsum(of_length_1(k), axis=1) / np.arange(1, s + 1)[:, None, None]
    trace = np.trace(operator(k, lam), axis1=-2, axis2=-1)
    assert_close(trace, d - lam * (1 - np.sum(mean**2, axis=-1)))


@pytest.mark.parametrize("d", [1, 3, 16])
def test_isotropic_keys_contract_by_lambda_over_d_only(d):
    k = np.concatenate([np.eye(d), -np.eye(d)])[None, :, None]
    assert_close(operator(k, 0.8)[0, -1, 0], (1 - 0.8 / d) * np.eye(d))


@sampled
@given(st.integers(0, 2**32 - 1), st.floats(0.01, 1), st.floats(0, 1), st.integers(1, 20))
def test_the_shift_of_the_margin(seed, rho, lam, pairs):
    """Eq. 26: λρ(β − α)(u·q) is exact if Σ = ρ u uᵀ, as of keys √(1 − ρ) w ± √ρ u, w ⟂ u."""
    rng = np.random.default_rng(seed)
    u, w = np.linalg.qr(rng.normal(size=(5, 5)))[0][:2]
    signs = np.tile([1.0, -1.0], pairs)[:, None]
    k = np.sqrt(1 - rho) * w + np.sqrt(rho) * signs * u
    q, target, distractor = of_length_1(rng.normal(size=(3, 5)))
    out = conditioned_query(np.resize(q, (1, 1, 1, 5)), k[None, :, None], lam)[0, 0, 0]
    shift = lam * rho * (distractor @ u - target @ u) * (u @ q)
    assert_close((target - distractor) @ out, (target - distractor) @ q + shift, size=1)


@pytest.mark.parametrize("lam", [1e-3, 1e-2, 0.1])
def test_it_is_the_first_order_of_a_regularised_inverse(lam):
    """(I + λΣ)⁻¹ q̄, as MesaNet would read, differs by λ²Σ² (I + λΣ)⁻¹ q̄, at most λ²."""
    k = np.random.default_rng(7).normal(size=(1, 9, 1, 4))
    contracted = operator(k, lam)[0, -1, 0]
    covariance = (np.eye(4) - contracted) / lam
    inverse = np.linalg.inv(np.eye(4) + lam * covariance)
    assert_close(inverse - contracted, lam**2 * covariance @ covariance @ inverse, size=1)
    assert np.linalg.norm(inverse - contracted, 2) <= lam**2


@pytest.mark.parametrize("layer", LAYERS)
@sampled
@given(p=problems(square=False))
def test_without_contraction_it_is_the_base_on_queries_of_length_1(layer, p):
    layer = pa.parse(layer)
    x = p.x(layer)
    x["contraction"] *= 0
    given = {n: torch.tensor(x[n]) for n in layer.base.inputs}
    given |= {"q": unit(given["q"], layer.eps), "k": key_for(layer, given["k"])}
    assert_is(layer(**x), layer.base(**given))


@pytest.mark.parametrize(("piece", "options"), PIECES, ids=str)
@sampled
@given(p=problems())
def test_the_first_token_has_no_covariance(piece, options, p):
    x = p.x(piece, k=p.rng.normal(size=[p.sizes[letter] for letter in "bsnd"]))
    unconditioned = unit(torch.tensor(x["q"]), options.get("eps", 1e-6))
    assert_is(piece(**x)[:, :1], unconditioned[:, :1])


@pytest.mark.parametrize(
    "piece",
    [
        pa.ConditionedQuery(),
        pa.ConditionedQuery(decay="head"),
        pa.ConditionedQuery(decay="retention"),
        pa.QueryWeightedQuery(tau=0.5),
    ],
    ids=str,
)
@sampled
@given(p=problems(square=False))
def test_a_rotated_sequence_has_rotated_queries(piece, p):
    x = p.x(piece)
    rotation = np.linalg.qr(p.rng.normal(size=(x["q"].shape[-1],) * 2))[0]
    rotated = x | {"q": x["q"] @ rotation, "k": x["k"] @ rotation}
    assert_close(piece(**rotated), piece(**x) @ rotation, size=1)


@pytest.mark.parametrize(
    "layer",
    [
        "ccq",
        "ccq(gated_delta)",
        "ccq[covariance=decayed](ssd)",
        "ccq[covariance=query_weighted](linear)",
    ],
)
@sampled
@given(p=problems(square=False))
def test_a_rotation_of_queries_and_keys_changes_no_output(layer, p):
    layer = pa.parse(layer)
    x = p.x(layer)
    rotation = np.linalg.qr(p.rng.normal(size=(x["q"].shape[-1],) * 2))[0]
    rotated = x | {"q": x["q"] @ rotation, "k": x["k"] @ rotation}
    assert_close(layer(**rotated), layer(**x), size=10 * (1 + np.abs(x["v"]).max()))


@pytest.mark.parametrize("layer", [layer for layer in DECAYED if "retention" not in layer])
@sampled
@given(p=problems(square=False))
def test_what_forgets_nothing_has_the_running_covariance(layer, p):
    decayed, running = pa.parse(layer), pa.parse(layer.replace("[covariance=decayed]", ""))
    x = p.x(decayed)
    x["g"] *= 0
    assert_close(decayed(**x), running(**x), size=10 * (1 + np.abs(x["v"]).max()))


@pytest.mark.parametrize("decay", ["head", "channel"])
@sampled
@given(p=problems(square=False))
def test_what_forgets_everything_has_no_covariance(decay, p):
    piece = pa.ConditionedQuery(decay=decay)
    x = p.x(piece)
    x["g"] = x["g"] * 0 - 1e4
    expected = unit(torch.tensor(x["q"]), 1e-6) if p.kind in ("random", "clustered") else None
    assert expected is None or np.abs(piece(**x) - expected.numpy()).max() <= 1e-10
    assert np.all(np.isfinite(piece(**x)))


@sampled
@given(problems(square=False))
def test_the_gate_of_a_channel_counts_by_its_mean(p):
    channel, head = (pa.ConditionedQuery(decay=decay) for decay in ("channel", "head"))
    x = p.x(channel)
    means = np.repeat(x["g"].mean(-1), p.group, axis=2)
    assert_close(channel(**x), head(**(x | {"g": means})), size=1)


@sampled
@given(problems(square=False))
def test_at_a_high_temperature_all_keys_are_alike(p):
    x = p.x(pa.ConditionedQuery())
    assert_close(pa.QueryWeightedQuery(tau=1e12)(**x), pa.ConditionedQuery()(**x), size=1)


def test_at_a_low_temperature_one_key_has_no_covariance():
    p = Problem(np.random.default_rng(0), t=7, n=2, group=2)
    x = p.x(pa.ConditionedQuery())
    cold = pa.QueryWeightedQuery(tau=1e-5, eps=0.0)(**x)
    assert_close(cold, of_length_1(x["q"]))


def log_partition_hessian(k, at, tau=1.0):
    """∇² log Σ_j exp(k_j·q/τ), by central differences of its gradient."""

    def gradient(q):
        scores = k @ q / tau
        p = np.exp(scores - scores.max())
        return p @ k / p.sum() / tau

    step, d = 1e-5, len(at)
    sides = [(gradient(at + e) - gradient(at - e)) / (2 * step) for e in step * np.eye(d)]
    return np.stack(sides)


@sampled
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 5), st.floats(0.5, 3))
def test_the_covariance_is_the_hessian_of_the_log_partition(seed, s, d, tau):
    """Running: at 0. Weighted by the query: at q̄, and with a temperature τ² times that."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(1, 1, 1, d)), rng.normal(size=(1, s, 1, d))
    unit_q, unit_k = of_length_1(q)[0, 0, 0], of_length_1(k)[0, :, 0]
    for piece, at, temperature in [
        (pa.ConditionedQuery(eps=0.0), 0 * unit_q, 1.0),
        (pa.QueryWeightedQuery(eps=0.0), unit_q, 1.0),
        (pa.QueryWeightedQuery(tau=tau, eps=0.0), unit_q, tau),
    ]:
        sigma = temperature**2 * log_partition_hessian(unit_k, at, temperature)
        out = conditioned_query(q, k, 0.9, piece)[0, 0, 0]
        assert np.abs(out - (unit_q - 0.9 * sigma @ unit_q)).max() <= 1e-8


# Appendix F: what bounds the operator


@pytest.mark.parametrize("kind", ["random", "opposite"])
def test_sums_instead_of_means_leave_the_spectrum_further_with_every_token(kind):
    """Keys that come with their opposites have no mean, and λt in place of λ is C for C̄."""
    rng, lam, lowest = np.random.default_rng(0), 0.1, []
    half = keys(kind, rng, (1, 256, 1, 4))
    k = np.stack([half, -half], axis=2).reshape(1, 512, 1, 4)
    for t in (8, 32, 128, 512):
        unit_k = of_length_1(k[0, :t, 0])
        expected = np.eye(4) - lam * unit_k.T @ unit_k
        with_sums, with_means = (operator(k[:, :t], x)[0, -1, 0] for x in (lam * t, lam))
        assert_close(with_sums, expected)
        assert np.linalg.eigvalsh(with_means).min() >= 1 - lam - 1e-12
        lowest.append(np.linalg.eigvalsh(with_sums).min())
        assert lowest[-1] <= 1 - lam * t / 4 + 1e-10  # The trace of C is t.
    assert all(later < 3 * earlier < 0 for earlier, later in pairwise(lowest[1:]))


@pytest.mark.parametrize(
    ("lam", "flips", "amplifies"),
    [(0.5, False, False), (1.0, False, False), (1.5, True, False), (3.0, True, True)],
)
@pytest.mark.parametrize("rho", [1.0, 0.4])
def test_without_the_sigmoid_a_query_may_flip_and_grow(rho, lam, flips, amplifies):
    """Along the first eigenvector of Σ = ρ u uᵀ it becomes 1 − λρ times itself."""
    u, w = np.eye(2)
    signs = np.tile([1.0, -1.0], 50)[:, None]
    k = (np.sqrt(1 - rho) * w + np.sqrt(rho) * signs * u)[None, :, None]
    out = conditioned_query(u.reshape(1, 1, 1, 2), k, lam / rho)[0, 0, 0]
    assert_close(out, (1 - lam) * u, size=1)
    assert (out @ u < -1e-10) == flips
    assert (np.linalg.norm(out) > 1) == amplifies


@pytest.mark.parametrize("logit", [-1e3, -2.197, 0.0, 30.0, 1e3])
def test_with_the_gate_no_weights_and_no_length_break_the_bound(logit):
    p = Problem(np.random.default_rng(0), t=200, d=4)
    x = p.x(pa.ConditionedQuery())
    lam = pa.contraction_gate(x["q"], weight=np.full((1, 4), logit), bias=np.full(1, logit))
    out = pa.ConditionedQuery()(**(x | {"contraction": lam}))
    assert np.linalg.norm(out, axis=-1).max() <= 1 + 1e-12


# Caches


def test_what_a_cache_remembers_is_sums():
    p = Problem(np.random.default_rng(0), t=6, n=2, group=2)
    for layer, decayed in [("ccq(gla)", "running"), ("ccq[covariance=decayed](gla)", "decayed")]:
        layer = pa.parse(layer)
        x = p.x(layer)
        _, cache = layer.extend(layer.init_cache(**x), **x)
        _, sums = conditioned(in_torch(x), decayed)
        found = [cache.store[name] for name in own_buffers(cache)]
        for buffer, expected in zip(found, sums, strict=True):
            assert_is(np.repeat(buffer, p.group, axis=1), expected)


def own_buffers(cache):
    """The names of Σ k̄k̄ᵀ, Σ k̄ and Σ 1."""
    return [
        next(name for name in cache.store if name.startswith(first))
        for first in ("second_moment", "first_moment", "count")
    ]


def extended(layer, x, cuts, **masks):
    """The outputs of the pieces between the cuts, in one array; masks are cut likewise."""
    cache = layer.init_cache(**x, capacity=cuts[-1], **({"key_mask": True} if masks else {}))
    outs = []
    for start, stop in pairwise(cuts):
        own = {name: mask[:, start:stop] for name, mask in masks.items()}
        out, cache = layer.extend(cache, **part(x, slice(start, stop)), **own)
        outs.append(out)
    return np.concatenate(outs, axis=1), cache


@pytest.mark.parametrize("layer", LAYERS)
@sampled
@given(p=problems(), data=st.data())
def test_splitting_a_sequence_anywhere_gives_the_same_output(layer, p, data):
    layer, t = pa.parse(layer), p.sizes["t"]
    x = p.x(layer)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, t - 1)), max_size=3)) | {0, t})
    out = layer(**x)
    found, cache = extended(layer, x, cuts)
    assert_close(found, out, size=1 + np.abs(out).max())
    assert np.all(cache.length == t)


@pytest.mark.parametrize("hidden", [[], [1, 5]], ids=["all", "hidden"])
@pytest.mark.parametrize("layer", [layer for layer in LAYERS if "window" not in layer])
def test_a_ragged_batch_equals_each_sequence_alone(layer, hidden):
    p = Problem(np.random.default_rng(0), t=7, n=2, group=2)
    layer, mask = pa.parse(layer), np.ones((2, 7), dtype=bool)
    x, mask[0, hidden] = p.x(layer), False
    cache, outs = layer.init_cache(**x, capacity=7, key_mask=True), []
    for chosen, counts in [(slice(0, 4), [4, 1]), (slice(4, 7), [2, 3])]:
        own = {"lengths": counts, "key_mask": mask[:, chosen]}
        out, cache = layer.extend(cache, **part(x, chosen), **own)
        outs.append(out)
    out = np.concatenate(outs, axis=1)
    for i, kept in enumerate([[0, 1, 2, 3, 4, 5], [0, 4, 5, 6]]):
        alone = {n: array[i : i + 1] if array.ndim >= 3 else array for n, array in x.items()}
        shown = [j for j in kept if mask[i, j]]
        expected = layer(**part(alone, shown))
        assert_close(out[i : i + 1, shown], expected, size=1 + np.abs(expected).max())


@pytest.mark.parametrize("layer", LAYERS)
@sampled
@given(p=problems(), data=st.data())
def test_padding_and_segments_leave_each_sequence_as_if_alone(layer, p, data):
    layer, t = pa.parse(layer), p.sizes["t"]
    x = p.x(layer)
    lengths = np.array([data.draw(st.integers(0, t)) for _ in range(2)])
    padding = np.arange(t) >= lengths[:, None]
    hidden = {
        name: np.where(padding.reshape(2, t, *[1] * (array.ndim - 2)), np.nan, array)
        for name, array in x.items()
        if array.ndim >= 3
    }
    padded, pullback = layer.vjp(**(x | hidden), lengths=lengths)
    assert np.all(padded[padding] == 0)
    gradients = pullback(p.like(padded))
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients.values())
    assert all(np.all(gradients[name][padding] == 0) for name in hidden)
    packed = layer(**x, segment_ids=padding.astype(int))
    for i, count in enumerate(lengths):
        alone = {n: array[i : i + 1] if array.ndim >= 3 else array for n, array in x.items()}
        for out, chosen in [
            (padded, slice(0, count)),
            (packed, slice(0, count)),
            (packed, slice(count, t)),
        ]:
            if chosen.stop > chosen.start:
                expected = layer(**part(alone, chosen))
                size = 1 + np.abs(expected).max()
                assert_close(out[i : i + 1, chosen], expected, size)


@pytest.mark.parametrize("layer", [layer for layer in LAYERS if "window" not in layer])
@sampled
@given(p=problems(), data=st.data())
def test_a_hidden_key_is_counted_by_nobody(layer, p, data):
    layer, t = pa.parse(layer), p.sizes["t"]
    x = p.x(layer)
    shown = np.array([data.draw(st.booleans()) for _ in range(t)])
    mask = np.stack([shown, shown])
    out = layer(**x, key_mask=mask)
    timed = {n: a.reshape(2, t, -1) for n, a in x.items() if a.ndim >= 3}
    others = {n: a.copy() for n, a in timed.items() if "s" in layer.inputs[n].letters}
    for array in others.values():
        array[:, ~shown] *= 0.5
    changed = {n: a.reshape(x[n].shape) for n, a in others.items()}
    assert_close(layer(**(x | changed), key_mask=mask), out, size=1 + np.abs(out).max())
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, t - 1)), max_size=2)) | {0, t})
    found, _ = extended(layer, x, cuts, key_mask=mask)
    assert_close(found, out, size=1 + np.abs(out).max())
    if shown.any():
        expected = layer(**part(x, shown))
        assert_close(out[:, shown], expected, size=1 + np.abs(expected).max())


@pytest.mark.parametrize(("piece", "options"), PIECES[:4], ids=str)
@sampled
@given(p=problems(kinds=["random"]), data=st.data())
def test_a_query_without_a_key_of_its_own_has_those_before(piece, options, p, data):
    t = p.sizes["t"]
    x = p.x(piece)
    shown = np.array([data.draw(st.booleans()) for _ in range(t)])
    out = piece(**x, key_mask=np.stack([shown, shown]))
    for i in range(t):
        query = {"q": x["q"][:, i : i + 1], "contraction": x["contraction"][:, i : i + 1]}
        if shown[: i + 1].any():
            seen = np.flatnonzero(shown[: i + 1])
            keys_seen = {name: x[name][:, seen] for name in ("k", "g") if name in x}
            expected = conditioned(in_torch(query | keys_seen), **options)[0]
        else:
            expected = unit(torch.tensor(query["q"]), options.get("eps", 1e-6))
        assert_is(out[:, i : i + 1], expected)


STATES = [
    "ccq(gated_delta)",
    "ccq(gla)",
    "ccq[covariance=decayed](gla)",
    "ccq[covariance=decayed](gated_delta)",
]


@pytest.mark.parametrize("layer", STATES)
@sampled
@given(p=problems(kinds=["random", "clustered"]), past=st.integers(1, 3))
def test_gradients_through_the_states(layer, p, past):
    """Of an extension, with cotangents of all buffers: those of the loop that starts from them.

    A second moment is symmetric, and so the symmetric part of its gradient is all that matters.
    """
    layer, t = pa.parse(layer), p.sizes["t"]
    p.sizes |= {"t": t + past, "s": t + past}
    x = p.x(layer)
    before, after = part(x, slice(0, past)), part(x, slice(past, past + t))
    _, cache = layer.extend(layer.init_cache(**x), **before)
    out, longer, pullback = layer.extend_vjp(cache, **after)
    state_name = next(name for name in cache.store if ".state" in name)
    names = [*own_buffers(cache), state_name]
    assert set(names) == set(cache.store)

    leaves, old = in_torch(after, requires_grad=True), in_torch(cache.store, requires_grad=True)
    h, heads = leaves["q"].shape[2], max(leaves["q"].shape[2], leaves["v"].shape[2])

    def for_each(name, count):
        return torch.repeat_interleave(old[name], count // old[name].shape[1], 1)

    q, sums = conditioned_for(layer, leaves, [for_each(name, h) for name in names[:3]])
    own = {name: leaves[name] for name in ("v", "g", "beta") if name in leaves}
    expected, state = recurrence(
        str(layer.base), q, key_for(layer, leaves["k"]), **own, state=for_each(state_name, heads)
    )
    assert_is(out, expected)
    cotangent, d_store = p.like(out), {name: p.like(longer.store[name]) for name in names}
    total = torch.sum(expected * torch.tensor(cotangent))
    for name, end in zip(names, (*sums, state), strict=True):
        own_head = end[:, :: end.shape[1] // old[name].shape[1]]
        assert_is(longer.store[name], own_head)
        total = total + torch.sum(own_head * torch.tensor(d_store[name]))
    gradients, d_old = pullback(cotangent, d_store)
    assert (set(gradients), set(d_old)) == (set(after), set(names))
    wanted = torch.autograd.grad(total, [*leaves.values(), *old.values()])
    for name, gradient in zip((*leaves, *old), wanted, strict=True):
        found = d_old[name] if name in old else gradients[name]
        if name == names[0]:
            found, gradient = (a + a.swapaxes(-1, -2) for a in (found, gradient))
        assert_is(found, gradient)


@pytest.mark.parametrize("layer", STATES)
def test_pullbacks_of_pieces_make_that_of_the_whole(layer):
    p = Problem(np.random.default_rng(0), t=9, n=2, group=2)
    layer = pa.parse(layer)
    x = p.x(layer)
    out, whole = layer.vjp(**x)
    cotangent = p.like(out)
    expected, cuts = whole(cotangent), (0, 1, 4, 9)
    cache, pullbacks = layer.init_cache(**x), []
    for start, stop in pairwise(cuts):
        _, cache, pullback = layer.extend_vjp(cache, **part(x, slice(start, stop)))
        pullbacks.append(pullback)
    d_store = {name: np.zeros_like(buffer) for name, buffer in cache.store.items()}
    for (start, stop), pullback in reversed([*zip(pairwise(cuts), pullbacks, strict=True)]):
        gradients, d_store = pullback(cotangent[:, start:stop], d_store)
        for name, gradient in gradients.items():
            size = 1 + np.abs(expected[name]).max()
            assert_close(gradient, expected[name][:, start:stop], size)


@pytest.mark.parametrize("masks", ["lengths", "key_mask"])
@pytest.mark.parametrize("layer", STATES)
def test_what_is_masked_has_no_part_in_gradients_through_states(layer, masks):
    p = Problem(np.random.default_rng(0), t=6, n=2, group=2)
    layer = pa.parse(layer)
    x = p.x(layer)
    _, cache = layer.extend(layer.init_cache(**x), **part(x, slice(0, 2)))
    new = part(x, slice(2, 6))
    if masks == "lengths":
        counts = np.array([2, 4])
        shown, masks = np.arange(4) < counts[:, None], {"lengths": counts}
        new = {
            n: np.where(shown.reshape(2, 4, *[1] * (a.ndim - 2)), a, np.nan) for n, a in new.items()
        }
    else:
        shown = np.array([[True, False, True, False], [False, True, True, True]])
        masks = {"key_mask": shown}
    out, longer, pullback = layer.extend_vjp(cache, **new, **masks)
    cotangent = p.like(out) * shown[..., None, None]
    d_store = {name: p.like(buffer) for name, buffer in longer.store.items()}
    gradients, d_old = pullback(cotangent, d_store)
    assert all(np.all(gradient[~shown] == 0) for gradient in gradients.values())
    for i, kept in enumerate(shown):
        one = slice(i, i + 1)
        store = {name: buffer[one] for name, buffer in cache.store.items()}
        alone = cache._replace(length=cache.length[one], store=store)
        own = {name: array[one, kept] for name, array in new.items()}
        expected, grown, pull = layer.extend_vjp(alone, **own)
        wanted, d_alone = pull(cotangent[one, kept], {n: a[one] for n, a in d_store.items()})
        pairs = [(out[one, kept], expected)]
        pairs += [(longer.store[name][one], buffer) for name, buffer in grown.store.items()]
        pairs += [(gradients[name][one, kept], gradient) for name, gradient in wanted.items()]
        pairs += [(d_old[name][one], gradient) for name, gradient in d_alone.items()]
        for found, alike in pairs:
            assert_close(found, alike, size=1 + np.abs(alike).max())


# The key that the base reads


@pytest.mark.parametrize(
    ("layer", "unit_keys"),
    [
        ("ccq[eps=0.0](delta)", True),
        ("ccq[eps=0.0](gated_delta)", True),
        ("ccq[covariance=decayed,eps=0.0](gated_delta)", True),
        ("ccq[covariance=query_weighted,eps=0.0](delta)", True),
        ("ccq[eps=0.0](row_normalized(gated_delta))", True),
        ("ccq[backbone_key=unit,eps=0.0](gla)", True),
        ("ccq[backbone_key=unit,eps=0.0]", True),
        ("ccq[backbone_key=raw,eps=0.0](delta)", False),
        ("ccq[eps=0.0](gla)", False),
        ("ccq[eps=0.0](linear)", False),
        ("ccq[eps=0.0](ssd)", False),
        ("ccq[eps=0.0](retention)", False),
        ("ccq[eps=0.0]", False),
    ],
)
def test_keys_of_length_1_for_the_delta_rule_only(layer, unit_keys):
    p = Problem(np.random.default_rng(0), t=6, n=2, group=2)
    layer = pa.parse(layer)
    x = p.x(layer)
    factors = p.rng.uniform(0.2, 3, size=(*x["k"].shape[:3], 1))
    difference = np.abs(layer(**(x | {"k": factors * x["k"]})) - layer(**x)).max()
    assert difference <= 1e-10 if unit_keys else difference > 1e-3


@pytest.mark.parametrize("layer", LAYERS)
@sampled
@given(p=problems(square=False, kinds=["random"]))
def test_the_length_of_a_query_makes_no_difference(layer, p):
    layer = replace(pa.parse(layer), eps=0.0)
    x = p.x(layer)
    factors = p.rng.uniform(0.2, 3, size=(*x["q"].shape[:3], 1))
    out = layer(**x)
    assert_close(layer(**(x | {"q": factors * x["q"]})), out, size=1 + np.abs(out).max())


def test_a_feature_map_inside_or_outside():
    """Inside, features are made of q^c; outside, the features of queries are conditioned."""
    p = Problem(np.random.default_rng(0), t=6, n=2, group=2)
    outside = pa.parse("hedgehog(ccq(gla))")
    x = p.x(outside)
    features = {
        name: pa.HedgehogMap()(x[name], weight=x[f"{name}_weight"], bias=x[f"{name}_bias"])
        for name in "qk"
    }
    own = {name: x[name] for name in ("v", "g", "contraction")}
    scale = x["q"].shape[-1] ** -0.5
    for base in ("gla", f"gla[scale={scale}]"):
        expected = pa.parse(f"ccq({base})")(**features, **own)
        found = pa.parse(f"hedgehog(ccq({base}))")(**x)
        assert_close(found, expected, size=10)


# Construction


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ccq(qk_norm)", "the base normalises its queries"),
        ("ccq(qk_norm[norm=l2](delta))", "the base normalises its queries"),
        ("ccq(lucid[normalize=queries_and_keys])", "the base normalises its queries"),
        ("ccq(ccq)", "the base normalises its queries"),
        ("ccq(softmax[causal=false])", "not causal"),
        ("ccq(differential)", "the first of two maps only"),
        ("ccq[covariance=decayed](linear)", "decay of the base, and the base has none"),
        ("ccq[covariance=decayed](delta)", "decay of the base, and the base has none"),
        ("temperature(ccq)", "the base normalises its queries, .* put it inside"),
        ("per_dim_scale(ccq)", "the base normalises its queries, .* put it inside"),
        ("qk_norm(ccq)", "the base normalises its queries already"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(text, reason):
    with pytest.raises(TypeError, match=rf"makes no sense: .*{reason}"):
        pa.parse(text)


@pytest.mark.parametrize(
    "options",
    [
        {"tau": 2.0},
        {"tau": 2.0, "covariance": "decayed"},
        {"tau": 0.0, "covariance": "query_weighted"},
        {"covariance": "weighted"},
        {"backbone_key": "normalised"},
        {"eps": -1e-6},
    ],
)
def test_options_are_checked(options):
    with pytest.raises((TypeError, ValueError), match=f"ccq: .*{next(iter(options))}"):
        pa.CCQ(pa.GLA(), **options)


@pytest.mark.parametrize("text", LAYERS)
def test_text_and_mechanism_are_inverse(text):
    layer = pa.parse(text)
    assert str(layer) == text
    assert pa.parse(str(layer)) == layer


@pytest.mark.parametrize("base", ["gated_delta", "ssd"])
def test_a_decayed_covariance_wants_one_gate_for_each_query_head(base):
    p = Problem(np.random.default_rng(0), t=4, n=2, values=2)
    running = pa.parse(f"ccq({base})")
    x = p.x(running)
    assert x["v"].shape[2] == 2 * x["q"].shape[2]
    running(**x)
    decayed = pa.parse(f"ccq[covariance=decayed]({base})")
    for call in (decayed, decayed.vjp):
        with pytest.raises(pa.ShapeError, match=r"decayed.*: (v|g|beta) is declared"):
            call(**x)


@pytest.mark.parametrize("wrong", [(2, 4), (2, 5, 4), (2, 4, 2), (2, 4, 4, 1), (1, 4, 4), ()])
def test_a_contraction_of_another_shape_is_named(wrong):
    p = Problem(np.random.default_rng(0), t=4, n=2, group=2)
    for layer in ("ccq(gla)", "ccq[covariance=query_weighted](linear)"):
        layer = pa.parse(layer)
        with pytest.raises(pa.ShapeError, match="contraction"):
            layer(**p.x(layer, contraction=np.ones(wrong)))


def test_a_contraction_has_to_be_given():
    p = Problem(np.random.default_rng(0), t=4)
    layer = pa.parse("ccq(gla)")
    x = p.x(layer)
    del x["contraction"]
    with pytest.raises(TypeError, match="missing contraction"):
        layer(**x)


# The gate


def gate(q, weight, bias, eps=1e-6):
    return torch.sigmoid(torch.einsum("bthd,hd->bth", unit(q, eps), weight) + bias)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
@sampled
@given(p=problems())
def test_the_gate_is_the_logistic_of_a_linear_map(eps, p):
    layer = pa.ContractionGate(eps=eps)
    x = p.x(layer)

    def by(_, x):
        return gate(**x, eps=eps)

    assert_output_and_gradients(layer, p, x, by)
    out = pa.contraction_gate(**x, eps=eps)
    np.testing.assert_array_equal(out, layer(**x))
    assert np.all((out > 0) & (out < 1))


def test_gradients_of_the_gate_are_those_of_central_differences():
    p, step = Problem(np.random.default_rng(0), t=3, n=2, d=3), 1e-6
    x = p.x(pa.ContractionGate())
    out, pullback = pa.ContractionGate().vjp(**x)
    cotangent = p.like(out)
    for name, gradient in pullback(cotangent).items():
        direction = p.like(x[name])
        ends = [
            np.sum(cotangent * pa.contraction_gate(**(x | {name: x[name] + side * direction})))
            for side in (step, -step)
        ]
        assert abs(np.sum(gradient * direction) - (ends[0] - ends[1]) / (2 * step)) <= 1e-8


def test_the_gate_starts_at_a_tenth():
    x = Problem(np.random.default_rng(0), t=3, n=2).x(pa.ContractionGate())
    out = pa.contraction_gate(x["q"], weight=0 * x["weight"], bias=np.full(2, np.log(0.1 / 0.9)))
    assert out.shape == x["q"].shape[:3]
    assert_close(out, np.full(out.shape, 0.1))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_gate_far_out_is_1_or_0_and_its_gradients_are_finite(sign):
    x = Problem(np.random.default_rng(0), t=3, n=2).x(pa.ContractionGate())
    out, pullback = pa.ContractionGate().vjp(**(x | {"bias": np.full(2, sign * 1e4)}))
    assert_close(out, np.full(out.shape, (1 + sign) / 2), size=1)
    assert all(np.all(np.isfinite(gradient)) for gradient in pullback(0 * out + 1).values())


def test_a_query_and_its_gate_together():
    """A gate of the query's direction, and then CCQ: both paths into q."""
    p = Problem(np.random.default_rng(0), t=6, n=2, group=2)
    layer, of_gate = pa.parse("ccq(gated_delta)"), pa.ContractionGate()
    x, own = p.x(layer), p.x(of_gate)
    own["q"] = x["q"]
    lam, gate_pullback = of_gate.vjp(**own)
    out, pullback = layer.vjp(**(x | {"contraction": lam}))
    cotangent = p.like(out)
    gradients = pullback(cotangent)
    of_the_gate = gate_pullback(gradients["contraction"])
    leaves, weights = in_torch(x, requires_grad=True), in_torch(own, requires_grad=True)
    through = gate(leaves["q"], weights["weight"], weights["bias"])
    expected = naive(layer, leaves | {"contraction": through})
    wanted = torch.autograd.grad(
        torch.sum(expected * torch.tensor(cotangent)),
        [leaves["q"], weights["weight"], weights["bias"]],
    )
    found = gradients["q"] + of_the_gate["q"], of_the_gate["weight"], of_the_gate["bias"]
    for actual, gradient in zip(found, wanted, strict=True):
        assert_is(actual, gradient)
