"""Tiles of other segments are not computed: a packed call does the work of calls of each sequence.

Bounds are those of tiles, so that both multiply the same tiles.
"""

from collections import Counter

import pytest

pytest.importorskip("triton")

import torch

import precondattn as pa
from precondattn_conformance.tolerance import error
from precondattn_triton.backend import Triton
from precondattn_triton.lucid.matrix import LucidMatrix
from tests.backends.triton.counting import counted_exponentials, counted_products
from tests.backends.triton.tiles import small_tiles

LENGTHS = 48, 16, 32
HEADS, WIDTH = 1, 16
LINEAR = {"cross", "cross_back", "_blocks", "_blocks_gradient", "_chunk_gradient"}
"""Kernels whose work for a token depends on the whole length."""


def inputs(mechanism, *, apart):
    """Rows of all sequences, one after the other; values of each may be `apart`."""
    generator = torch.Generator().manual_seed(0)
    t = sum(LENGTHS)
    sizes = {"b": 1, "t": t, "s": t, "h": HEADS, "n": HEADS, "d": WIDTH, "e": WIDTH}
    x = {
        name: torch.randn(pattern.shape(sizes), generator=generator)
        for name, pattern in pa.parse(mechanism).inputs.items()
    }
    x["v"] = x["v"] + (apart * (torch.arange(t) % 7))[None, :, None, None]
    for name in {"beta", "lucid_beta"} & x.keys():
        x[name] = x[name].sigmoid()
    if "w" in x:
        x["w"] = torch.nn.functional.normalize(x["w"], dim=-1)
    return x


def run(mechanism, x, counting, **masks):
    """The output, the gradients, and what was counted."""
    x = {name: array.clone().requires_grad_() for name, array in x.items()}
    with small_tiles(), counting() as counted:
        out = pa.parse(mechanism)(**x, backend=Triton.name, **masks)
        gradients = torch.autograd.grad(out.sin().sum(), [*x.values()])
    return (out.detach(), *gradients), counted


def of_sequence(array, index):
    start = sum(LENGTHS[:index])
    return array[:, start : start + LENGTHS[index]] if array.ndim > 1 else array


@pytest.mark.parametrize(
    ("mechanism", "counting", "apart"),
    [
        ("laser(softmax[causal=false])", counted_products, 0),
        ("laser", counted_exponentials, 100),
        ("path", counted_products, 0),
        ("lucid_solve[beta=true]", counted_products, 0),
        ("lucid_solve[metric=transported]", counted_products, 0),
    ],
)
def test_a_packed_call_computes_the_tiles_of_each_sequence(mechanism, counting, apart, monkeypatch):
    monkeypatch.setattr("precondattn_triton.path.blocks.SMALLEST", 32)
    # Whether LUCID's update sums keys depends on the length of a call.
    monkeypatch.setattr(LucidMatrix, "_supports_key_sums", lambda *_: False)
    x = inputs(mechanism, apart=apart)
    ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None]
    results, counted = run(mechanism, x, counting, segment_ids=ids)
    expected: Counter[str] = Counter()
    for index in range(len(LENGTHS)):
        alone = {name: of_sequence(array, index) for name, array in x.items()}
        ones, of_one = run(mechanism, alone, counting)
        expected += of_one
        for result, one in zip(results, ones, strict=True):
            if one.ndim > 1:
                packed = of_sequence(result, index)
                assert error(packed.double().numpy(), one.double().numpy()) < 1e-5
    assert expected
    for kernel in expected.keys() | counted.keys():
        if kernel not in LINEAR:
            assert counted[kernel] == expected[kernel], kernel
