"""Many new tokens of PaTH after a cache, by Triton's kernels against the definition's own step."""

import itertools

import pytest

pytest.importorskip("triton")

import torch

import precondattn as pa
from precondattn.backend import Request
from precondattn_triton.path.leaf import PathKernels
from tests.backends.triton.test_path_step import BOUND, inputs
from tests.backends.triton.tiles import error, small_tiles


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of two chunks, so that short sequences have several."""
    monkeypatch.setattr("precondattn_triton.path.blocks.SMALLEST", 32)


def extended(mechanism, x, borders, backend, *, lengths=None, is_visible=None):
    """The output of an extension by the tokens between borders, and the cache's buffers after it.

    Of each sequence only the first `lengths` tokens are given. The tokens before the first border
    are the definition's.
    """
    options = {} if is_visible is None else {"key_mask": True}
    cache, results = mechanism.init_cache(**x, capacity=borders[-1] + 3, **options), []
    for low, high in itertools.pairwise((0, *borders)):
        masks = {} if is_visible is None else {"key_mask": is_visible[:, low:high]}
        if lengths is not None:
            masks["lengths"] = (lengths - low).clamp(0, high - low)
        new = {name: array[:, low:high] for name, array in x.items()}
        with torch.no_grad(), small_tiles():
            out, cache = mechanism.extend(
                cache, **new, **masks, backend=backend if low else "reference"
            )
        if low:
            results += [out, *(cache.store[key] for key in sorted(cache.store))]
    return results


def check(mechanism, x, borders, *, backend="triton", bound=None, **options):
    result, expected = (
        extended(mechanism, x, borders, name, **options) for name in (backend, "reference")
    )
    for one, other in zip(result, expected, strict=True):
        assert one.dtype == other.dtype
        assert error(one, other) < (bound or BOUND[x["v"].dtype])


def check_unequal(mechanism, x):
    """The second sequence has no token at first; the third gets none, and is not flushed."""
    first = {name: array[:, :20] for name, array in x.items()}
    new = {name: array[:, 20:] for name, array in x.items()}
    lengths, counts = torch.tensor([20, 0, 9]), torch.tensor([7, 19, 0])
    results = {}
    for backend in ("triton", "reference"):
        cache = mechanism.init_cache(**x, capacity=60)
        with torch.no_grad(), small_tiles():
            _, cache = mechanism.extend(cache, **first, lengths=lengths, backend="reference")
            out, cache = mechanism.extend(cache, **new, lengths=counts, backend=backend)
            again, cache = mechanism.extend(cache, **first, backend=backend)
        results[backend] = [out, again, *(cache.store[key] for key in sorted(cache.store))]
    for one, other in zip(*results.values(), strict=True):
        assert error(one, other) < 2e-5


@pytest.mark.parametrize(
    ("flush", "borders"),
    [
        # Two blocks are transported past the third one.
        pytest.param(1, (16, 33, 80), marks=pytest.mark.slow),
        (3, (4, 6, 21)),
        (8, (16, 31, 34)),  # No flush, then one among the new tokens.
        (64, (20, 40)),  # No key of the cache has been flushed.
    ],
)
def test_a_cache_divided_anywhere(flush, borders):
    check(pa.Path(flush=flush), inputs(borders[-1], h=4, n=2), borders)


def test_a_cache_of_no_tokens_is_a_full_call():
    x = inputs(37)
    cache = pa.Path(flush=4).init_cache(**x, capacity=40)
    with torch.no_grad(), small_tiles():
        out, cache = pa.Path(flush=4).extend(cache, **x, backend="triton")
    expected, other = pa.Path(flush=4).extend(
        pa.Path(flush=4).init_cache(**x, capacity=40), **x, backend="reference"
    )
    assert error(out, expected) < BOUND[torch.float32]
    assert all(error(a, other.store[key]) < 2e-5 for key, a in cache.store.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """Transported keys are in float32."""
    check(pa.Path(flush=4), inputs(40, h=4, n=2, dtype=dtype), (17, 40))


def test_keys_in_half_precision_are_transported_in_float32():
    x = inputs(90, b=1, dtype=torch.bfloat16)
    result, expected = (
        extended(pa.Path(), x, (10, 50, 90), name) for name in ("triton", "reference")
    )
    assert error(result[-2], expected[-2]) < 2e-6


@pytest.mark.parametrize("window", [5, 24])
@pytest.mark.parametrize("lengths", [None, [21, 40]])
def test_a_window_that_ends_among_new_and_among_cached_keys(window, lengths):
    lengths = None if lengths is None else torch.tensor(lengths)
    check(pa.Path(window=window, flush=6), inputs(40), (20, 40), lengths=lengths)


@pytest.mark.parametrize("flush", [1, 5])
def test_sequences_of_unequal_lengths_and_numbers_of_new_tokens(flush):
    check_unequal(pa.Path(flush=flush), inputs(39, b=3, h=2))


@pytest.mark.parametrize("flush", [1, 8])
def test_masked_keys_of_the_cache_and_among_the_new_ones(flush):
    torch.manual_seed(0)
    x, is_visible = inputs(40), torch.rand(2, 40) > 0.3
    is_visible[1, :22] = False  # A query with no key.
    for name in ("k", "v"):
        x[name][~is_visible] = torch.nan
    check(pa.Path(flush=flush), x, (19, 40), is_visible=is_visible)


def test_clustered_keys_and_equal_directions_of_full_strength():
    x = inputs(52, b=1)
    x["k"] = 0.01 * x["k"] + x["k"][:, :1]
    x["w"] = x["w"][:, :1].expand_as(x["w"]).clone()
    x["beta"] = torch.full_like(x["beta"], 2.0)
    x["k"][:, 30:34], x["w"][:, 40:45] = 0, 0
    check(pa.Path(flush=4), x, (18, 52))


def test_many_cached_keys_are_read_in_parts(monkeypatch):
    monkeypatch.setattr("precondattn_triton.decoding.processors", lambda like: 3)
    check(pa.Path(flush=4), inputs(75, b=1, h=3), (72, 75))


def refusal(t=2, *, d=128, e=256, dtype="bfloat16"):
    shapes = {"q": (1, t, 2, d), "k": (1, t, 1, d), "v": (1, t, 1, e)}
    request = Request("extend", "torch", "cuda", dtype, tuple(shapes.items()), frozenset())
    return PathKernels().refuses(pa.Path(), request)


def test_several_tokens_are_supported_up_to_keys_of_128_channels():
    assert refusal() is None
    assert refusal(t=4096, e=512) is None
    assert "found d=192" in refusal(d=192)
    assert "width 256 at most; found 512" in refusal(e=512, dtype="float32")
