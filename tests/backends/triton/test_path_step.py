"""A step of PaTH by Triton's kernels against the definition's own, in the interpreter."""

import pytest

pytest.importorskip("triton")

import torch

import precondattn as pa
from precondattn.backend import Request
from precondattn_triton.path.leaf import PathKernels
from tests.backends.triton.tiles import error, small_tiles

BOUND = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}


def inputs(t, *, b=2, h=2, n=1, d=8, e=12, dtype=torch.float32):
    torch.manual_seed(t)
    w = torch.nn.functional.normalize(torch.randn(b, t, n, d), dim=-1)
    x = {"q": torch.randn(b, t, h, d), "k": torch.randn(b, t, n, d), "v": torch.randn(b, t, n, e)}
    x |= {"w": w, "beta": 2 * torch.rand(b, t, n)}
    return {name: a.to(dtype) for name, a in x.items()}


def steps(mechanism, x, backend, *, first, prefilled=None, counts=None, is_visible=None):
    """Outputs of single tokens after the first `first`, and all buffers of the cache.

    Keys that are not `is_visible` (b, t) are masked.
    """
    result = []
    cache = mechanism.init_cache(**x, capacity=x["q"].shape[1] + 1, key_mask=is_visible is not None)
    masks = {} if prefilled is None else {"lengths": torch.tensor(prefilled)}
    start = {name: a[:, :first] for name, a in x.items()}
    if is_visible is not None:
        masks["key_mask"] = is_visible[:, :first]
    with torch.no_grad():
        if first:
            _, cache = mechanism.extend(cache, **start, **masks, backend="reference")
        for t in range(first, x["q"].shape[1]):
            new = {name: a[:, t : t + 1] for name, a in x.items()}
            masks = {} if counts is None else {"lengths": torch.tensor(counts[t - first])}
            if is_visible is not None:
                masks["key_mask"] = is_visible[:, t : t + 1]
            with small_tiles():
                out, cache = mechanism.extend(cache, **new, **masks, backend=backend)
            result += [out, *(cache.store[key] for key in sorted(cache.store))]
    return result


def check(mechanism, x, **options):
    result, expected = (steps(mechanism, x, name, **options) for name in ("triton", "reference"))
    for one, other in zip(result, expected, strict=True):
        assert one.dtype == other.dtype
        assert error(one, other) < BOUND[x["v"].dtype]


@pytest.mark.parametrize("flush", [1, 3])
@pytest.mark.parametrize("first", [0, 4])
def test_steps_across_flushes(flush, first):
    check(pa.Path(flush=flush), inputs(first + 5), first=first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_in_half_precision(dtype):
    check(pa.Path(flush=3), inputs(8, h=4, n=2, dtype=dtype), first=5)


def test_many_keys_are_read_in_parts():
    check(pa.Path(flush=8), inputs(46, b=1, n=2), first=44)


def test_a_window_gives_the_definition():
    check(pa.Path(window=3, flush=2), inputs(9), first=5)


def test_sequences_of_unequal_lengths_flush_at_different_steps():
    counts = [[1, 1], [1, 0], [1, 1], [0, 1]]
    check(pa.Path(flush=3), inputs(8), first=4, prefilled=[4, 0], counts=counts)


def test_a_window_that_ends_among_the_keys_since_the_last_flush():
    check(pa.Path(window=2, flush=5), inputs(10), first=5)


def test_a_sequence_that_gets_no_token_is_not_flushed_and_keeps_its_reflections():
    """Its next token would cause a flush."""
    check(pa.Path(flush=3), inputs(8), first=5, prefilled=[5, 2], counts=[[0, 1], [1, 0], [1, 1]])


@pytest.mark.parametrize("masked_token", [2, 5])
def test_masked_keys_before_and_after_the_last_flush(masked_token):
    x = inputs(8, b=1)
    for name in ("k", "v"):
        x[name][:, masked_token] = torch.nan
    check(pa.Path(flush=4), x, first=4, is_visible=torch.arange(8)[None] != masked_token)


def refusal(*, h=2, d=64, e=64):
    shapes = {"q": (1, 1, h, d), "k": (1, 1, 1, d), "v": (1, 1, 1, e)}
    request = Request("extend", "torch", "cuda", "bfloat16", tuple(shapes.items()), frozenset())
    return PathKernels().refuses(pa.Path(), request)


def test_a_step_by_one_token_supports_limited_widths():
    assert refusal() is None
    assert refusal(d=256, e=256, h=32) is None
    assert "e=300" in refusal(e=300)
    assert "33" in refusal(d=256, h=33)
