"""Layers pass on the masks of pairs, `attn_mask` and `prefix`."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from precondattn.layers.torch import Attention, Block, Decoder
from tests.layers.torch_layers import in_flax

B, T, WIDTH, HEADS = 2, 12, 16, 4
PREFIX = torch.tensor([3, 5])
LOWER = torch.ones(T, T, dtype=torch.bool).tril()
FIRST = (torch.arange(T) < PREFIX[:, None])[:, None, None]
PAIRS = torch.rand(B, HEADS, T, T, generator=torch.Generator().manual_seed(1)) > 0.4
DECODER = {"heads": HEADS, "layers": ["softmax", "laser"]}


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(B, T, WIDTH, dtype=torch.float64)


def made(mechanism="softmax", of=Attention):
    return of(WIDTH, heads=HEADS, kv_heads=2, mechanism=mechanism, dtype=torch.float64)


def test_a_prefix_is_the_mask_of_a_layer_without_causality(x):
    attn, full = made(), made("softmax[causal=false]")
    full.load_state_dict(attn.state_dict())
    torch.testing.assert_close(attn(x, prefix=PREFIX), full(x, attn_mask=LOWER | FIRST))
    torch.testing.assert_close(attn(x, attn_mask=PAIRS), full(x, attn_mask=LOWER & PAIRS))
    assert not torch.allclose(attn(x, prefix=PREFIX), attn(x))


def test_of_padded_or_packed_sequences_the_masks_are_those_of_each_alone(x):
    attn, mask = made(), torch.rand(B, T) > 0.3
    y = attn(x[:1], cu_seqlens=[0, 5, 12], prefix=[2, 4])
    for start, stop, prefix in ((0, 5, 2), (5, 12, 4)):
        alone = attn(x[:1, start:stop], prefix=[prefix])
        torch.testing.assert_close(y[:, start:stop], alone)
    x[~mask] = torch.nan
    y = attn(x, mask=mask, attn_mask=PAIRS, prefix=PREFIX)
    for i, valid in enumerate(mask):
        pairs = PAIRS[i : i + 1][:, :, valid][..., valid]
        alone = attn(x[i : i + 1, valid], attn_mask=pairs, prefix=PREFIX[i : i + 1])
        torch.testing.assert_close(y[i : i + 1, valid], alone)
    assert not y[~mask].any()


@pytest.mark.parametrize("of", [Attention, Block])
def test_decoding_with_masks_of_pairs_gives_the_full_call(of, x):
    module = made(of=of)
    attn = module if of is Attention else module.attention
    expected = module(x, attn_mask=PAIRS, prefix=PREFIX)
    cache, outs = attn.init_cache(B, T), []
    for start, stop in ((0, 6), (6, 7), (7, T)):
        given = {"prefix": PREFIX} if start == 0 else {}  # Later steps need not name it.
        pairs = PAIRS[:, :, start:stop, :stop]
        y, cache = module(x[:, start:stop], attn_mask=pairs, cache=cache, **given)
        outs.append(y)
    torch.testing.assert_close(torch.cat(outs, 1), expected)


def test_a_decoder_generates_after_a_prefix():
    torch.manual_seed(0)
    model, prompt = Decoder(50, WIDTH, dtype=torch.float64, **DECODER), torch.randint(50, (B, 6))
    found = model.generate(prompt, 4, prefix=PREFIX)
    longer = prompt
    for i in range(4):
        logits = model(longer, prefix=PREFIX)
        torch.testing.assert_close(logits[:, -1].argmax(-1), found[:, i])
        longer = torch.cat([longer, found[:, i : i + 1]], 1)


@pytest.mark.thorough
def test_flax_layers_give_what_those_of_torch_give():
    jnp = pytest.importorskip("jax.numpy")
    torch.manual_seed(0)
    model = Decoder(50, WIDTH, dtype=torch.float64, **DECODER)
    other = in_flax(model, 50, WIDTH, dtype=jnp.float64, **DECODER)
    ids, mask = torch.randint(50, (B, T)), torch.rand(B, T) > 0.2
    given = {"mask": mask, "attn_mask": PAIRS, "prefix": PREFIX}
    found = other(jnp.asarray(ids), **{name: jnp.asarray(a) for name, a in given.items()})
    np.testing.assert_allclose(found, model(ids, **given).detach(), atol=1e-10)
    found = other.generate(jnp.asarray(ids), 3, prefix=jnp.asarray(PREFIX))
    np.testing.assert_array_equal(found, model.generate(ids, 3, prefix=PREFIX))
