"""One of several processes whose layer FSDP2 shards, beside the same layer whole.

PyTorch's DTensor keeps the mesh in its caches, and the mesh its group, so that a thread of gloo may
abort the process at its exit (docs/reports/gloo_at_exit.md). A layer alone divides no sequences and
registers no wait for it.
"""

import atexit
import copy
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard

from precondattn.layers.torch import Attention
from precondattn.parallel.torch.exit import wait_for_gloo
from tests.layers.layer_cases import layer


def fsdp_process(rank: int, count: int, folder: Path) -> None:
    """Raises an error unless outputs and gradients are those of the whole layer."""
    atexit.register(wait_for_gloo)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    attn = layer(Attention, "ccq(gated_delta)", dtype=torch.float64)
    x = torch.randn(count, 6, 24, dtype=torch.float64)
    expected = attn(x)
    (expected.sum() / count).backward()
    wrapped = copy.deepcopy(attn)
    wrapped.zero_grad()
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
    try:
        fully_shard(wrapped, mesh=distributed.init_device_mesh("cpu", (count,)))
        shard = wrapped.q_proj.weight
        assert shard.to_local().numel() * count == shard.numel()
        y = wrapped(x[rank : rank + 1])
        torch.testing.assert_close(y, expected[rank : rank + 1])
        y.sum().backward()
        for (name, sharded), parameter in zip(
            wrapped.named_parameters(), attn.parameters(), strict=True
        ):
            torch.testing.assert_close(sharded.grad.full_tensor(), parameter.grad, msg=name)
        wrapped.reset_parameters()
        assert torch.isfinite(wrapped(x)).all()
    finally:
        distributed.destroy_process_group()
    (folder / f"done {rank}").touch()
