"""Full calls of few tokens are computed by pairs of tokens, and equal the definition."""

import array_api_strict
import numpy as np
import pytest
import torch

import precondattn as pa
from precondattn.arrays import library_of
from precondattn.spec.l2_norm import l2_norm
from precondattn.spec.recurrence import Stream, recurrent
from precondattn_conformance.inputs import CallLayout, make_inputs
from precondattn_portable import few_tokens
from precondattn_portable.arithmetic import IN_PLACE, STANDARD
from precondattn_portable.chunkwise import Chunkwise
from precondattn_portable.few_tokens import FewTokens
from precondattn_torch.arithmetic import TORCH

ARITHMETIC = {"numpy": IN_PLACE, "array_api_strict": STANDARD, "torch": TORCH}
LIBRARIES = {
    "numpy": np.asarray,
    "array_api_strict": array_api_strict.asarray,
    "torch": torch.as_tensor,
}
B, M, S, D, E = 2, 2, 7, 4, 3
KINDS = {
    "none": (1, 1, False),
    "head": (1, 1, False),
    "key": (D, 1, False),
    "value": (1, E, False),
    "delta": (1, 1, True),
    "gated delta": (1, 1, True),
}


def some_stream(kind, t, r):
    rng = np.random.default_rng(0)
    rows, columns, is_delta = KINDS[kind]
    g = np.zeros((B, M, S, rows, columns))
    if kind not in ("none", "delta"):
        mixed = rng.choice([0.0, -1e-3, -30.0, -1e4, -np.inf, -1.0], size=g.shape)
        g = np.where(rng.random(size=g.shape) < 0.5, mixed, -np.abs(rng.normal(size=g.shape)))
    k = rng.normal(size=(B, M, S, D))
    k /= np.linalg.vector_norm(k, axis=-1, keepdims=True)
    beta = rng.choice([0.0, 1.0, 2.0, 0.3], size=(B, M, S)) if is_delta else None
    return Stream(rng.normal(size=(B, M, t, r, D)), k, rng.normal(size=(B, M, S, E)), g, beta)


@pytest.mark.parametrize(("t", "r"), [(S, 1), (S, 3), (4, 2), (1, 1)])
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", KINDS)
def test_pairs_are_the_definition(kind, library, t, r):
    stream, zeros = some_stream(kind, t, r), np.zeros((B, M, D, E))
    expected, _ = recurrent(stream, zeros)
    of_library = LIBRARIES[library]
    x = Stream(*(None if a is None else of_library(a) for a in stream))
    ops = ARITHMETIC[library_of(x.k)]
    o, _ = FewTokens(ops, decays=kind not in ("none", "delta")).forward(x, of_library(zeros))
    np.testing.assert_allclose(np.asarray(o), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "expression", ["linear[normalize=true]", "gla", "gsa", "gated_delta", "ccq(gla)", "retention"]
)
def test_a_small_call_has_no_chunks(expression, monkeypatch):
    def refuse(*_):
        raise AssertionError("few tokens were computed in chunks")

    mechanism = pa.parse(expression)
    x = make_inputs(mechanism, CallLayout("test", b=2, t=9, s=9), "random")
    x["k"] = np.abs(x["k"])
    segments = np.asarray([[0] * 4 + [2] * 5, [1] * 9], dtype=np.int32)
    masks = {"segment_ids": segments}, {"lengths": [9, 3]}, {}
    expected = [mechanism(**x, **each, backend="reference") for each in masks]
    monkeypatch.setattr(Chunkwise, "forward", refuse)
    monkeypatch.setattr(Chunkwise, "read", refuse)
    for each, reference in zip(masks, expected, strict=True):
        np.testing.assert_allclose(mechanism(**x, **each), reference, rtol=1e-9, atol=1e-11)


def test_calls_with_many_pairs_are_in_chunks():
    def x(tokens, heads, *channels):
        k = np.zeros((1, tokens, heads, 8))
        return {"q": k, "k": k, "v": k, "g": np.zeros((1, tokens, heads, *channels))}

    assert few_tokens.is_few(x(64, 8))
    assert not few_tokens.is_few(x(64, 8, 8))
    assert few_tokens.is_few(x(16, 8, 8))
    assert not few_tokens.is_few(x(few_tokens.TOKENS + 1, 1))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-6])
def test_rows_of_any_size_are_normalized_in_torch_as_defined(dtype, eps):
    sizes = np.asarray([1e-30, 1e-6, 1.0, 1e30])[:, None]
    rows = sizes * np.random.default_rng(0).normal(size=(4, 8))
    x = np.concatenate([rows, np.zeros((1, 8))]).astype(dtype)
    unit = TORCH.unit_rows(torch.as_tensor(x), eps)
    assert unit.dtype == getattr(torch, dtype)
    np.testing.assert_allclose(unit, l2_norm(x, eps), rtol=4 * np.finfo(dtype).eps, atol=0)
