"""Layers of two processes that each have some of the heads, beside the same layers whole."""

import copy

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard

from precondattn.layers.recipes import Biased
from precondattn.layers.torch import (
    Attention,
    Decoder,
    VisionAttention,
    divide_tokens,
    divide_weights,
)
from tests.layers.layer_cases import MECHANISMS, layer

REFUSED = {
    "retention": "retention divides heads, and the decay of each depends on its number",
    "gsa": "gsa: the recipe of out computes all heads together, and each of 2 devices has some",
    "hgrn2": "hgrn2: the recipe of out computes all heads together",
    "row_normalized(gsa)": "the recipe of out computes all heads together",
    "lucid(softmax[distance=slopes])": "the recipe of slopes computes all heads together",
}
LAYERS = ["gated_delta", {"mechanism": "lucid", "kv_heads": 1}]


def check(folder):
    """All that two processes do."""
    mesh = distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for expression in MECHANISMS:
        torch.manual_seed(0)
        attn = moved(layer(Attention, expression, dtype=torch.float64))
        if expression in REFUSED:
            with pytest.raises(ValueError, match=REFUSED[expression]):
                divide_weights(attn, mesh)
        else:
            assert_the_same(attn, mesh)
    options = {"heads": 4, "dtype": torch.float64}
    torch.manual_seed(0)
    few_keys = Attention(24, mechanism="laser", kv_heads=1, **options)
    biased = VisionAttention(24, recipes={"out": Biased()}, **options)
    assert_the_same(moved(few_keys), mesh)
    assert_the_same(moved(biased), mesh)
    group_norm = Attention(24, mechanism="ssd", heads=1, value_heads=2, dtype=torch.float64)
    with pytest.raises(ValueError, match="computes heads that share keys together"):
        divide_weights(group_norm, mesh)
    decoders(mesh)
    half_precision(mesh)
    bad_input(mesh)
    bad_calls(mesh)


def more_processes_than_keys():
    """Two of four processes compute with each key head."""
    mesh = distributed.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    attn = Attention(24, heads=4, kv_heads=2, mechanism="gla", dtype=torch.float64)
    assert_the_same(moved(attn), mesh)
    three = Attention(24, heads=12, kv_heads=3, mechanism="gla")
    with pytest.raises(ValueError, match=r"4 devices divide the number of heads, or .*n=3"):
        divide_weights(three, mesh)


def moved(module):
    """Weights that start as constants are others here."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return module


def divided(module, mesh):
    """A copy that computes its heads. Only the first process's weights count."""
    copied = copy.deepcopy(module)
    if mesh.get_local_rank():
        copied.reset_parameters()
    divide_weights(copied, mesh)
    return copy.deepcopy(copied)


def assert_the_same(attn, mesh):
    """Output and gradients, and tokens that follow others."""
    own, message = divided(attn, mesh), lambda text: f"{attn}: {text}"
    x = torch.randn(2, 7, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    weight = torch.sin(torch.arange(24.0))
    inputs, outputs = [x.clone().requires_grad_() for _ in range(2)], []
    for module, x in zip((attn, own), inputs, strict=True):
        outputs.append(module(x))
        (outputs[-1] * weight).sum().backward()
    near = {"rtol": 1e-9, "atol": 1e-9, "msg": message}
    torch.testing.assert_close(outputs[1], outputs[0], **near)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, **near)
    for found, expected in zip(own.parameters(), attn.parameters(), strict=True):
        assert found.grad.placements == found.placements
        torch.testing.assert_close(found.grad.full_tensor(), expected.grad, **near)
    if attn.mechanism.offers.causal:
        _, cache = own(x[:, :4], cache=own.init_cache(2, 8))
        last, _ = own(x[:, 4:], cache=cache)
        torch.testing.assert_close(last, outputs[0][:, 4:], **near)


def decoders(mesh):
    """Masks, packed sequences, and tokens that follow."""
    torch.manual_seed(0)
    model = moved(Decoder(12, 24, heads=4, layers=LAYERS, dtype=torch.float64))
    own = divided(model, mesh)
    assert own.state_dict().keys() == model.state_dict().keys()
    shapes = {name: tuple(p.to_local().shape) for name, p in own.named_parameters()}
    assert shapes["embedding"] == (6, 24)
    assert shapes["blocks.0.mlp.down_proj.weight"] == (24, 32)
    assert shapes["blocks.0.attention.inputs.q.convolution"] == (4, 2, 6)
    assert shapes["blocks.0.attention.q_proj.weight"] == (12, 24)
    assert shapes["blocks.0.attention.o_proj.weight"] == (24, 12)
    assert shapes["blocks.1.attention.k_proj.weight"] == (6, 24)
    tokens = torch.randint(12, (2, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.arange(9) >= torch.tensor([[0], [4]])
    ids = (torch.arange(9) > 3).expand(2, 9).long()
    for options in ({}, {"mask": mask}, {"segment_ids": ids}):
        expected = model(tokens, **options)
        torch.testing.assert_close(own(tokens, **options), expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(own.generate(tokens, 6, mask=mask), model.generate(tokens, 6, mask=mask))
    torch.manual_seed(mesh.get_local_rank())  # The first process draws for all.
    drawn = own.generate(tokens, 20, temperature=5.0)
    both = [torch.empty_like(drawn) for _ in range(2)]
    distributed.all_gather(both, drawn)
    assert torch.equal(*both)
    own.reset_parameters()
    assert torch.isfinite(own(tokens)).all()


def half_precision(mesh):
    torch.manual_seed(0)
    attn = layer(Attention, "ccq(gated_delta)", dtype=torch.float32)
    x = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(2))
    expected = attn(x)
    half = divided(attn.bfloat16(), mesh)
    y = half(x.bfloat16())
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert (y.float() - expected).norm() < 0.03 * expected.norm()
    assert all(p.grad.dtype == torch.bfloat16 for p in half.parameters())


def bad_input(mesh):
    """What `divide_weights` refuses, on both processes, and without a change of the model."""
    first = not mesh.get_local_rank()

    def decoder(vocabulary=12, hidden=8, heads=4, **options):
        return Decoder(vocabulary, 24, heads=heads, hidden=hidden, layers=LAYERS, **options)

    plane = distributed.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    sharded = fully_shard(decoder(), mesh=mesh)
    cut = decoder()
    divide_tokens(cut, mesh)
    wrapped = decoder()
    wrapped.blocks[0].mlp.up_proj = torch.nn.Sequential(wrapped.blocks[0].mlp.up_proj)
    cases = [
        (decoder(), "tp", TypeError, "mesh must be a DeviceMesh, such as .*; found str"),
        (decoder(), plane, ValueError, "mesh must have one dimension, such as .*; found 2"),
        (decoder(heads=3), mesh, ValueError, "blocks.0.attention: gated_delta expects .*u=3"),
        (decoder(hidden=9), mesh, ValueError, "hidden must be a multiple of 2 devices.*hidden=9"),
        (decoder(vocabulary=11), mesh, ValueError, "vocabulary must be a multiple.*vocabulary=11"),
        (torch.nn.Linear(2, 2), mesh, ValueError, "model has no Attention; found Linear"),
        (sharded, mesh, ValueError, "parameters are DTensors already; it comes before fully_sh"),
        (wrapped, mesh, TypeError, "blocks.0.mlp.up_proj must be an nn.Linear .*Sequential"),
        (cut, mesh, ValueError, "tokens and weights must be divided along two dimensions"),
        # An error of one process, and other weights.
        (decoder(heads=4 if first else 3), mesh, ValueError, "process 1: .*found u=3"),
        (decoder(hidden=8 if first else 16), mesh, ValueError, "must call the same"),
    ]
    for model, of, error, message in cases:
        before = [type(parameter) for parameter in model.parameters()]
        with pytest.raises(error, match=message):
            divide_weights(model, of)
        assert [type(parameter) for parameter in model.parameters()] == before
    model = decoder()
    divide_weights(model, mesh)
    with pytest.raises(ValueError, match="parameters are DTensors already"):
        divide_weights(model, mesh)
    with pytest.raises(ValueError, match="tokens and weights must be divided along two dim"):
        divide_tokens(model, mesh)


def bad_calls(mesh):
    """Calls that differ, or are wrong on one process, are errors on both."""
    first = not mesh.get_local_rank()
    model = Decoder(12, 24, heads=4, layers=LAYERS)
    divide_weights(model, mesh)
    tokens = torch.arange(8).reshape(2, 4)
    with pytest.raises(ValueError, match=r"all processes must call the same; found .*tokens"):
        model(tokens if first else tokens + 1)
    with pytest.raises(TypeError, match="process 1: tokens must be integers of torch"):
        model(tokens if first else tokens.double())
    with pytest.raises(IndexError):
        model(tokens + 5)
    with pytest.raises(ValueError, match="tokens must be between 0 and 11; found 5 to 12"):
        model.generate(tokens + 5, 1)
