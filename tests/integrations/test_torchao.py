"""Weights in int8 by torchao, in the place of those of our linear maps."""

import copy
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchao")

import torch
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from precondattn.layers.torch import Attention, Decoder

pytestmark = pytest.mark.thorough

TOKENS = torch.arange(4 * 12).reshape(4, 12) * 7 % 31
LICENSE = Path(__file__).parents[2] / "LICENSE"
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


def trained(model, batches, rate):
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for tokens in batches:
        optimizer.zero_grad()
        loss(model(tokens), tokens).backward()
        optimizer.step()
    return model.requires_grad_(False)


def loss(logits, tokens):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def layer(expression):
    torch.manual_seed(0)
    attn = Attention(64, heads=4, mechanism=expression).requires_grad_(False)
    return attn, torch.randn(4, 128, 64)


EXPRESSIONS = [
    *("softmax", "lucid", "laser", "lucid(laser)", "gla", "gated_delta", "kda", "gdn2", "dplr"),
    *("delta_product", "mlstm", "mesa", "differential", "path", "atk"),
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_layer_of_int8_weights_gives_its_output_within_two_per_cent(expression):
    attn, x = layer(expression)
    small = quantized(attn)
    assert all(map(is_int8, linear_maps(small).values()))
    assert 1e-4 < difference(small(x), attn(x)) < 0.02
    rounded = copy.deepcopy(attn)
    for name, module in linear_maps(small).items():
        rounded.get_submodule(name).weight.copy_(module.weight.dequantize())
    torch.testing.assert_close(small(x), rounded(x), rtol=1e-3, atol=1e-4)


def test_rwkv6_stays_within_two_per_cent_if_maps_through_a_low_rank_are_left():
    attn, x = layer("rwkv6")
    small = quantized(attn, is_wide)
    left = {name for name, module in linear_maps(small).items() if not is_int8(module)}
    assert len(left) == 12
    assert {name for name in linear_maps(small) if name.endswith(LOW_RANK)} == left
    assert 1e-4 < difference(small(x), attn(x)) < 0.02


def test_a_trained_decoder_of_int8_weights_stays_within_two_per_cent_also_compiled():
    torch.manual_seed(0)
    layers = ["gated_delta", "lucid", "kda", "lucid(laser)"]
    model = trained(Decoder(31, 32, heads=4, layers=layers), [TOKENS] * 40, 1e-2)
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


@pytest.mark.parametrize("layers", [["gated_delta", "lucid"] * 2, ["rwkv6", "mlstm"] * 2])
def test_a_decoder_trained_on_text_keeps_its_logits_and_its_loss_in_int8(layers):
    text = 3 * LICENSE.read_bytes()  # A text that no change of the pages makes harder to predict.
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    rows = rows[: len(rows) // 64 * 64].reshape(-1, 64)
    generator = torch.Generator().manual_seed(0)
    *batches, other = rows[torch.randperm(len(rows), generator=generator)[: 51 * 8]].split(8)
    torch.manual_seed(0)
    model = trained(Decoder(256, 128, heads=4, layers=layers), batches, 2e-3)
    expected, y = model(other), quantized(model)(other)
    assert loss(expected, other) < 3.6  # Untrained, it is 5.6.
    assert 1e-4 < difference(y, expected) < 0.02
    assert abs(loss(y, other) - loss(expected, other)) < 0.01


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
