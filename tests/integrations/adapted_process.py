"""One of two processes with a model that has adapters, int8 weights, or both."""

import atexit
import copy
from pathlib import Path

import peft
import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from precondattn.layers.torch import Decoder, divide_weights
from precondattn.parallel.torch.exit import wait_for_gloo

TOKENS = torch.arange(2 * 12).reshape(2, 12) * 7 % 30


def adapted_process(rank: int, check: str, folder: Path) -> None:
    atexit.register(wait_for_gloo)
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    try:
        CHECKS[check](distributed.init_device_mesh("cpu", (2,)))
    finally:
        distributed.destroy_process_group()
    (folder / f"done {rank}").touch()


def decoder():
    torch.manual_seed(0)
    return Decoder(30, 32, heads=4, layers=["gated_delta", "lucid"])


def adapted(model):
    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False)
    return peft.get_peft_model(model, config)


def quantized(model):
    quantize_(model.requires_grad_(False), Int8WeightOnlyConfig(set_inductor_config=False))
    return model


def fsdp_of_adapters(mesh):
    whole = adapted(decoder())
    assert_sharded_the_same(whole, mesh)


def fsdp_of_int8(mesh):
    """PyTorch splits no weights of torchao: each process has them whole."""
    with pytest.raises(NotImplementedError, match="Int8Tensor"):
        fully_shard(quantized(decoder()), mesh=mesh)
    whole = adapted(quantized(decoder()))
    assert_sharded_the_same(whole, mesh, ignored=lambda p: not p.requires_grad)


def assert_sharded_the_same(whole, mesh, ignored=lambda p: False):
    """Each process has one sequence; gradients are the means over them."""
    rank, sharded = mesh.get_local_rank(), copy.deepcopy(whole)
    fully_shard(sharded, mesh=mesh, ignored_params={*filter(ignored, sharded.parameters())})
    expected, y = whole(TOKENS), sharded(TOKENS[rank : rank + 1])
    torch.testing.assert_close(y, expected[rank : rank + 1])
    (expected.square().sum() / 2).backward()
    y.square().sum().backward()
    found = dict(sharded.named_parameters())
    adapters = {name: p for name, p in whole.named_parameters() if p.requires_grad}
    assert adapters
    for name, parameter in adapters.items():
        shard = found[name]
        assert 2 * shard.to_local().numel() == shard.numel(), name
        grad = shard.grad.full_tensor()
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


def division_of_adapters(mesh):
    model = adapted(decoder())
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


def division_of_int8(mesh):
    with pytest.raises(TypeError, match=r"q_proj.weight must be an ordinary .*found Int8Tensor"):
        divide_weights(quantized(decoder()), mesh)
    model = decoder()
    divide_weights(model, mesh)
    refused = r"q_proj.weight must be the DTensor that it made; found Int8Tensor"
    with pytest.raises(TypeError, match=refused):
        quantized(model)(TOKENS)


CHECKS = {
    check.__name__: check
    for check in (fsdp_of_adapters, fsdp_of_int8, division_of_adapters, division_of_int8)
}
