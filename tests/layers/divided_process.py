"""One of four processes that train a decoder together: two parts of the batch, two of the tokens.

`python -m tests.layers.divided_process RANK FOLDER`. FSDP2 shards the weights over all four.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from precondattn.layers.torch import Decoder, divide_tokens
from precondattn.parallel.layouts import tokens_of

LAYERS = {
    "heads": ["lucid", "gated_delta", {"mechanism": "path", "kv_heads": 2}],
    "contiguous": ["lucid", "kda", "ccq(gated_delta)", {"mechanism": "laser", "kv_heads": 2}],
    "zigzag": ["lucid", "differential"],
    "cyclic[block=4]": ["lucid(laser)", {"mechanism": "softmax", "kv_heads": 1}],
}
B, T, STEPS = 4, 24, 3


def decoder(layout):
    torch.manual_seed(0)
    return Decoder(11, 16, heads=4, layers=LAYERS[layout], dtype=torch.float64)


def train(model, tokens, following, share):
    """The losses of some steps of this process's tokens; `share`: 1 / (mean over all processes)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = cross_entropy(model(tokens).flatten(0, 1), following.flatten(), reduction="sum")
        loss = loss / (B * T)
        (loss * share).backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def check(layout, mesh, everyone):
    tokens = torch.randint(11, (B, T + 1), generator=torch.Generator().manual_seed(1))
    expected = train(decoder(layout), tokens[:, :-1], tokens[:, 1:], 1)
    data, context = mesh.get_coordinate()
    order = "contiguous" if layout == "heads" else layout
    rows, own = slice(2 * data, 2 * data + 2), tokens_of(order, T, 2, context)
    model = decoder(layout)
    fully_shard(model, mesh=everyone)
    divide_tokens(model, mesh["cp"], layout=layout)
    losses = train(model, tokens[rows, :-1][:, own], tokens[rows, 1:][:, own], 4)
    distributed.all_reduce(losses)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9, msg=lambda m: layout + m)
    assert expected[-1] < expected[0]
    return model


def main(rank, folder):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=4)
    mesh = distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    everyone = distributed.init_device_mesh("cpu", (4,))
    for layout in LAYERS:
        model = check(layout, mesh, everyone)
    refused(model)
    refused_parts(mesh)
    distributed.destroy_process_group()
    (Path(folder) / f"done {rank}").touch()


def refused(model):
    tokens = torch.zeros(1, 12, dtype=torch.int64)
    with pytest.raises(ValueError, match="a layer whose tokens are divided supports no mask"):
        model(tokens, mask=tokens == 0)


def refused_parts(mesh):
    """A convolution reads the three rows before each part."""
    model = Decoder(11, 16, heads=4, layers=["gla", "gated_delta"])
    divide_tokens(model, mesh["cp"], layout="contiguous")
    with pytest.raises(ValueError, match="needs parts of at least 3 tokens; found 2"):
        model(torch.zeros(1, 2, dtype=torch.int64))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
