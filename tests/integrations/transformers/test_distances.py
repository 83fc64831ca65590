"""Attention of Transformers' models with distances: MPT has ALiBi's slopes, T5 a table.

Their weights, in a layer with the same mechanism, give their output.
"""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import MptConfig, T5Config
from transformers.models.mpt.modeling_mpt import MptModel
from transformers.models.t5.modeling_t5 import T5Model

from precondattn.layers.torch import Attention

HEADS, WIDTH = 6, 48
"""Sizes with a number of heads that is not a power of 2, so that slopes have two series."""


@pytest.fixture
def ids():
    torch.manual_seed(0)
    return torch.randint(3, 97, (2, 150))


def recorded(model, module, **given):
    """The arguments and the output of an attention module in a call of its model."""
    found = []
    module.register_forward_hook(
        lambda module, first, named, result: found.extend([first, named, result[0]]),
        with_kwargs=True,
    )
    with torch.no_grad():
        model.eval()(**given)
    return found


def output(mechanism, weights, x):
    """The output of a layer with these weights, of which it has no others."""
    attn = Attention(WIDTH, heads=HEADS, mechanism=mechanism)
    attn.load_state_dict(weights)
    with torch.no_grad():
        return attn(x)


def test_mpt_is_softmax_with_slopes(ids):
    config = MptConfig(vocab_size=97, d_model=WIDTH, n_layers=2, n_heads=HEADS)
    model = MptModel(config)
    mpt = model.blocks[1].attn
    first, named, expected = recorded(model, mpt, input_ids=ids)
    x = first[0] if first else named["hidden_states"]
    matrices = (*mpt.Wqkv.weight.chunk(3), mpt.out_proj.weight)
    weights = {f"{n}_proj.weight": a for n, a in zip("qkvo", matrices, strict=True)}
    found = output("softmax[distance=slopes]", weights, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_t5_is_softmax_with_buckets_and_without_a_scale(ids, side):
    sizes = {"d_model": WIDTH, "d_kv": WIDTH // HEADS, "num_heads": HEADS, "d_ff": 16}
    config = T5Config(vocab_size=97, num_layers=2, **sizes)
    model = T5Model(config)
    blocks = getattr(model, side).block
    t5, table = (blocks[i].layer[0].SelfAttention for i in (1, 0))  # Layers share a table.
    first, named, expected = recorded(model, t5, input_ids=ids, decoder_input_ids=ids)
    x = first[0] if first else named["hidden_states"]
    weights = {f"{n}_proj.weight": getattr(t5, n).weight for n in "qkvo"}
    weights["inputs.bucket_table.weight"] = table.relative_attention_bias.weight
    causal = str(side == "decoder").lower()
    found = output(f"softmax[distance=buckets,scale=1,causal={causal}]", weights, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
