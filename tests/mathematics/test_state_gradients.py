"""Continued states and masks: outputs, last states and gradients through initial and last states,
against the definition, token by token, and PyTorch's gradients of it."""

from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

import precondattn as pa
from tests.mathematics.linear_definitions import (
    LAYERS,
    LinearProblem,
    alone,
    close,
    close_to_definition,
    definition,
    expected_vjp,
    of_tokens,
    problems,
    sampled,
    tensors,
    timed,
)

FORMS = [
    "linear[normalize=true]",  # Two states, of which one normalises.
    "ssd",  # A decay for each head.
    "gla",  # A decay for each channel.
    "rwkv6",  # A read of the state before the token.
    "gsa",  # Two states, one after the other.
    "mlstm[eps=0.1]",  # A state relative to a running maximum, which eps depends on.
    "gated_delta",  # The delta rule with a decay for each head.
    "gdn2",  # The delta rule with strengths and a decay for each channel.
    "dplr",  # Any diagonal plus low rank.
    "hedgehog[factor=2,per=head](gated_delta)",  # Features, whose weights have no tokens.
]
"""The forms of the recurrence, for splits, masks and pullbacks, which all of `LAYERS` share."""

# States


@pytest.mark.parametrize("layer", LAYERS)
@sampled
@given(p=problems())
def test_states_and_their_gradients_are_those_of_the_definition(layer, p):
    layer = pa.parse(layer)
    x = p.x(layer)
    close_to_definition(layer, p, x, p.states(layer.init_cache(**x)))


@pytest.mark.parametrize("layer", FORMS)
def test_states_after_a_long_sequence_are_those_of_the_definition(layer):
    layer = pa.parse(layer)
    p = LinearProblem(np.random.default_rng(0), s=131, n=1, group=2, multiple=2, d=5, e=3)
    x = p.x(layer)
    close_to_definition(layer, p, x, p.states(layer.init_cache(**x)))


@pytest.mark.parametrize("layer", FORMS)
@sampled
@given(p=problems(), data=st.data())
def test_any_split_gives_the_outputs_and_the_state_of_the_full_call(layer, p, data):
    layer, s = pa.parse(layer), p.sizes["s"]
    x = p.x(layer)
    empty = layer.init_cache(**x)
    before = {name: array.copy() for name, array in empty.store.items()}
    assert all(np.all((array == 0) | (array == -np.inf)) for array in before.values())
    full, last = layer.extend(empty, **x)
    close(full, layer(**x))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, s - 1)), max_size=4)) | {0, s})
    cache, outs = empty, []
    for start, stop in pairwise(cuts):
        out, cache = layer.extend(cache, **of_tokens(x, slice(start, stop)))
        outs.append(out)
    close(np.concatenate(outs, axis=1), full)
    close(cache.store, last.store)
    assert list(cache.length) == list(last.length) == [s, s]
    np.testing.assert_equal(empty.store, before)


@pytest.mark.parametrize("layer", FORMS)
@sampled
@given(p=problems(longest=6), past=st.integers(1, 5))
def test_chained_pullbacks_equal_the_pullback_of_the_full_call(layer, p, past):
    layer, x = pa.parse(layer), p.x(pa.parse(layer))
    first = layer.init_cache(**x)
    first = first._replace(store=p.states(first))
    out, last, pullback = layer.extend_vjp(first, **x)
    d_out, d_last = p.like(out), {name: p.like(array) for name, array in last.store.items()}
    cuts = sorted({0, min(past, p.sizes["s"]), p.sizes["s"]})
    times = [slice(*both) for both in pairwise(cuts)]
    outs, pullbacks, cache = [], [], first
    for chosen in times:
        piece, cache, back = layer.extend_vjp(cache, **of_tokens(x, chosen))
        outs.append(piece)
        pullbacks.append(back)
    close(np.concatenate(outs, axis=1), out)
    close(cache.store, last.store)
    result, d_state = [], d_last
    for chosen, back in zip(reversed(times), reversed(pullbacks), strict=True):
        gradients, d_state = back(d_out[:, chosen], d_state)
        result.insert(0, gradients)
    expected, d_first = pullback(d_out, d_last)
    close(d_state, d_first)
    for name, gradient in expected.items():
        pieces = [gradients[name] for gradients in result]
        close(np.concatenate(pieces, axis=1) if timed(name) else sum(pieces), gradient)


@pytest.mark.parametrize("layer", FORMS)
def test_a_missing_cotangent_of_the_state_means_zero(layer):
    layer, p = pa.parse(layer), LinearProblem(np.random.default_rng(0), s=5, group=2, multiple=2)
    x = p.x(layer)
    out, last, pullback = layer.extend_vjp(layer.init_cache(**x), **x)
    d_out = p.like(out)
    gradients, d_first = pullback(d_out)
    zero = {name: np.zeros_like(array) for name, array in last.store.items()}
    for result, expected in zip((gradients, d_first), pullback(d_out, zero), strict=True):
        close(result, expected)
    close(gradients, layer.vjp(**x)[1](d_out))


@pytest.mark.parametrize("layer", FORMS)
def test_torch_differentiates_extend(layer):
    layer, p = (
        pa.parse(layer),
        LinearProblem(np.random.default_rng(1), s=5, n=2, group=2, multiple=2),
    )
    x = p.x(layer)
    states = p.states(layer.init_cache(**x))
    inputs, first = tensors(x, grad=True), tensors(states, grad=True)
    cache = layer.init_cache(**inputs)._replace(store=first)
    outs = []
    for chosen in (slice(0, 2), slice(2, 5)):
        out, cache = layer.extend(cache, **of_tokens(inputs, chosen))
        outs.append(out)
    out = torch.cat(outs, dim=1)
    d_out = p.like(out)
    d_last = {name: p.like(array) for name, array in states.items()}
    total = (out * torch.tensor(d_out)).sum()
    for name, cotangent in d_last.items():
        total = total + (cache.store[name] * torch.tensor(cotangent)).sum()
    leaves = {**inputs, **first}
    result = torch.autograd.grad(total, list(leaves.values()))
    result = {name: g.numpy() for name, g in zip(leaves, result, strict=True)}
    expected, last, gradients, d_first = expected_vjp(layer, x, d_out, states, d_last)
    close(out.detach().numpy(), expected)
    for array, state in zip(cache.store.values(), last, strict=True):
        close(array.detach().numpy(), state)
    close(result, {**gradients, **d_first})


@pytest.mark.parametrize(
    ("layer", "silent", "decay"),
    [
        ("linear", "v", lambda x: 1),
        ("retention", "k", lambda x: (1 - 2.0 ** -np.arange(5, 5 + x["q"].shape[2])) ** 6),
        ("ssd", "v", lambda x: np.exp(x["g"].sum(1))),
        ("gla", "k", lambda x: np.exp(x["g"].sum(1))),
        ("rwkv6", "k", lambda x: np.exp(x["g"].sum(1))),
        ("delta", "beta", lambda x: 1),
        ("gated_delta", "beta", lambda x: np.exp(x["g"].sum(1))),
        ("gated_delta", "k", lambda x: np.exp(x["g"].sum(1))),
    ],
)
def test_a_token_that_writes_nothing_only_decays_the_state(layer, silent, decay):
    layer, p = (
        pa.parse(layer),
        LinearProblem(np.random.default_rng(0), s=6, n=2, group=2, multiple=2),
    )
    x = p.x(layer)
    x[silent] = 0 * x[silent]
    cache = layer.init_cache(**x)
    ((name, first),) = p.states(cache).items()
    _, cache = layer.extend(cache._replace(store={name: first}), **x)
    decay = np.asarray(decay(x))
    decay = decay[..., None] if decay.ndim == 3 else decay[..., None, None]
    close(cache.store[name], decay * first)


@pytest.mark.parametrize("text", ["softmax", "elu1", "lucid"])
def test_only_a_state_has_a_pullback(text):
    layer, p = pa.parse(text), LinearProblem(np.random.default_rng(0), s=3)
    x = p.x(pa.Linear())
    cache = layer.init_cache(**x, capacity=3)
    with pytest.raises(TypeError, match="extend_vjp"):
        layer.extend_vjp(cache, **x)


# Masks


@pytest.mark.parametrize("layer", FORMS)
@sampled
@given(p=problems(square=False), data=st.data())
def test_a_masked_token_does_not_change_the_state(layer, p, data):
    """It neither writes nor decays the state; its query reads the state of the tokens before it."""
    layer = pa.parse(layer)
    x, (b, s) = p.x(layer), p.shape("b s")
    is_written = data.draw(st.lists(st.booleans(), min_size=b * s, max_size=b * s))
    is_written = np.asarray(is_written).reshape(b, s)
    close_to_definition(layer, p, x, is_written=is_written, key_mask=is_written)
    if p.sizes["t"] == s:
        states = p.states(layer.init_cache(**x))
        close_to_definition(layer, p, x, states, is_written=is_written, key_mask=is_written)


@pytest.mark.parametrize("layer", FORMS)
def test_padding_changes_nothing_and_gets_no_gradient(layer):
    for counts in ((5, 0), (3, 6), (1, 4)):
        for extending in (False, True):
            check_padding(layer, counts, extending)


def check_padding(layer, counts, extending):
    layer, p = (
        pa.parse(layer),
        LinearProblem(np.random.default_rng(0), s=6, n=2, group=2, multiple=2),
    )
    x, padding = p.x(layer), np.arange(6) >= np.asarray(counts)[:, None]
    with_nan = {name: array.copy() for name, array in x.items()}
    for name in filter(timed, with_nan):
        with_nan[name][padding] = np.nan
    cache = layer.init_cache(**x)
    states = p.states(cache) if extending else cache.store
    cache, lengths = cache._replace(store=states), np.asarray(counts)
    d_last = {name: p.like(array) * extending for name, array in states.items()}
    if extending:
        out, last, pullback = layer.extend_vjp(cache, **with_nan, lengths=lengths)
        d_out = p.like(out)
        gradients, d_first = pullback(np.where(padding[..., None, None], np.nan, d_out), d_last)
        assert list(last.length) == list(counts)
    else:
        out, pullback = layer.vjp(**with_nan, lengths=lengths)
        d_out = p.like(out)
        gradients = pullback(np.where(padding[..., None, None], np.nan, d_out))
    assert np.all(out[padding] == 0)
    assert all(np.all(gradients[name][padding] == 0) for name in filter(timed, gradients))
    shared = {name: np.zeros_like(array) for name, array in x.items() if not timed(name)}
    for i, count in enumerate(counts):
        one = {name: array[i : i + 1] for name, array in states.items()}
        d_one = {name: array[i : i + 1] for name, array in d_last.items()}
        if count == 0 and extending:
            for name in states:
                np.testing.assert_array_equal(last.store[name][i : i + 1], one[name])
                np.testing.assert_array_equal(d_first[name][i : i + 1], d_one[name])
        if count == 0:
            continue
        expected, left, wanted, d_state = expected_vjp(
            layer, alone(x, i, slice(count)), d_out[i : i + 1, :count], one, d_one
        )
        close(out[i : i + 1, :count], expected)
        for name, gradient in wanted.items():
            if timed(name):
                close(gradients[name][i : i + 1, :count], gradient)
            else:
                shared[name] += gradient
        if extending:
            for name, state in zip(states, left, strict=True):
                close(last.store[name][i : i + 1], state)
                close(d_first[name][i : i + 1], d_state[name])
    close({name: gradients[name] for name in shared}, shared)


@pytest.mark.parametrize("layer", FORMS)
@sampled
@given(p=problems(square=False), data=st.data())
def test_packed_segments_equal_each_segment_alone(layer, p, data):
    layer, (b, s, t) = pa.parse(layer), p.shape("b s t")
    x = p.x(layer)
    drawn = st.lists(st.integers(0, 3), min_size=s, max_size=s).map(sorted)
    ids = 5 - np.asarray([data.draw(drawn) for _ in range(b)])
    out, pullback = layer.vjp(**x, segment_ids=ids)
    d_out = p.like(out)
    expected, total = np.zeros_like(out), {name: np.zeros_like(a) for name, a in x.items()}
    for row, segment in [(i, segment) for i in range(b) for segment in np.unique(ids[i])]:
        tokens = np.flatnonzero(ids[row] == segment)
        queries = tokens[tokens >= s - t] - (s - t)
        if len(queries) == 0:
            continue
        one = alone(x | {"q": x["k"]}, row, tokens) | {"q": x["q"][row : row + 1, queries]}
        result, _, wanted, _ = expected_vjp(layer, one, d_out[row : row + 1, queries])
        expected[row, queries] = result[0]
        for name, gradient in wanted.items():
            if timed(name):
                total[name][row, queries if name == "q" else tokens] = gradient[0]
            else:
                total[name] += gradient
    close(out, expected)
    close(pullback(d_out), total)


@pytest.mark.parametrize("layer", FORMS)
def test_a_ragged_batch_equals_each_sequence_alone(layer):
    layer, p = (
        pa.parse(layer),
        LinearProblem(np.random.default_rng(0), s=7, n=2, group=2, multiple=2),
    )
    x = p.x(layer)
    cache = layer.init_cache(**x)
    states, outs = p.states(cache), []
    cache = cache._replace(store=states)
    for chosen, counts in [(slice(0, 4), [4, 1]), (slice(4, 6), [2, 0]), (slice(6, 7), [0, 1])]:
        out, cache = layer.extend(cache, **of_tokens(x, chosen), lengths=counts)
        outs.append(out)
    assert list(cache.length) == [6, 2]
    out = np.concatenate(outs, axis=1)
    for i, kept in enumerate([[0, 1, 2, 3, 4, 5], [0, 6]]):
        first = {name: array[i : i + 1] for name, array in states.items()}
        expected, last = definition(layer, alone(x, i, kept), first)
        close(out[i : i + 1, kept], expected)
        assert np.all(np.delete(out[i], kept, axis=0) == 0)
        for array, state in zip(cache.store.values(), last, strict=True):
            close(array[i : i + 1], state)


# Refusals


def linear_cache():
    x = {name: np.ones((1, 2, 1, 2)) for name in "qkv"}
    return pa.Linear(), x, pa.Linear().init_cache(**x)


def test_the_pullback_accepts_a_cache_and_returns_the_order_of_its_buffers():
    layer = pa.parse("ccq(gated_delta)")
    p = LinearProblem(np.random.default_rng(0), s=4)
    x = p.x(pa.GatedDelta()) | {"contraction": np.full((2, 4, 1), 0.5)}
    cache = layer.init_cache(**x)
    out, last, pullback = layer.extend_vjp(cache, **x)
    by_dict, by_cache = pullback(out, dict(last.store)), pullback(out, last)
    assert list(by_cache[1]) == list(cache.store)
    for result, expected in zip(by_cache, by_dict, strict=True):
        close(result, expected)


@pytest.mark.parametrize("wrong", [np.ones(3), [1.0], "state"])
def test_cotangents_of_states_must_be_named(wrong):
    layer, x, cache = linear_cache()
    out, _, pullback = layer.extend_vjp(cache, **x)
    with pytest.raises(TypeError, match="cotangents of buffers must be a dict by buffer name"):
        pullback(out, wrong)


def test_an_unknown_state_and_a_state_of_the_wrong_shape_are_refused_by_name():
    layer, x, cache = linear_cache()
    out, _, pullback = layer.extend_vjp(cache, **x)
    with pytest.raises(ValueError, match=r"no buffer 'state'; it has linear.state\(k, v\)"):
        pullback(out, {"state": out})
    with pytest.raises(ValueError, match=r"cotangent of 'linear.state\(k, v\)' must have"):
        pullback(out, {"linear.state(k, v)": out})


def test_the_old_cache_is_not_donated_and_must_be_causal():
    layer, x, cache = linear_cache()
    with pytest.raises(TypeError, match="extend_vjp does not donate"):
        layer.extend_vjp(cache, **x, donate=True)
    with pytest.raises(ValueError, match="is not causal, so it can not have a cache"):
        pa.Softmax(causal=False).extend_vjp(cache, **x)


def test_a_sequence_with_a_length_out_of_range_stays_invalid_under_jit():
    jax = pytest.importorskip("jax")
    layer, x, _ = linear_cache()
    x = {name: jax.numpy.asarray(np.repeat(a, 2, axis=0)) for name, a in x.items()}
    step = jax.jit(lambda cache, lengths: layer.extend(cache, **x, lengths=lengths))
    out, cache = step(layer.init_cache(**x), jax.numpy.asarray([2, 9]))
    assert np.isnan(out[1]).all()
    assert cache.length[0] == 2
    assert cache.length[1] < 0
    out, cache = step(cache, jax.numpy.asarray([1, 1]))
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[0]).all()
