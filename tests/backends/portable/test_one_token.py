"""One token of a recurrence is computed by its definition, not in chunks."""

from dataclasses import dataclass

import array_api_strict
import numpy as np
import pytest
import torch

import precondattn as pa
from precondattn.arrays import library_of
from precondattn.cache import Cache
from precondattn.spec.recurrence import Stream, recurrent
from precondattn_conformance.inputs import CallLayout, make_inputs, slice_tokens
from precondattn_portable.arithmetic import IN_PLACE, STANDARD
from precondattn_portable.chunkwise import Chunkwise
from precondattn_portable.one_token import OneToken
from precondattn_torch.arithmetic import TORCH

ARITHMETIC = {"numpy": IN_PLACE, "array_api_strict": STANDARD, "torch": TORCH}
LIBRARIES = {
    "numpy": np.asarray,
    "array_api_strict": array_api_strict.asarray,
    "torch": torch.as_tensor,
}
DECAYS = {"none": (1, 1), "head": (1, 1), "key": (4, 1), "value": (1, 3)}
MECHANISMS = ("linear", "linear[normalize=true]", "retention", "ssd", "gla", "delta", "gated_delta")
MECHANISMS += ("kda", "rwkv6")


def some_stream(rng, decay, is_delta, queries=2):
    b, m, d, e = 2, 3, 4, 3
    g = -np.abs(rng.normal(size=(b, m, 1, *DECAYS[decay]))) * (decay != "none")
    if decay != "none":
        g[0, 0] = -np.inf
    beta = rng.uniform(0, 2, size=(b, m, 1)) if is_delta else None
    q, k, v = (rng.normal(size=(b, m, 1, *rest)) for rest in ((queries, d), (d,), (e,)))
    return Stream(q, k, v, g, beta), rng.normal(size=(b, m, d, e))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("is_delta", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
def test_it_is_the_definition_for_one_token_and_leaves_the_state_as_it_was(
    library, is_delta, decay
):
    stream, state = some_stream(np.random.default_rng(0), decay, is_delta)
    expected = recurrent(stream, state)
    of_library = LIBRARIES[library]
    x = Stream(*(None if a is None else of_library(a) for a in stream))
    given = of_library(state.copy())
    like = library_of(given)
    found = OneToken(ARITHMETIC[like], decays=decay != "none").forward(x, given)
    for array, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(array), reference, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(np.asarray(given), state)


def arguments(mechanism, xp_array, t, dtype=np.float32, **others):
    rng = np.random.default_rng(1)
    b, h, d = 2, 4, 8
    sizes = {"b": b, "t": t, "s": t, "h": h, "n": 2, "u": h, "d": d, "e": d, "m": 3} | others
    result = {}
    for name, pattern in mechanism.inputs.items():
        shape = pattern.shape(sizes)
        x = rng.normal(size=shape)
        if name == "k":
            x = x / np.linalg.vector_norm(x, axis=-1, keepdims=True)
        if name == "g":
            x = -np.abs(x)
        if name in ("beta", "s", "contraction"):
            x = rng.uniform(size=shape)
        result[name] = xp_array(x.astype(dtype))
    return result


@pytest.mark.parametrize(
    "text", [*MECHANISMS, "gsa", "ccq(gla)", "ccq[covariance=decayed](gated_delta)"]
)
def test_no_step_of_one_token_is_computed_in_chunks(text, monkeypatch):
    def refuse(*_):
        raise AssertionError("one token was computed in chunks")

    mechanism = pa.parse(text)
    prompt, token = (arguments(mechanism, torch.as_tensor, t) for t in (5, 1))
    _, cache = mechanism.extend(mechanism.init_cache(**prompt), **prompt)
    monkeypatch.setattr(Chunkwise, "forward", refuse)
    monkeypatch.setattr(Chunkwise, "read", refuse)
    out, longer = mechanism.extend(cache, **token, lengths=[1, 0])
    assert out.shape[1] == 1
    for name, state in longer.store.items():
        assert torch.equal(state[1], cache.store[name][1]), "an empty sequence changed its state"
        assert not torch.equal(state[0], cache.store[name][0])


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    "text",
    [
        "softmax",
        "softmax[window=3]",
        "lucid",
        "lucid[beta=true]",
        "lucid[eps=0]",
        "lucid[scale=9]",
        "lucid[normalize=queries_and_keys]",
        "lucid(softmax[window=3])",
    ],
)
def test_one_token_after_equally_long_caches_is_that_of_the_reference(text, library, donate):
    mechanism, of_library = pa.parse(text), LIBRARIES[library]
    prompt, token, last = (arguments(mechanism, of_library, t, np.float64) for t in (5, 1, 1))
    caches = [mechanism.init_cache(**prompt, capacity=7) for _ in range(2)]
    for x in (prompt, token, last):
        out, first = mechanism.extend(caches[0], **x, donate=donate)
        expected, second = mechanism.extend(caches[1], **x, backend="reference")
        np.testing.assert_allclose(np.asarray(out), np.asarray(expected), rtol=1e-11, atol=1e-12)
        for name, buffer in first.store.items():
            other = np.asarray(second.store[name])
            np.testing.assert_allclose(np.asarray(buffer), other, rtol=1e-11, atol=1e-12)
        caches = [first, second]


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("is_delta", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
def test_in_place_the_new_state_has_the_memory_of_the_old_one(library, is_delta, decay):
    stream, state = some_stream(np.random.default_rng(0), decay, is_delta)
    expected = recurrent(stream, state)
    of_library = LIBRARIES[library]
    x = Stream(*(None if a is None else of_library(a) for a in stream))
    given = of_library(state.copy())
    form = OneToken(ARITHMETIC[library], decays=decay != "none", in_place=True)
    o, new = form.forward(x, given)
    assert new is given
    np.testing.assert_allclose(o, expected[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(new, expected[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(
    "expression",
    [*MECHANISMS, "gsa", "softmax[window=3]", "differential", "differential(gsa)"],
)
def test_a_donated_cache_gives_what_one_that_is_kept_gives(expression, library):
    """`differential` reads one buffer in two calls, and the first must not overwrite it."""
    mechanism = pa.parse(expression)
    x = make_inputs(mechanism, CallLayout("test", b=2, t=5, s=5), "random")
    outs = {}
    for donate in (False, True):
        tokens = [
            {n: LIBRARIES[library](a.copy()) for n, a in each.items()}
            for each in (slice_tokens(mechanism, x, i, i + 1) for i in range(5))
        ]
        cache, outs[donate] = mechanism.init_cache(**tokens[0], capacity=5), []
        for token in tokens:
            out, cache = mechanism.extend(cache, **token, donate=donate)
            outs[donate].append(np.asarray(out))
    np.testing.assert_allclose(outs[True], outs[False], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("heads", [{"h": 4, "n": 2, "u": 4}, {"h": 2, "n": 2, "u": 6}])
@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("text", ["ssd", "gla", "delta", "gated_delta", "kda", "kda[scale=0.3]"])
def test_pytorch_writes_a_token_to_states_of_any_grouping_of_heads(text, is_turned, heads):
    mechanism = pa.parse(text)
    x = arguments(mechanism, torch.as_tensor, 1, np.float64, d=4, e=3, **heads)
    empty = mechanism.init_cache(**x)
    (name,) = empty.store
    state = torch.randn(empty.store[name].shape, dtype=torch.float64)
    if is_turned:  # Mamba-2 in Transformers has this layout.
        state = state.mT.contiguous().mT
    given = Cache(empty.length, {name: state}, empty.kinds)
    expected, after = mechanism.extend(given, **x, backend="reference")
    out, written = mechanism.extend(given, **x, donate=True)
    assert written.store[name].data_ptr() == state.data_ptr()
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(written.store[name], after.store[name], rtol=1e-12, atol=1e-12)


@dataclass(frozen=True)
class LucidWithWindows(pa.Preconditioner):
    """LUCID whose system has another window than its softmax."""

    base: pa.Mechanism = pa.Softmax()
    window: int | None = None

    def steps(self):
        return pa.step("y", pa.LucidSolve(window=self.window)), pa.step("out", self.base, v="y")


LucidWithWindows.name = "lucid_with_windows"  # A class with a name would be registered.


@pytest.mark.parametrize(("of_system", "of_softmax"), [(3, None), (None, 3), (None, None), (3, 3)])
def test_a_token_of_lucid_sees_what_is_in_both_windows(of_system, of_softmax):
    mechanism = LucidWithWindows(pa.Softmax(window=of_softmax), window=of_system)
    x = make_inputs(mechanism, CallLayout("test", t=6, s=6), "random")
    cache, outs = mechanism.init_cache(**x, capacity=6), []
    for i in range(6):
        out, cache = mechanism.extend(cache, **slice_tokens(mechanism, x, i, i + 1))
        outs.append(out)
    expected = mechanism(**x, backend="reference")
    np.testing.assert_allclose(np.concat(outs, axis=1), expected, rtol=1e-12, atol=1e-12)
