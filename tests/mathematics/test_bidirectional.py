"""Bidirectional recurrences: one step of a token from the sum of two states."""

import numpy as np
import pytest

import precondattn as pa
from precondattn.frame import full_frame
from precondattn.spec.own_token import AFFINE
from precondattn.spec.stateful import Stateful

BASES = [*AFFINE, "comba[erases=decayed]", "gla[scale=0.3]"]
SIZES = {"b": 2, "t": 7, "s": 7, "n": 2, "h": 4, "u": 8, "d": 4, "e": 3}


def inputs_of(base, seed=0):
    rng, inputs = np.random.default_rng(seed), {}
    for name, pattern in base.inputs.items():
        x = rng.normal(size=pattern.shape(SIZES))
        if pattern.unit:
            x /= np.linalg.norm(x, axis=-1, keepdims=True)
        if pattern.low is not None:
            x = -np.abs(x) if pattern.high == 0 else rng.uniform(size=x.shape)
        inputs[name] = x
    return inputs


def of_tokens(base, inputs, tokens, rows=slice(None)):
    """Some tokens of some sequences, of the inputs that have tokens."""
    has_tokens = {name: pattern.time_axis is not None for name, pattern in base.inputs.items()}
    return {n: x[rows][:, tokens] if has_tokens[n] else x for n, x in inputs.items()}


def steps_from_summed_states(base: Stateful, inputs):
    """The definition: two passes for the states, and one step from their sum for each token."""
    t, out = SIZES["t"], []
    zero = base.zero_state(inputs)

    def state_after(tokens):
        if not len(tokens):
            return zero
        x = of_tokens(base, inputs, list(tokens))
        return base.run(zero, x, full_frame(len(tokens), len(tokens), x["q"]))[1]

    for i in range(t):
        before, after = state_after(range(i)), state_after(range(t - 1, i, -1))
        both = {"state": before["state"] + after["state"]}
        x = of_tokens(base, inputs, [i])
        out.append(base.run(both, x, full_frame(1, 1, x["q"]))[0])
    return np.concatenate(out, axis=1)


@pytest.mark.parametrize("backend", ["reference", "portable"])
@pytest.mark.parametrize("name", BASES)
def test_a_token_is_one_step_from_the_sum_of_both_states(name, backend):
    base = pa.parse(name)
    inputs = inputs_of(base)
    out = pa.Bidirectional(base)(**inputs, backend=backend)
    np.testing.assert_allclose(out, steps_from_summed_states(base, inputs), atol=1e-12)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_a_masked_key_is_masked_in_the_gradient_of_autograd_too(library):
    pytest.importorskip(library)
    base = pa.parse("retention")
    attn, inputs = pa.Bidirectional(base), inputs_of(base)
    seen = np.asarray([[True, False, True, True, False, True, True]] * 2)
    out, pullback = attn.vjp(**inputs, key_mask=seen)
    expected = pullback(np.ones_like(out))
    if library == "torch":
        import torch

        x = {name: torch.tensor(a, requires_grad=True) for name, a in inputs.items()}
        attn(**x, key_mask=torch.tensor(seen)).sum().backward()
        gradients = {name: a.grad.numpy() for name, a in x.items()}
    else:
        import jax

        with jax.enable_x64(True):
            x = {name: jax.numpy.asarray(a) for name, a in inputs.items()}
            masked = jax.numpy.asarray(seen)
            gradients = jax.grad(lambda x: attn(**x, key_mask=masked).sum())(x)
    for name, gradient in expected.items():
        np.testing.assert_allclose(np.asarray(gradients[name]), gradient, atol=1e-12)


def test_retention_in_both_directions_decays_by_distance():
    base = pa.Retention()
    inputs = inputs_of(base)
    one = pa.Bidirectional(base)(**of_tokens(base, inputs, slice(None), slice(1)))
    ones = base(**{n: np.ones_like(x[:1, :2]) for n, x in inputs.items()})
    gamma = ones[0, 1, :, 0] / ones[0, 0, :, 0] - 1
    distance = np.abs(np.arange(7)[:, None] - np.arange(7))
    k, v = (np.repeat(inputs[name][0], 2, axis=1) for name in "kv")
    scores = np.einsum("thd,shd->hts", inputs["q"][0], k) / 2
    expected = np.einsum("hts,she->the", scores * gamma[:, None, None] ** distance, v)
    np.testing.assert_allclose(one[0], expected, atol=1e-12)
