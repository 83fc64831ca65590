"""PaTH, and LUCID over it, against their definitions and the consequences.

With H_t = I − β_t w_t w_tᵀ the scores are A_ij = q_iᵀ H_i H_{i−1} … H_{j+1} k_j, written here as
products of matrices, pair by pair. LUCID over PaTH solves with Φ_ij = exp(s A_ij − s d), whose A is
that of the normalised keys with themselves and the same reflections.
Unless a test says so everything is float64, and has to hold to 1e-10 of the largest number it
speaks of. Gradients are those of the loops by complex steps, f(x + iε)/ε, which round nothing off.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import precondattn as pa
from tests.mathematics.identities import identity_values
from tests.mathematics.path_definition import (
    BETAS,
    DIRECTIONS,
    KEYS,
    UNIT,
    PathProblem,
    assert_close,
    assert_gradients,
    at,
    path_by_loops,
    problems,
    reflection,
    sampled,
    scores_of_all_heads,
)


def scores_of(q, k, w, beta):
    """A (b, h, t, s) as the library computes it.

    A zero key with score 0 comes first: a key's weight divided by that of the zero key is e^A.
    """

    def after_a_zero(x):
        return np.concatenate([np.zeros_like(x[:, :1]), x], axis=1)

    k, w, beta = (after_a_zero(x) for x in (k, w, beta))
    weights = pa.Path(scale=1.0)(q, k, identity_values(k), w=w, beta=beta).transpose(0, 2, 1, 3)
    scores = np.zeros_like(weights)
    np.log(weights / weights[..., :1], out=scores, where=weights > 0)
    return scores[..., 1:]


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
    p = PathProblem(np.random.default_rng(0), keys, directions, betas, s=7, n=2, group=2)
    assert_close(pa.Path()(**p.inputs), path_by_loops(**p.inputs))


@pytest.mark.parametrize("layer", ["path", "path[forget=scaled]", "lucid(path)"])
@sampled
@given(p=problems(), count=st.integers(1, 8), first=st.integers(0, 8))
def test_the_last_queries_alone_have_the_same_masks(layer, p, count, first):
    inputs, t = p.gated if "forget" in layer else p.inputs, p.k.shape[1]
    layer, segments = pa.parse(layer), np.tile(np.arange(t) >= first, (2, 1)).astype(int)
    is_visible = p.rng.random((2, t)) < 0.7
    for masks in ({"key_mask": is_visible}, {"segment_ids": segments}):
        out = layer(**inputs, **masks)
        last = layer(**inputs | {"q": p.q[:, -count:]}, **masks)
        assert_close(last, out[:, -count:], size=1 + np.abs(out).max())


def test_a_bias_is_added_to_the_scaled_logits():
    p = PathProblem(np.random.default_rng(0), s=6, t=4, group=2)
    bias = p.rng.normal(size=(2, 2, 4, 6))
    out = pa.Path(bias=True)(**p.inputs, bias=bias)
    assert_close(out, path_by_loops(**p.inputs, bias=bias))


@sampled
@given(p=problems(square=False), g=st.booleans(), window=st.integers(1, 9))
def test_a_window_masks_keys_and_changes_no_score(p, g, window):
    inputs = p.gated if g else p.inputs
    layer = pa.Path(window=window, forget="unscaled" if g else "none")
    out = layer(**inputs)
    assert_close(out, path_by_loops(**inputs, window=window), size=np.abs(p.v).max())


@pytest.mark.parametrize("zero_input", ["w", "beta"])
@sampled
@given(p=problems(square=False))
def test_without_reflections_path_is_softmax(zero_input, p):
    named = {"w": p.w, "beta": p.beta} | {zero_input: 0 * getattr(p, zero_input)}
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
def test_the_reflection_of_the_first_token_has_no_effect(layer, p):
    out = pa.parse(layer)(**p.inputs)
    changed = {name: getattr(p, name).copy() for name in ("w", "beta")}
    changed["w"][:, 0], changed["beta"][:, 0] = 5.0, 1.7
    assert_close(pa.parse(layer)(**p.inputs | changed), out, size=1 + np.abs(out).max())


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


def assert_past_is_unchanged(layer, now, moved, past):
    """All inputs of the future may change, or any one of them."""
    later = np.arange(now["k"].shape[1]) >= past
    moved = {
        name: np.where(later.reshape(-1, *[1] * (x.ndim - 2)), moved[name], x)
        for name, x in now.items()
    }
    before = layer(**now)[:, :past]
    for changed in (moved, *({name: moved[name]} for name in now)):
        np.testing.assert_array_equal(layer(**now | changed)[:, :past], before)


@pytest.mark.parametrize("layer", ["path", "path[forget=unscaled]"])
@sampled
@given(p=problems(), past=st.integers(1, 8))
def test_enormous_reflections_of_the_future_change_no_bit_of_past_outputs(layer, p, past):
    now = p.gated if "forget" in layer else p.inputs
    moved = {name: 1e3 * x - 0.5 for name, x in p.gated.items()}
    assert_past_is_unchanged(pa.parse(layer), now, moved, past)


@pytest.mark.parametrize("betas", BETAS)
@pytest.mark.parametrize("directions", DIRECTIONS)
def test_gradient_is_that_of_the_definition(directions, betas):
    p = PathProblem(np.random.default_rng(0), "random", directions, betas, s=4, t=3, group=2, d=2)
    assert_gradients(pa.Path(), path_by_loops, p.inputs)


@pytest.mark.parametrize("keys", KEYS)
def test_gradient_is_that_of_the_definition_for_keys_of_every_kind(keys):
    p = PathProblem(np.random.default_rng(1), keys, "unit", "mixed", s=5, n=2, group=2, d=3, b=1)
    assert_gradients(
        pa.Path(window=3, scale=0.7), lambda **x: path_by_loops(**x, window=3, scale=0.7), p.inputs
    )


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("forget", ["unscaled", "scaled"])
def test_gradient_with_a_forget_gate_is_that_of_the_definition(forget, t):
    p = PathProblem(np.random.default_rng(0), s=4, t=t, group=2, d=2)
    layer = pa.Path(forget=forget)
    assert_gradients(layer, lambda **x: path_by_loops(**x, forget=forget), p.gated)
    extreme = p.gated | {"g": p.rng.choice([-1e4, 0.0], size=p.g.shape)}
    assert_gradients(layer, lambda **x: path_by_loops(**x, forget=forget), extreme)


def test_gradient_at_beta_of_zero_agrees_with_finite_differences():
    p = PathProblem(np.random.default_rng(0), betas="zeros", s=5, group=2)
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
