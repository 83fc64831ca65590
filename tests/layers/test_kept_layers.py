"""Layers keep the states of earlier lengths, and the rows before their short convolutions."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from precondattn.layers.recipes import Convolution  # noqa: E402
from precondattn.layers.torch import Attention, Decoder  # noqa: E402


def assert_same(cache, expected):
    assert cache.kinds == expected.kinds
    assert cache.length.tolist() == expected.length.tolist()
    for name, buffer in expected.store.items():
        torch.testing.assert_close(cache.store[name], buffer, atol=1e-10, rtol=0, msg=name)


@pytest.mark.parametrize("mechanism", ["gated_delta", "ssd", "lucid", "ccq(softmax)"])
@torch.no_grad()
def test_a_layer_goes_back_to_tokens_that_it_kept(mechanism):
    torch.manual_seed(0)
    options = {"recipes": {"v": Convolution(size=4)}} if mechanism == "lucid" else {}
    layer = Attention(16, heads=2, mechanism=mechanism, dtype=torch.float64, **options)
    x, mask = torch.randn(2, 14, 16, dtype=torch.float64), torch.ones(2, 14, dtype=torch.bool)
    mask[0, [2, 5, 13]] = False
    _, start = layer(x[:, :3], mask=mask[:, :3], cache=layer.init_cache(2, 20))
    y, longer = layer(x[:, 3:], mask=mask[:, 3:], cache=start, states_every=4)
    expected, plain = layer(x[:, 3:], mask=mask[:, 3:], cache=start)
    torch.testing.assert_close(y, expected, atol=1e-10, rtol=0)
    assert_same(longer.crop(longer.length), plain)
    of_eight = mask & (mask.cumsum(1) <= 8)
    assert_same(longer.crop([8, 8]), layer(x[:, 3:], mask=of_eight[:, 3:], cache=start)[1])

    _, longer = layer(x[:, 3:], mask=mask[:, 3:], cache=start, keep=5)
    left = mask & (mask.cumsum(1) <= torch.tensor([[7], [12]]))
    assert_same(longer.crop([7, 12]), layer(x[:, 3:], mask=left[:, 3:], cache=start)[1])
    assert_same(layer(x[:, :1], cache=longer)[1], layer(x[:, :1], cache=plain)[1])


@torch.no_grad()
def test_a_decoder_continues_from_the_checkpoints_of_a_prompt():
    torch.manual_seed(0)
    layers = ["gated_delta", "lucid", "gla"]
    model = Decoder(20, 16, heads=2, layers=layers, dtype=torch.float64)
    tokens = torch.randint(20, (1, 20))
    logits, caches = model(tokens, caches=model.init_caches(1, 30), states_every=8)
    assert [cache.checkpoints for cache in caches] == [[[8, 16]], [[]], [[8, 16]]]
    prefix = tuple(cache.crop(16) for cache in caches)
    rest, _ = model(tokens[:, 16:], caches=prefix)
    torch.testing.assert_close(rest, logits[:, 16:], atol=1e-10, rtol=0)
    with pytest.raises(ValueError, match="keep and states_every are for a call with a cache"):
        model(tokens, keep=2)


def test_a_layer_of_flax_goes_back_to_tokens_that_it_kept():
    jax, nnx = pytest.importorskip("jax"), pytest.importorskip("flax.nnx")
    from precondattn.layers import flax

    layer = flax.Attention(16, heads=2, mechanism="gated_delta", rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (1, 9, 16), "float32")
    _, longer = layer(x, cache=layer.init_cache(1), keep=3)
    found, _ = layer(x[:, 7:], cache=longer.crop(7))
    expected, _ = layer(x, cache=layer.init_cache(1))
    np.testing.assert_allclose(found, expected[:, 7:], atol=1e-5)
