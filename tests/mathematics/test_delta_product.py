"""DeltaProduct is the gated delta rule on all steps of all tokens, and a product of matrices."""

import numpy as np
import pytest

pytest.importorskip("torch")

import precondattn as pa
from tests.mathematics.linear_definitions import LinearProblem, close, unit


def problem(steps, *, s=6, t=None, group=2, multiple=2):
    p = LinearProblem(np.random.default_rng(0), s=s, t=t, group=group, multiple=multiple)
    x = {"q": p.rng.normal(size=p.shape("b t h d"))}
    lead = [*p.shape("b s"), steps]
    x["k"] = unit(p.rng.normal(size=[*lead, *p.shape("h d")]))
    x["v"] = p.rng.normal(size=[*lead, *p.shape("u e")])
    x["g"] = -(p.rng.normal(size=p.shape("b s u")) ** 2)
    x["beta"] = p.rng.uniform(0, 2, size=[*lead, *p.shape("u")])
    return p, x


def as_gated_delta(x, steps):
    """The inputs of the gated delta rule on s · n tokens: gates first, and queries last."""

    def flat(a):
        return a.reshape(a.shape[0], -1, *a.shape[3:])

    g, q = (np.zeros([*x[n].shape[:2], steps, *x[n].shape[2:]]) for n in "gq")
    g[:, :, 0], q[:, :, -1] = x["g"], x["q"]
    return {"q": flat(q), "g": flat(g), **{n: flat(x[n]) for n in ("k", "v", "beta")}}


@pytest.mark.parametrize("t", [6, 2])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_it_is_the_gated_delta_rule_on_all_steps(steps, t):
    p, x = problem(steps, t=t)
    layer = pa.DeltaProduct(steps=steps)
    out, pullback = layer.vjp(**x)
    rows, rows_pullback = pa.GatedDelta().vjp(**as_gated_delta(x, steps))
    close(out, rows[:, steps - 1 :: steps])
    d_out = p.like(out)
    d_rows = np.zeros_like(rows)
    d_rows[:, steps - 1 :: steps] = d_out
    expected = rows_pullback(d_rows)
    expected["g"], expected["q"] = expected["g"][:, ::steps], expected["q"][:, steps - 1 :: steps]
    close(pullback(d_out), {n: a.reshape(x[n].shape) for n, a in expected.items()})


def test_it_is_a_product_of_dense_matrices():
    """S_t = Π (I − β k kᵀ) e^g S_{t−1} + what the steps write, for one head."""
    _, x = problem(2, group=1, multiple=1)
    out = pa.DeltaProduct()(**x)
    for b in range(2):
        state = np.zeros((3, 2))
        for t in range(6):
            state = np.exp(x["g"][b, t, 0]) * state
            for j in range(2):
                k, beta = x["k"][b, t, j, 0], x["beta"][b, t, j, 0]
                state = (np.eye(3) - beta * np.outer(k, k)) @ state
                state = state + beta * np.outer(k, x["v"][b, t, j, 0])
            close(out[b, t, 0], 3**-0.5 * state.T @ x["q"][b, t, 0])


def test_an_extension_token_by_token_is_the_full_call():
    _, x = problem(3)
    layer = pa.DeltaProduct(steps=3)
    cache, outs = layer.init_cache(**x), []
    for t in range(6):
        out, cache = layer.extend(cache, **{n: a[:, t : t + 1] for n, a in x.items()})
        outs.append(out)
    close(np.concatenate(outs, axis=1), layer(**x))


def test_two_reflections_rotate_the_state():
    """A swap of two coordinates and a sign: one step has no such eigenvalues."""
    k = np.asarray([[1.0, -1.0], [1.0, 0.0]]) / np.asarray([[2**0.5], [1.0]])
    x = {"k": k.reshape(1, 1, 2, 1, 2), "v": np.zeros((1, 1, 2, 1, 2)), "g": np.zeros((1, 1, 1))}
    x |= {"q": np.zeros((1, 1, 1, 2)), "beta": np.full((1, 1, 2, 1), 2.0)}
    layer = pa.DeltaProduct()
    cache = layer.init_cache(**x)
    (name,) = cache.store
    _, last = layer.extend(cache._replace(store={name: np.eye(2).reshape(1, 1, 2, 2)}), **x)
    rotation = last.store[name][0, 0]
    assert np.allclose(rotation @ rotation, -np.eye(2))


@pytest.mark.parametrize("text", ["qk_norm[norm=l2]", "hedgehog", "ccq"])
def test_preconditioners_of_one_key_are_refused(text):
    with pytest.raises(TypeError, match="several keys"):
        pa.parse(f"{text}(delta_product)")


def test_another_number_of_steps_is_refused():
    _, x = problem(3)
    with pytest.raises(ValueError, match=r"k is declared \(b s 2 h d\)"):
        pa.DeltaProduct()(**x)
