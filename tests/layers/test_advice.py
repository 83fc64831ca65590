"""A refusal of a layer that says what to do instead is right: what it advises works."""

import re
from typing import NamedTuple

import pytest

pytest.importorskip("torch")

import torch

from precondattn.layers.recipes import Learned
from precondattn.layers.torch import Attention, Decoder, VisionTransformer


class LayerAdvice(NamedTuple):
    """A refused call, what its message advises, and the call that does that."""

    says: str
    refused: object
    advised: object


def attention(mechanism="softmax", width=8, **options):
    torch.manual_seed(0)
    return Attention(width, mechanism=mechanism, **{"heads": 2, **options})


X = torch.linspace(-1, 1, 2 * 4 * 8).reshape(2, 4, 8)
IDS = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 1]])
RAGGED = torch.nested.nested_tensor([X[0, :3], X[1]], layout=torch.jagged)


def padding_is_a_segment():
    """The tokens of a sequence that ends in padding, of a segment of its own."""
    layer, ids = attention(), torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0]])
    alone = layer(X[:1, :3])
    torch.testing.assert_close(layer(X, segment_ids=ids)[:1, :3], alone)


def padded_from_nested():
    mask = torch.tensor([[True] * 3 + [False], [True] * 4])
    layer = attention()
    out = layer(torch.nested.to_padded_tensor(RAGGED, 0.0), mask=mask)
    torch.testing.assert_close(out[:1, :3], layer(X[:1, :3]))


def decoder_caches():
    return Decoder(9, 8, heads=2, layers=["lucid"]).init_caches(2, capacity=4)


def vision(mechanism, **options):
    sizes = {"heads": 2, "blocks": 1, "classes": 3}
    return VisionTransformer(8, 4, 8, mechanism=mechanism, **sizes, **options)(
        torch.ones(1, 3, 8, 8)
    )


ADVICE = [
    LayerAdvice(
        "give padding a segment of its own instead",
        lambda: attention()(X, mask=IDS == 0, segment_ids=IDS),
        padding_is_a_segment,
    ),
    LayerAdvice(
        "use torch.nested.to_padded_tensor(x, 0.0), and give a mask",
        lambda: attention()(RAGGED),
        padded_from_nested,
    ),
    LayerAdvice(
        "segment_ids and cu_seqlens mean the same: give one of them",
        lambda: attention()(X[:1], segment_ids=IDS[:1], cu_seqlens=[0, 2, 4]),
        lambda: torch.testing.assert_close(
            attention()(X[:1], segment_ids=IDS[:1]), attention()(X[:1], cu_seqlens=[0, 2, 4])
        ),
    ),
    LayerAdvice(
        "cache must be from init_cache",
        lambda: attention()(X, cache={}),
        lambda: attention()(X, cache=attention().init_cache(2, capacity=4)),
    ),
    LayerAdvice(
        "or head_dim be given",
        lambda: attention(width=9),
        lambda: attention(width=9, head_dim=4),
    ),
    LayerAdvice(
        "pass recipes={'bias': ...}",
        lambda: attention("softmax[bias=true]"),
        lambda: attention("softmax[bias=true]", recipes={"bias": Learned(0.0)}),
    ),
    LayerAdvice(
        "caches must be from init_caches, one for each of 1 blocks; found 0",
        lambda: Decoder(9, 8, heads=2, layers=["lucid"])(IDS, caches=()),
        lambda: Decoder(9, 8, heads=2, layers=["lucid"])(IDS, caches=decoder_caches()),
    ),
    LayerAdvice(
        "caches must be from init_caches",
        lambda: Decoder(9, 8, heads=2, layers=["lucid"])(IDS, caches=[]),
        lambda: Decoder(9, 8, heads=2, layers=["lucid"])(IDS, caches=decoder_caches()),
    ),
    LayerAdvice(
        "use lucid(laser(softmax[causal=false])), or pool='mean'",
        lambda: vision("lucid(laser)"),
        lambda: [vision("lucid(laser(softmax[causal=false]))"), vision("lucid", pool="mean")],
    ),
    LayerAdvice(
        "use another mechanism, or pool='mean'",
        lambda: vision("ccq(gla)"),
        lambda: [vision("cross_covariance"), vision("ccq(gla)", pool="mean")],
    ),
]


@pytest.mark.parametrize("advice", ADVICE, ids=[advice.says for advice in ADVICE])
def test_a_call_that_a_refusal_advises_works(advice):
    with pytest.raises((TypeError, ValueError), match=re.escape(advice.says)):
        advice.refused()
    advice.advised()


def test_the_recipe_that_flax_asks_for_is_taken():
    nnx = pytest.importorskip("flax.nnx")
    from precondattn.layers import flax

    def made(**options):
        return flax.Attention(
            8, heads=2, mechanism="softmax[bias=true]", rngs=nnx.Rngs(0), **options
        )

    with pytest.raises(TypeError, match=r"pass recipes=\{'bias': \.\.\.\}"):
        made()
    made(recipes={"bias": Learned(0.0)})
