"""Weights in int8 by torchao, in the place of those of our linear maps."""

import copy

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchao")

import torch
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from precondattn.layers.torch import Attention, Decoder

pytestmark = pytest.mark.thorough

TOKENS = torch.arange(4 * 12).reshape(4, 12) * 7 % 31
LOW_RANK = "_down_proj", "_up_proj"


def is_linear(module, name):
    return isinstance(module, nn.Linear)


def is_wide(module, name):
    """The filter of `docs/adapters.md`, which leaves maps through a low rank as they are."""
    return is_linear(module, name) and not name.endswith(LOW_RANK)


def quantized(model, chosen=is_linear):
    model = copy.deepcopy(model)
    config = Int8WeightOnlyConfig(set_inductor_config=False)
    quantize_(model, config, filter_fn=chosen)
    return model


def linear_maps(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def is_int8(module):
    return getattr(module.weight, "qdata", module.weight).dtype == torch.int8


def difference(y, expected):
    return ((y - expected).norm() / expected.norm()).item()


def layer(expression):
    torch.manual_seed(0)
    attn = Attention(64, heads=4, mechanism=expression).requires_grad_(False)
    return attn, torch.randn(4, 128, 64)


@pytest.mark.parametrize("expression", ["lucid(laser)", "gdn2", "differential", "path", "rwkv6"])
def test_a_layer_of_int8_weights_gives_its_output_within_two_per_cent(expression):
    """The maps of RWKV-6 through a low rank are left, as `docs/adapters.md` says."""
    attn, x = layer(expression)
    small = quantized(attn, is_wide if expression == "rwkv6" else is_linear)
    left = {name for name, module in linear_maps(small).items() if not is_int8(module)}
    assert len(left) == (12 if expression == "rwkv6" else 0)
    assert all(name.endswith(LOW_RANK) for name in left)
    assert 1e-4 < difference(small(x), attn(x)) < 0.02
    rounded = copy.deepcopy(attn)
    for name, module in linear_maps(small).items():
        if name not in left:
            rounded.get_submodule(name).weight.copy_(module.weight.dequantize())
    torch.testing.assert_close(small(x), rounded(x), rtol=1e-3, atol=1e-4)


def test_a_trained_decoder_of_int8_weights_stays_within_two_per_cent_also_compiled():
    torch.manual_seed(0)
    layers = ["gated_delta", "lucid", "kda", "lucid(laser)"]
    model = Decoder(31, 32, heads=4, layers=layers)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        logits = model(TOKENS)[:, :-1].flatten(0, 1)
        nn.functional.cross_entropy(logits, TOKENS[:, 1:].flatten()).backward()
        optimizer.step()
    model.requires_grad_(False)
    small = quantized(model)
    assert all(map(is_int8, linear_maps(small).values()))
    expected = small(TOKENS)
    assert 1e-4 < difference(expected, model(TOKENS)) < 0.02
    y, caches = small(TOKENS[:, :8], caches=small.init_caches(4, 12))
    last, _ = small(TOKENS[:, 8:], caches=caches)
    torch.testing.assert_close(torch.cat([y, last], 1), expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(small.generate(TOKENS[:, :4], 8), model.generate(TOKENS[:, :4], 8))
    torch._dynamo.reset()
    compiled = torch.compile(small, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(TOKENS), expected, rtol=1e-4, atol=1e-5)


# Merging needs a model that Transformers has quantized.
@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without:UserWarning")
def test_lora_trains_on_int8_weights():
    peft = pytest.importorskip("peft")
    small = quantized(Decoder(31, 32, heads=4, layers=["gated_delta", "lucid"]))
    maps = linear_maps(small)
    tuned = peft.get_peft_model(small, peft.LoraConfig(target_modules="all-linear", r=4))
    tuned(TOKENS).square().mean().backward()
    adapters = {name: p for name, p in tuned.named_parameters() if p.requires_grad}
    assert len(adapters) == 2 * len(maps)
    assert all(p.grad.abs().sum() > 0 for name, p in adapters.items() if "lora_B" in name)
