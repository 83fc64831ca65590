"""Dividing the tokens of a model among processes: its attention layers get parts (`divided.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from precondattn.layers.torch.attention import Attention
from precondattn.layers.torch.divided import DividedTokens, check_apart

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module


def divide_tokens(model: Module, mesh: DeviceMesh, *, layout: str = "heads") -> None:
    """Let every `Attention` of a model have a part of the tokens on each process of a mesh.

    Afterwards the model is called by every process with its tokens, and returns what belongs to
    them. Gradients of weights are each process's term, as in data parallelism: give the processes
    of this mesh to `DistributedDataParallel` or `fully_shard` too.

    Parameters
    ----------
    model : nn.Module
        Such as a `Decoder` or one `Attention`.
    mesh : DeviceMesh
        Of one dimension.
    layout : str
        "heads", "contiguous", "zigzag" or "cyclic[block=B]", as of
        `precondattn.parallel.torch.context_parallel`. In the first two the tokens of process i come
        after those of process i − 1; for the others `to_layout` orders them.

    Raises
    ------
    TypeError, ValueError
        for a model without `Attention`, and what `context_parallel` raises.

    Examples
    --------
    In each of four processes that `torchrun` has started:

    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from precondattn.layers.torch import Decoder, divide_tokens
    >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))  # doctest: +SKIP
    >>> model = Decoder(100, 32, heads=4, layers=["lucid", "gated_delta"])
    >>> divide_tokens(model, mesh["cp"])  # doctest: +SKIP
    >>> logits = model(tokens)  # This process's tokens.  # doctest: +SKIP
    """
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    if not layers:
        raise ValueError(f"model has no Attention; found {type(model).__name__}")
    divided = [DividedTokens(layer.mechanism, mesh, layout) for layer in layers]
    for layer in layers:
        if layer.divided_weights is not None:
            check_apart("divide_tokens", mesh, layer.divided_weights.mesh)
    for layer, of_layer in zip(layers, divided, strict=True):
        layer.divided = of_layer
