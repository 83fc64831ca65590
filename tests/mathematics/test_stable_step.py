"""Stable steps against the solve and the matrix exponential that define them, token by token.

implicit: S = argmin ½ ‖S − S'‖² + ½ β ‖Sᵀ k − v‖², exact: S(1) of dS/dt = k (β v − Sᵀ β k)ᵀ with
S(0) = S'. With strengths b and w of channels: dS/dt = k (w ∘ v − Sᵀ (b ∘ k))ᵀ, and its implicit
step S = S' + k (w ∘ v − Sᵀ (b ∘ k))ᵀ.
"""

import numpy as np
import pytest

import precondattn as pa
from tests.mathematics.definitions import assert_is_defined, close

torch = pytest.importorskip("torch")
RULES = ("implicit", "exact")
BASES = ("delta", "gated_delta", "kda", "gdn2")


def problem(base, scale=1.0, s=6):
    """Inputs of two heads of keys and four of values; keys are not normalised."""
    rng = np.random.default_rng(0)
    b, h, u, d, e = 2, 2, 4, 5, 3
    x = {"q": rng.normal(size=(b, s, h, d)), "k": scale * rng.normal(size=(b, s, h, d))}
    x |= {"v": rng.normal(size=(b, s, u, e))}
    if base != "delta":
        axes = (b, s, u) if base == "gated_delta" else (b, s, u, d)
        x["g"] = -rng.uniform(size=axes)
    if base == "gdn2":
        x |= {"b": rng.exponential(size=(b, s, u, d)), "w": rng.exponential(size=(b, s, u, e))}
    else:
        x["beta"] = rng.exponential(size=(b, s, u))
    return x


def flow(state, k, erase, written, rule):
    """The state after dS/dt = k writtenᵀ − k eraseᵀ S, over t = 1."""
    matrix, source = np.outer(k, erase), np.outer(k, written)
    if rule == "implicit":
        return np.linalg.solve(np.eye(len(k)) + matrix, state + source)
    joined = np.block([[-matrix, source], [np.zeros((len(written), len(k) + len(written)))]])
    e = torch.linalg.matrix_exp(torch.from_numpy(joined)).numpy()
    return e[: len(k), : len(k)] @ state + e[: len(k), len(k) :]


def definition(x, rule):
    (b, s, u, e), d = x["v"].shape, x["k"].shape[3]
    q, k = (np.repeat(x[name], u // x[name].shape[2], axis=2) for name in "qk")
    out = np.zeros(x["v"].shape)
    for i in range(b):
        for head in range(u):
            state = np.zeros((d, e))
            for t in range(s):
                at = i, t, head
                if "g" in x:
                    state = np.exp(x["g"][at].reshape(-1, 1)) * state
                erase, write = (x["b"][at], x["w"][at]) if "b" in x else 2 * (x["beta"][at],)
                state = flow(state, k[at], erase * k[at], write * x["v"][at], rule)
                out[at] = d**-0.5 * state.T @ q[at]
    return out


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("base", BASES)
def test_a_step_is_the_solve_or_the_matrix_exponential_that_defines_it(base, rule):
    m, x = pa.parse(f"stable_step[rule={rule}]({base})"), problem(base)
    close(m(**x), definition(x, rule))
    for scale in (1e-3, 0.3, 1.0):
        assert_is_defined(m, problem(base, scale))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("of", ["beta", "b", "w"])
def test_keys_of_zero_and_keys_whose_square_overflows_have_finite_steps(of, rule):
    """A strength of 0 stays 0, and a key of 0 leaves its strength as it is."""
    k = np.asarray([0.0, 1e-30, 1e3, 1e19, 1e30, 3e38], np.float32)[:, None, None] * np.ones(4)
    k = k[None].astype(np.float32)
    for strength in (0.0, 1.0, 1e15):
        x = {"k": k, "beta": np.full((1, 6, 2), strength, np.float32)}
        leaf = pa.StableBeta(rule=rule)
        if of != "beta":
            leaf = pa.StableChannels(rule=rule, of=of)
            wide = np.full((1, 6, 2, 4), strength, np.float32)
            x = {"k": k, "b": wide} | ({"w": np.ones_like(wide)} if of == "w" else {})
        with np.errstate(over="ignore", under="ignore"):
            out, pullback = leaf.vjp(**x)
            gradients = pullback(np.ones_like(out))
        assert np.all(np.isfinite(out))
        assert np.all(out[0, 0] == x[of][0, 0])
        # The derivative by b = 0 is −k², which may overflow.
        assert not any(np.any(np.isnan(gradient)) for gradient in gradients.values())


def test_the_slope_of_the_exact_factor_is_accurate_for_any_argument():
    """Against the integral φ'(c) = −∫₀¹ τ e^{−cτ} dτ, by Gauss–Legendre nodes."""
    c = np.geomspace(1e-12, 60, 400)
    node, weight = np.polynomial.legendre.leggauss(60)
    node, weight = (node + 1) / 2, weight / 2
    expected = -np.sum(weight * node * np.exp(-c[:, None] * node), axis=1)
    found = pa.spec.stable_strength._slope("exact", c)
    np.testing.assert_allclose(found, expected, rtol=1e-14)
