"""Processes that compute layers together: of some heads, of shards, of adapters and int8 weights.

Each check compares with the same model whole. `tests/ranks.py` starts the processes, and each calls
`main`.
"""

import copy
from functools import partial
from importlib.util import find_spec
from pathlib import Path

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
from tests.layers.layer_cases import covering, layer

REFUSED = {
    "retention": "retention divides heads, and the decay of each depends on its number",
    "gsa": "gsa: the recipe of out computes all heads together, and each of 2 devices has some",
    "hgrn2": "hgrn2: the recipe of out computes all heads together",
    "row_normalized(gsa)": "the recipe of out computes all heads together",
    "lucid(softmax[distance=slopes])": "the recipe of slopes computes all heads together",
}
LAYERS = ["gated_delta", {"mechanism": "lucid", "kv_heads": 1}]


def imports(count, folder):
    """What DTensors import when they are first used, and what trains models."""
    return ("torch._dynamo", "tests.layers.divided_training")


def main(rank, count, folder):
    """Check all that so many processes do, and leave a file for each check."""
    from tests.layers import divided_training

    folder = Path(folder)
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
    own = distributed.init_device_mesh("cpu", (count,), mesh_dim_names=("tp",))
    checks = {
        2: {name: partial(check, own) for name, check in CHECKS.items()},
        4: {"training": partial(divided_training.on_four, folder)},
        8: {"training": partial(divided_training.on_eight, folder)},
    }
    for name, check in checks[count].items():
        torch.manual_seed(0)
        check()
        (folder / f"{name} {rank}").touch()
    distributed.destroy_process_group()


def division(mesh):
    for expression in (*covering("ccq(gated_delta)", "gated_delta", "lucid(path)"), *REFUSED):
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


def fsdp_of_a_layer(mesh):
    torch.manual_seed(0)
    whole = layer(Attention, "ccq(gated_delta)", dtype=torch.float64)
    x = torch.randn(2, 6, 24, dtype=torch.float64)
    sharded = assert_sharded_the_same(whole, mesh, x)
    sharded.reset_parameters()
    assert torch.isfinite(sharded(x)).all()


def assert_sharded_the_same(whole, mesh, x, ignored=lambda p: False):
    """Each process has one sequence; gradients are the means over them."""
    rank, sharded = mesh.get_local_rank(), copy.deepcopy(whole)
    fully_shard(sharded, mesh=mesh, ignored_params={*filter(ignored, sharded.parameters())})
    expected, y = whole(x), sharded(x[rank : rank + 1])
    torch.testing.assert_close(y, expected[rank : rank + 1])
    (expected.square().sum() / 2).backward()
    y.square().sum().backward()
    found = dict(sharded.named_parameters())
    trained = {name: p for name, p in whole.named_parameters() if p.requires_grad}
    assert trained
    for name, parameter in trained.items():
        shard = found[name]
        if shard.shape[0] % 2 == 0:
            assert 2 * shard.to_local().numel() == shard.numel(), name
        grad = shard.grad.full_tensor()
        torch.testing.assert_close(
            grad, parameter.grad, msg=lambda text, name=name: f"{name}: {text}"
        )
    return sharded


TOKENS = torch.arange(2 * 12).reshape(2, 12) * 7 % 30


def plain():
    torch.manual_seed(0)
    return Decoder(30, 32, heads=4, layers=["gated_delta", "lucid"])


def adapted(model):
    import peft

    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False)
    return peft.get_peft_model(model, config)


def quantized(model):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model.requires_grad_(False), Int8WeightOnlyConfig(set_inductor_config=False))
    return model


def fsdp_of_adapters(mesh):
    """PyTorch splits no weights of torchao: each process has them whole."""
    assert_sharded_the_same(adapted(plain()), mesh, TOKENS)
    with pytest.raises(NotImplementedError, match="Int8Tensor"):
        fully_shard(quantized(plain()), mesh=mesh)
    whole = adapted(quantized(plain()))
    assert_sharded_the_same(whole, mesh, TOKENS, ignored=lambda p: not p.requires_grad)


def division_of_adapters(mesh):
    model = adapted(plain())
    with torch.no_grad():
        expected = model(TOKENS)
        refused = r"blocks.0.attention.q_proj must be an nn.Linear without .*found peft\..*Linear"
        with pytest.raises(TypeError, match=refused):
            divide_weights(model, mesh)
        merged = model.merge_and_unload()
        divide_weights(merged, mesh)
        torch.testing.assert_close(merged(TOKENS), expected, rtol=1e-4, atol=1e-4)
        with pytest.raises(TypeError, match=r"q_proj must be an nn.Linear without .*found peft\."):
            adapted(merged)(TOKENS)
    with pytest.raises(TypeError, match=r"q_proj.weight must be an ordinary .*found Int8Tensor"):
        divide_weights(quantized(plain()), mesh)
    model = plain()
    divide_weights(model, mesh)
    refused = r"q_proj.weight must be the DTensor that it made; found Int8Tensor"
    with pytest.raises(TypeError, match=refused):
        quantized(model)(TOKENS)


OF_LAYERS = (division, decoders, half_precision, bad_input, bad_calls, fsdp_of_a_layer)
OF_ADAPTERS = (fsdp_of_adapters, division_of_adapters)
HAS_ADAPTERS = all(map(find_spec, ("peft", "torchao")))
CHECKS = {check.__name__: check for check in (*OF_LAYERS, *(OF_ADAPTERS if HAS_ADAPTERS else ()))}
