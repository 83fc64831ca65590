"""Decoders trained on a mesh of data, context and tensor parallelism, beside one process.

FSDP2 shards the weights over data and context. All processes compute the expected losses alone.
"""

from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from torch import distributed
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from precondattn.layers.torch import Decoder, divide_tokens, divide_weights
from precondattn.parallel.layouts import tokens_of
from tests.layers.divided_layers import more_processes_than_keys

ALONE = None
LAYERS = {
    "heads": ["lucid", "gated_delta", {"mechanism": "path", "kv_heads": 2}],
    "contiguous": ["lucid", "kda", "ccq(gated_delta)", {"mechanism": "laser", "kv_heads": 2}],
    "zigzag": ["lucid", "differential"],
    "cyclic[block=4]": ["lucid(laser)", {"mechanism": "softmax", "kv_heads": 1}],
}
MIXED = ["gated_delta", "lucid", {"mechanism": "softmax", "kv_heads": 1}]
"""Mechanisms of layers, one of which has fewer key/value heads than there are processes"""
B, T, STEPS, VOCABULARY = 4, 24, 3, 12


class DividedTraining(NamedTuple):
    """A model of this process, and its tokens."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    tokens: torch.Tensor
    following: torch.Tensor
    shape: tuple[int, int, int] | None

    def losses(self, steps=STEPS):
        """The mean losses of all tokens in each step."""
        # FSDP2 takes means of gradients.
        processes = 1 if self.shape is ALONE else self.shape[0] * self.shape[1]
        losses = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            logits = self.model(self.tokens).flatten(0, 1)
            loss = cross_entropy(logits, self.following.flatten(), reduction="sum") / (B * T)
            (loss * processes).backward()
            self.optimizer.step()
            losses.append(loss.detach())
        losses = torch.stack(losses)
        if self.shape is not ALONE:
            distributed.all_reduce(losses)
            losses /= self.shape[2]  # Processes along this axis have the same tokens.
        return losses

    def save(self, path):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)

    def load(self, path):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        checkpoint.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )
        return self


def trained(shape, layers, layout, seed=0):
    """A model whose tokens and weights are divided on a mesh (data, context, tensor)."""
    tokens = torch.randint(VOCABULARY, (B, T + 1), generator=torch.Generator().manual_seed(1))
    before, after = tokens[:, :-1], tokens[:, 1:]
    torch.manual_seed(seed)
    model = Decoder(VOCABULARY, 16, heads=4, layers=layers, dtype=torch.float64)
    if shape is not ALONE:
        data, context, tensor = shape
        mesh = distributed.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp", "tp"))
        of_weights = distributed.init_device_mesh(
            "cpu", (data * context, tensor), mesh_dim_names=("shards", "tp")
        )
        row, part, _ = mesh.get_coordinate()
        order = "contiguous" if layout == "heads" else layout
        own = tokens_of(order, T, context, part)
        before, after = (x.chunk(data)[row][:, own] for x in (before, after))
        if tensor > 1:
            divide_weights(model, of_weights["tp"])
        divide_tokens(model, mesh["cp"], layout=layout)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=of_weights["shards"])
    return DividedTraining(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), before, after, shape
    )


def assert_trains_as_alone(shape, layers, layout):
    expected = trained(ALONE, layers, layout).losses()
    made = trained(shape, layers, layout)
    assert_close(made.losses(), expected, f"{layers} in {layout} on {shape}")
    assert expected[-1] < expected[0]
    return made.model


def assert_restarts(folder, shape, others, layout):
    """Training that stops on one mesh and goes on on another, from other weights."""
    expected = trained(ALONE, MIXED, layout).losses(4)
    path = folder / f"checkpoint {layout} {shape}"
    begun = trained(shape, MIXED, layout)
    first = begun.losses(2)
    begun.save(path)
    for other in others:
        second = trained(other, MIXED, layout, seed=1).load(path).losses(2)
        assert_close(torch.cat([first, second]), expected, f"{layout}: {shape} to {other}")


def assert_close(losses, expected, what):
    torch.testing.assert_close(
        losses, expected, rtol=1e-9, atol=1e-9, msg=lambda message: f"{what}: {message}"
    )


def on_four(folder):
    for layout, layers in LAYERS.items():
        model = assert_trains_as_alone((2, 2, 1), layers, layout)
    refused(model)
    refused_parts()
    more_processes_than_keys()
    others = [(1, 4, 1), (4, 1, 1), (1, 2, 2), ALONE]
    assert_restarts(folder, (2, 2, 1), others, "contiguous")


def on_eight(folder):
    zigzag = ["lucid", {"mechanism": "laser", "kv_heads": 1}]
    model = assert_trains_as_alone((2, 2, 2), zigzag, "zigzag")
    drawn_anew(model)
    assert_restarts(folder, (2, 2, 2), [(1, 4, 2)], "contiguous")


def refused(model):
    tokens = torch.zeros(1, 12, dtype=torch.int64)
    with pytest.raises(ValueError, match="a layer whose tokens are divided supports no mask"):
        model(tokens, mask=tokens == 0)


def refused_parts():
    """A convolution reads the three rows before each part."""
    mesh = distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model = Decoder(11, 16, heads=4, layers=["gla", "gated_delta"])
    divide_tokens(model, mesh["cp"], layout="contiguous")
    with pytest.raises(ValueError, match="needs parts of at least 3 tokens; found 2"):
        model(torch.zeros(1, 2, dtype=torch.int64))


def drawn_anew(model):
    """New weights of a model in which FSDP2 leaves some processes without rows of a weight."""
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    model.reset_parameters()
    assert all(torch.isfinite(p.full_tensor()).all() for p in model.parameters())
