"""Attention with distances and masks of pairs in tiles, where a call has many of them.

Tiles are a few tokens long here, so that short inputs have many, and some are cut.
"""

from functools import cache

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import precondattn as pa
from precondattn_conformance.inputs import CallLayout
from precondattn_conformance.memory import MeasuredCall, peak_bytes
from precondattn_torch import tiled_attention, tiled_gradient, tiles

MASKS = {
    "none": {},
    "prefix": {"prefix": np.asarray([0, 21])},
    "attn_mask": {"attn_mask": np.random.default_rng(5).random((2, 1, 45, 45)) > 0.4},
    "attn_mask of heads": {"attn_mask": np.random.default_rng(6).random((1, 4, 45, 45)) > 0.4},
    "lengths": {"lengths": np.asarray([45, 17])},
    "key_mask": {"key_mask": np.random.default_rng(7).random((2, 45)) > 0.4},
    "segment_ids and prefix": {
        "segment_ids": np.asarray([[0] * 20 + [1] * 25, [0] * 45]),
        "prefix": np.asarray([4, 7]),
    },
}
MASKS["attn_mask"]["attn_mask"][:, :, 20:31] = False  # Rows without visible keys.

CALLS = [
    ("softmax[distance=slopes]", "none", 4),
    ("softmax[distance=buckets,causal=false,buckets=9,max_distance=20]", "none", 2),
    ("softmax[distance=buckets,window=7,causal=false]", "key_mask", 4),
    ("softmax[distance=slopes,causal=false]", "lengths", 2),
    ("softmax[distance=slopes,sink=true]", "attn_mask", 2),
    ("softmax[distance=buckets]", "attn_mask of heads", 2),
    ("softmax[distance=slopes]", "segment_ids and prefix", 2),
    ("softmax", "prefix", 4),
    ("softmax[window=7,distance=slopes]", "segment_ids and prefix", 2),
    ("softmax[causal=false]", "attn_mask of heads", 4),
    ("softmax[read=mean_and_log_sum,distance=slopes]", "attn_mask", 4),
    ("laser(softmax[distance=slopes])", "attn_mask", 2),
    ("laser", "prefix", 2),
]


@pytest.fixture
def short_tiles(monkeypatch):
    monkeypatch.setattr(tiled_attention, "QUERIES", 12)
    monkeypatch.setattr(tiled_attention, "FEWEST_QUERIES", 12)
    monkeypatch.setattr(tiled_attention, "MASKED_QUERIES", 7)
    monkeypatch.setattr(tiled_attention, "STORED", 7)
    monkeypatch.setattr(tiled_attention, "FEWEST_KEYS", 11)
    monkeypatch.setattr(tiles, "FEWEST_BETWEEN", 1)
    for name, value in {"ROWS": 8, "KEYS": 13, "TOGETHER": 8 * 13, "FEW": 0}.items():
        monkeypatch.setattr(tiled_gradient, name, value)


def problem(expression, n, t=45, s=45, seed=0):
    rng, m = np.random.default_rng(seed), pa.parse(expression)
    sizes = {"b": 2, "t": t, "s": s, "h": 4, "n": n, "d": 4, "e": 3}
    x = {name: rng.normal(size=p.shape(sizes)) for name, p in m.inputs.items()}
    return m, {name: abs(a) / 5 if name == "slopes" else a for name, a in x.items()}


def differentiated(m, x, cotangent, **masks):
    tensors = {name: torch.tensor(a, requires_grad=True) for name, a in x.items()}
    out = m(**tensors, **{name: torch.tensor(a) for name, a in masks.items()}, backend="torch")
    out.backward(cotangent)
    return out.detach(), {name: a.grad for name, a in tensors.items()}


def assert_agrees(m, x, **masks):
    out, pullback = m.vjp(**x, **masks, backend="reference")
    cotangent = np.random.default_rng(1).normal(size=out.shape)
    cotangent[np.isinf(out)] = 0.0  # The logarithm of no weights.
    found, gradients = differentiated(m, x, torch.tensor(cotangent), **masks)
    np.testing.assert_allclose(found, out, atol=1e-12)
    for name, expected in pullback(cotangent).items():
        np.testing.assert_allclose(gradients[name], expected, atol=1e-11, err_msg=name)


@pytest.mark.parametrize(("expression", "masks", "n"), CALLS)
def test_tiles_give_what_the_reference_gives(short_tiles, expression, masks, n):
    m, x = problem(expression, n)
    assert_agrees(m, x, **MASKS[masks])


def test_fewer_queries_than_keys_are_the_last_and_threads_share_the_heads(short_tiles, monkeypatch):
    counts, run = [], tiled_gradient.in_threads

    def counting(function, count):
        counts.append(count)
        return run(function, count)

    monkeypatch.setattr(tiled_gradient, "in_threads", counting)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert_agrees(*problem("softmax[distance=slopes]", 4, t=20))
    finally:
        torch.set_num_threads(before)
    assert counts == [3]


@pytest.mark.parametrize("expression", ["softmax[window=64,distance=slopes]"])
def test_keys_between_a_prefix_and_a_window_are_not_read(expression, monkeypatch):
    m, pairs = pa.parse(expression), {"forward": 0, "backward": 0}
    read, of_tile = tiled_attention.TiledCall._read, tiled_gradient.TileWork._of_tile

    def counted_read(call, rows, k, v, added):
        pairs["forward"] += rows.shape[3] * k.shape[2]
        return read(call, rows, k, v, added)

    def counted_tile(work, tile, *given):
        pairs["backward"] += (tile.i1 - tile.i0) * (tile.high - tile.low)
        of_tile(work, tile, *given)

    monkeypatch.setattr(tiled_attention.TiledCall, "_read", counted_read)
    monkeypatch.setattr(tiled_gradient.TileWork, "_of_tile", counted_tile)
    monkeypatch.setattr(tiled_attention, "MASKED_QUERIES", 128)
    x = {name: torch.randn(1, 1024, 1, 4, requires_grad=True) for name in "qkv"}
    x |= {"slopes": torch.ones(1)} if "slopes" in m.inputs else {}
    m(**x, prefix=[100], backend="torch").sum().backward()
    # Except for the first two, each block of queries has 100 keys of the prefix, and 63 of the
    # window before its own tokens.
    whole = 128 * (128 + 256 + 6 * (100 + 63 + 128))
    assert pairs["forward"] == whole
    assert pairs["backward"] == whole


def test_an_infinite_cotangent_of_a_query_without_keys_gives_no_gradient():
    m, x = problem("softmax[sink=true]", 4)
    cotangent = torch.ones((2, 45, 4, 3), dtype=torch.float64)
    masks = MASKS["attn_mask"]
    _, expected = differentiated(m, x, cotangent, **masks)
    cotangent[:, 20:31] = torch.inf
    _, found = differentiated(m, x, cotangent, **masks)
    for name in "qkv":
        torch.testing.assert_close(found[name], expected[name])


def test_a_key_that_overflows_reaches_no_earlier_query():
    m, x = problem("softmax[distance=slopes]", 4)
    x = {name: torch.tensor(a, dtype=torch.float32) for name, a in x.items()}
    expected = m(**x, backend="torch")
    x["q"][:, :20] *= 1e10
    x["k"][:, 30] = 1e30
    assert m(**x, backend="torch").isfinite()[:, :30].all()
    x["q"][:, :20] /= 1e10
    torch.testing.assert_close(m(**x, backend="torch")[:, :20], expected[:, :20])


@cache
def peak_of(expression, mask):
    layout = CallLayout("long", b=1, t=8192, s=8192, h=4, n=4, d=64, e=64, mask=mask)
    return peak_bytes(MeasuredCall(expression, layout, "torch", "float32"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("expression", "mask"), [("softmax[distance=buckets]", None), ("softmax", "prefix")]
)
def test_memory_at_8192_tokens_is_at_most_a_tenth_above_that_of_plain_softmax(expression, mask):
    assert peak_of(expression, mask) <= 1.1 * peak_of("softmax", None)
