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


@pytest.mark.parametrize("name", BASES)
def test_it_is_two_plain_calls_less_one_of_each_token_alone(name):
    base = pa.parse(name)
    inputs = inputs_of(base)
    once = base(**inputs)
    back = base(**of_tokens(base, inputs, slice(None, None, -1)))[:, ::-1]
    own = base(**inputs, segment_ids=np.arange(7)[None].repeat(2, 0))
    np.testing.assert_allclose(pa.Bidirectional(base)(**inputs), once + back - own, atol=1e-12)
    halves = pa.Bidirectional(base, combine="concat")(**inputs)
    np.testing.assert_allclose(halves, np.concatenate([once, back - own], -1), atol=1e-12)


@pytest.mark.parametrize("combine", ["sum", "concat"])
@pytest.mark.parametrize("name", BASES)
def test_the_gradient_of_every_input_agrees_with_finite_differences(name, combine):
    base = pa.parse(name)
    attn, inputs = pa.Bidirectional(base, combine=combine), inputs_of(base)
    rng = np.random.default_rng(1)
    out, pullback = attn.vjp(**inputs, lengths=[7, 5])
    d_out = rng.normal(size=out.shape)
    gradients = pullback(d_out)
    assert list(gradients) == list(inputs)
    for x, array in inputs.items():
        along, step = rng.normal(size=array.shape), 1e-6
        ends = [attn(**{**inputs, x: array + h * along}, lengths=[7, 5]) for h in (step, -step)]
        expected = np.sum((ends[0] - ends[1]) * d_out) / (2 * step)
        np.testing.assert_allclose(np.sum(gradients[x] * along), expected, rtol=1e-6, err_msg=x)


@pytest.mark.parametrize("name", ["retention", "rwkv6", "gated_delta", "dplr"])
def test_each_ragged_or_packed_sequence_gives_what_it_gives_alone(name):
    base = pa.parse(name)
    attn, inputs = pa.Bidirectional(base), inputs_of(base)
    ragged = attn(**inputs, lengths=[5, 0])
    alone = attn(**of_tokens(base, inputs, slice(5), slice(1)))
    np.testing.assert_allclose(ragged[:1, :5], alone, atol=1e-12)
    assert not ragged[:1, 5:].any()
    assert not ragged[1:].any()
    ids = np.asarray([[0, 0, 0, 1, 1, 1, 1], [3, 1, 1, 1, 2, 2, 2]])
    packed = attn(**inputs, segment_ids=ids, lengths=[7, 6])
    for row, own in enumerate(ids):
        for segment in np.unique(own):
            tokens = [i for i in np.flatnonzero(own == segment) if i < (7, 6)[row]]
            alone = attn(**of_tokens(base, inputs, tokens, slice(row, row + 1)))
            np.testing.assert_allclose(packed[row, tokens], alone[0], atol=1e-12)


@pytest.mark.parametrize("masks", ["alone", "lengths", "segments"])
@pytest.mark.parametrize("name", BASES)
def test_a_masked_key_is_masked_in_both_directions(name, masks):
    base = pa.parse(name)
    attn, inputs = pa.Bidirectional(base), inputs_of(base)
    seen = np.random.default_rng(3).uniform(size=(2, 7)) < 0.6
    given, last = {}, (7, 7)
    if masks == "lengths":
        given, last = {"lengths": [7, 5]}, (7, 5)
    ids = np.zeros((2, 7), dtype=int)
    if masks == "segments":
        ids = np.asarray([[0, 0, 0, 1, 1, 1, 1], [3, 1, 1, 1, 2, 2, 2]])
        given = {"segment_ids": ids}
    out = attn(**inputs, key_mask=seen, **given)
    for row, end in enumerate(last):
        for segment in np.unique(ids[row, :end]):
            tokens = np.flatnonzero(ids[row, :end] == segment)

            def plain(order, row=row, **more):
                x = of_tokens(base, inputs, order, slice(row, row + 1))
                return base(**x, key_mask=seen[row : row + 1, order], **more)[0]

            own = plain(tokens, segment_ids=tokens[None])
            expected = plain(tokens) + plain(tokens[::-1])[::-1] - own
            np.testing.assert_allclose(out[row, tokens], expected, atol=1e-12)
        assert not out[row, end:].any()


@pytest.mark.parametrize("name", ["retention", "gated_delta", "dplr"])
def test_what_a_masked_token_holds_has_no_effect_and_no_gradient_but_its_query(name):
    base = pa.parse(name)
    attn, inputs = pa.Bidirectional(base), inputs_of(base)
    seen = np.asarray([[True, False, True, True, False, True, True]] * 2)
    out, pullback = attn.vjp(**inputs, key_mask=seen)
    rng = np.random.default_rng(1)
    d_out, moved = rng.normal(size=out.shape), {}
    gradients = pullback(d_out)
    for x, array in inputs.items():
        along = rng.normal(size=array.shape)
        if base.inputs[x].time_axis is not None and x != "q":
            assert not gradients[x][~seen].any(), x
            moved[x] = np.where(seen.reshape(2, 7, *[1] * (array.ndim - 2)), array, np.nan)
        ends = [attn(**{**inputs, x: array + h * along}, key_mask=seen) for h in (1e-6, -1e-6)]
        expected = np.sum((ends[0] - ends[1]) * d_out) / 2e-6
        np.testing.assert_allclose(np.sum(gradients[x] * along), expected, rtol=1e-6, err_msg=x)
    np.testing.assert_array_equal(attn(**{**inputs, **moved}, key_mask=seen), out)


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


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("bidirectional(gsa)", "no linear function of its state"),
        ("bidirectional(mlstm)", "no linear function of its state"),
        ("bidirectional(linear[normalize=true])", "is a quotient.*by that for values of 1"),
        ("bidirectional(delta_product)", "a token of the base has several keys and values"),
        ("bidirectional(lucid)", "its base is a recurrence"),
        ("bidirectional(softmax[causal=false])", "reads tokens on both sides already"),
        ("bidirectional(qk_norm[norm=l2](kda))", "write qk_norm.norm=l2..bidirectional.kda"),
        ("ccq(bidirectional)", "its covariance is that of the keys so far"),
        ("mesa(bidirectional)", "its regression is that of the keys so far"),
    ],
)
def test_compositions_without_a_meaning_are_refused_with_the_reason(expression, reason):
    with pytest.raises(TypeError, match=reason):
        pa.parse(expression)


def test_what_a_call_can_not_have_is_refused():
    q = np.ones((1, 4, 2, 4))
    attn = pa.Bidirectional()
    appended = "is not causal, so it can not have a cache: a token that is appended would change"
    with pytest.raises(ValueError, match=appended):
        attn.init_cache(q, q, q)
    cache = pa.Linear().init_cache(q, q, q)
    with pytest.raises(ValueError, match=appended):
        attn.extend(cache, q, q, q)
    with pytest.raises(ValueError, match="as many of both are expected; found t = 2 and s = 4"):
        attn(q[:, :2], q, q)
