"""Layers pass on the masks of pairs, `attn_mask` and `prefix`."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from precondattn.layers.torch import Attention, Block, Decoder

B, T, WIDTH, HEADS = 2, 12, 16, 4
PREFIX = torch.tensor([3, 5])
LOWER = torch.ones(T, T, dtype=torch.bool).tril()
FIRST = (torch.arange(T) < PREFIX[:, None])[:, None, None]
PAIRS = torch.rand(B, HEADS, T, T, generator=torch.Generator().manual_seed(1)) > 0.4


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def made(mechanism="softmax", of=Attention):
    return of(WIDTH, heads=HEADS, kv_heads=2, mechanism=mechanism, dtype=torch.float64)


def tokens():
    return torch.randn(B, T, WIDTH, dtype=torch.float64)


def test_a_prefix_is_the_mask_of_a_layer_without_causality():
    attn, full, x = made(), made("softmax[causal=false]"), tokens()
    full.load_state_dict(attn.state_dict())
    torch.testing.assert_close(attn(x, prefix=PREFIX), full(x, attn_mask=LOWER | FIRST))
    torch.testing.assert_close(attn(x, attn_mask=PAIRS), full(x, attn_mask=LOWER & PAIRS))
    assert not torch.allclose(attn(x, prefix=PREFIX), attn(x))


def test_of_a_padded_sequence_the_masks_are_those_of_its_valid_tokens():
    attn, x, mask = made(), tokens(), torch.rand(B, T) > 0.3
    x[~mask] = torch.nan
    y = attn(x, mask=mask, attn_mask=PAIRS, prefix=PREFIX)
    for i, valid in enumerate(mask):
        pairs = PAIRS[i : i + 1][:, :, valid][..., valid]
        alone = attn(x[i : i + 1, valid], attn_mask=pairs, prefix=PREFIX[i : i + 1])
        torch.testing.assert_close(y[i : i + 1, valid], alone)
    assert not y[~mask].any()


@pytest.mark.parametrize("of", [Attention, Block])
def test_decoding_with_masks_of_pairs_gives_the_full_call(of):
    module, x = made(of=of), tokens()
    attn = module if of is Attention else module.attention
    expected = module(x, attn_mask=PAIRS, prefix=PREFIX)
    cache, outs = attn.init_cache(B, T), []
    for start, stop in ((0, 6), (6, 7), (7, T)):
        given = {"prefix": PREFIX} if start == 0 else {}  # Later steps need not name it.
        pairs = PAIRS[:, :, start:stop, :stop]
        y, cache = module(x[:, start:stop], attn_mask=pairs, cache=cache, **given)
        outs.append(y)
    torch.testing.assert_close(torch.cat(outs, 1), expected)


def test_packed_sequences_have_a_prefix_each():
    attn, x = made(), tokens()[:1]
    y = attn(x, cu_seqlens=[0, 5, 12], prefix=[2, 4])
    for start, stop, prefix in ((0, 5, 2), (5, 12, 4)):
        torch.testing.assert_close(y[:, start:stop], attn(x[:, start:stop], prefix=[prefix]))


def decoder():
    return Decoder(50, WIDTH, heads=HEADS, layers=["softmax", "laser"], dtype=torch.float64)


def test_a_decoder_generates_after_a_prefix():
    model, prompt = decoder(), torch.randint(50, (B, 6))
    found = model.generate(prompt, 4, prefix=PREFIX)
    longer = prompt
    for i in range(4):
        logits = model(longer, prefix=PREFIX)
        torch.testing.assert_close(logits[:, -1].argmax(-1), found[:, i])
        longer = torch.cat([longer, found[:, i : i + 1]], 1)
    logits, caches = model(prompt, caches=model.init_caches(B, 10), prefix=PREFIX)
    torch.testing.assert_close(logits, model(prompt, prefix=PREFIX))
    pairs = torch.rand(1, 1, 1, 7) > 0.3
    last, _ = model(found[:, :1], caches=caches, attn_mask=pairs)
    whole = torch.ones(1, 1, 7, 7, dtype=torch.bool)
    whole[:, :, 6:] = pairs
    both = torch.cat([prompt, found[:, :1]], 1)
    torch.testing.assert_close(last, model(both, prefix=PREFIX, attn_mask=whole)[:, 6:])


@pytest.mark.parametrize("name", ["attn_mask", "prefix"])
def test_a_layer_says_why_its_mechanism_has_no_masks_of_pairs(name):
    given = {"attn_mask": PAIRS, "prefix": PREFIX}[name]
    with pytest.raises(ValueError, match=f"takes no {name}: gated_delta sums up all tokens"):
        made("gated_delta", lambda *a, kv_heads, **b: Attention(*a, **b))(tokens(), **{name: given})


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"attn_mask": PAIRS[..., :5]}, ValueError, r"\(2 or 1, 4 or 1, 12, 12\); found"),
        ({"attn_mask": PAIRS + 0.0}, TypeError, "attn_mask must have dtype bool; found float32"),
        ({"prefix": [1, 2, 3]}, ValueError, r"prefix is declared \(b\), that is \(2,\)"),
    ],
)
def test_bad_masks_of_pairs_are_named_by_layers_too(given, error, match):
    with pytest.raises(error, match=match):
        made()(tokens(), **given)
    with pytest.raises(error, match=match):
        made()(tokens(), mask=torch.ones(B, T, dtype=torch.bool), **given)


def test_an_attn_mask_of_a_step_is_not_given_with_padding():
    attn = made()
    with pytest.raises(ValueError, match="attn_mask can not be given with mask and a cache"):
        attn(
            tokens(),
            mask=torch.ones(B, T, dtype=torch.bool),
            attn_mask=PAIRS,
            cache=attn.init_cache(B, T),
        )


@pytest.mark.thorough
def test_flax_layers_give_what_those_of_torch_give():
    nnx, jnp = pytest.importorskip("flax.nnx"), pytest.importorskip("jax.numpy")
    from precondattn.layers.flax import Decoder as FlaxDecoder
    from precondattn.layers.flax import to_flax

    model = decoder()
    other = FlaxDecoder(
        50, WIDTH, heads=HEADS, layers=["softmax", "laser"], dtype=jnp.float64, rngs=nnx.Rngs(0)
    )
    nnx.update(other, to_flax(model.state_dict()))
    ids = torch.randint(50, (B, T))
    mask = torch.rand(B, T) > 0.2

    def both(**given):
        arrays = {name: jnp.asarray(a.numpy()) for name, a in given.items()}
        found = other(jnp.asarray(ids.numpy()), **arrays)
        np.testing.assert_allclose(found, model(ids, **given).detach().numpy(), atol=1e-10)

    both(mask=mask, attn_mask=PAIRS, prefix=PREFIX)
    expected = model.generate(ids, 3, prefix=PREFIX)
    found = other.generate(jnp.asarray(ids.numpy()), 3, prefix=jnp.asarray(PREFIX.numpy()))
    np.testing.assert_array_equal(found, expected)
