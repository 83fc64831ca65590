"""CCQ's caches, states and masks: any split gives the full call's output and gradients."""

from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

import precondattn as pa
from tests.mathematics.ccq_definition import (
    LAYERS,
    PIECES,
    DeclaredProblem,
    assert_is,
    conditioned,
    conditioned_for,
    in_torch,
    key_for,
    problems,
    recurrence,
    sampled,
    unit,
)
from tests.mathematics.identities import assert_close, part


def test_the_cache_stores_sums_over_the_keys():
    p = DeclaredProblem(np.random.default_rng(0), t=6, n=2, group=2)
    for layer, decayed in [("ccq(gla)", "running"), ("ccq[covariance=decayed](gla)", "decayed")]:
        layer = pa.parse(layer)
        x = p.x(layer)
        _, cache = layer.extend(layer.init_cache(**x), **x)
        _, sums = conditioned(in_torch(x), decayed)
        result = [cache.store[name] for name in own_buffers(cache)]
        for buffer, expected in zip(result, sums, strict=True):
            assert_is(np.repeat(buffer, p.group, axis=1), expected)


def own_buffers(cache):
    """The names of Σ k̄k̄ᵀ, Σ k̄ and Σ 1."""
    return [
        next(name for name in cache.store if name.startswith(first))
        for first in ("second_moment", "first_moment", "count")
    ]


def extended(layer, x, cuts, **masks):
    """The concatenated outputs of the pieces between the cuts; masks are split likewise."""
    cache = layer.init_cache(**x, capacity=cuts[-1], **({"key_mask": True} if masks else {}))
    outs = []
    for start, stop in pairwise(cuts):
        selected = {name: mask[:, start:stop] for name, mask in masks.items()}
        out, cache = layer.extend(cache, **part(x, slice(start, stop)), **selected)
        outs.append(out)
    return np.concatenate(outs, axis=1), cache


@pytest.mark.parametrize("layer", [layer for layer in LAYERS if "window" not in layer])
@sampled
@given(p=problems(), data=st.data())
def test_a_masked_key_enters_no_statistics(layer, p, data):
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
    result, _ = extended(layer, x, cuts, key_mask=mask)
    assert_close(result, out, size=1 + np.abs(out).max())
    if shown.any():
        expected = layer(**part(x, shown))
        assert_close(out[:, shown], expected, size=1 + np.abs(expected).max())


@pytest.mark.parametrize(("piece", "options"), PIECES[:4], ids=str)
@sampled
@given(p=problems(kinds=["random"]), data=st.data())
def test_a_query_whose_own_key_is_masked_uses_the_keys_before_it(piece, options, p, data):
    t = p.sizes["t"]
    x = p.x(piece)
    shown = np.array([data.draw(st.booleans()) for _ in range(t)])
    out = piece(**x, key_mask=np.stack([shown, shown]))
    for i in range(t):
        query = {"q": x["q"][:, i : i + 1], "contraction": x["contraction"][:, i : i + 1]}
        if shown[: i + 1].any():
            visible = np.flatnonzero(shown[: i + 1])
            visible_inputs = {name: x[name][:, visible] for name in ("k", "g") if name in x}
            expected = conditioned(in_torch(query | visible_inputs), **options)[0]
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
    """Gradients of an extension with cotangents of all buffers equal those of the loop.

    A second moment is symmetric, so only the symmetric part of its gradient matters.
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
    selected = {name: leaves[name] for name in ("v", "g", "beta") if name in leaves}
    expected, state = recurrence(
        str(layer.base),
        q,
        key_for(layer, leaves["k"]),
        **selected,
        state=for_each(state_name, heads),
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
        result = d_old[name] if name in old else gradients[name]
        if name == names[0]:
            result, gradient = (a + a.swapaxes(-1, -2) for a in (result, gradient))
        assert_is(result, gradient)


@pytest.mark.parametrize("layer", STATES)
def test_chained_pullbacks_of_pieces_give_the_gradient_of_the_full_call(layer):
    p = DeclaredProblem(np.random.default_rng(0), t=9, n=2, group=2)
    layer = pa.parse(layer)
    x = p.x(layer)
    out, full_pullback = layer.vjp(**x)
    cotangent = p.like(out)
    expected, cuts = full_pullback(cotangent), (0, 1, 4, 9)
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
def test_masked_tokens_have_no_effect_on_gradients_through_states(layer, masks):
    p = DeclaredProblem(np.random.default_rng(0), t=6, n=2, group=2)
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
        selected = {name: array[one, kept] for name, array in new.items()}
        expected, grown, pull = layer.extend_vjp(alone, **selected)
        wanted, d_alone = pull(cotangent[one, kept], {n: a[one] for n, a in d_store.items()})
        pairs = [(out[one, kept], expected)]
        pairs += [(longer.store[name][one], buffer) for name, buffer in grown.store.items()]
        pairs += [(gradients[name][one, kept], gradient) for name, gradient in wanted.items()]
        pairs += [(d_old[name][one], gradient) for name, gradient in d_alone.items()]
        for result, alike in pairs:
            assert_close(result, alike, size=1 + np.abs(alike).max())
