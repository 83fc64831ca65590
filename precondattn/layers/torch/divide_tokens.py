"""Dividing the tokens of a model among processes (`divided.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from precondattn.layers.torch.attention import Attention
from precondattn.layers.torch.divided import DividedTokens, check_apart

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module


def divide_tokens(model: Module, mesh: DeviceMesh, *, layout: str = "heads") -> None:
    """Make every `Attention` of a model work on tokens that are divided among processes.

    Afterwards every process of the mesh calls the model with its part of the tokens, and gets the
    outputs for them. The gradient of a weight is this process's term, as in data parallelism, so
    include the processes of this mesh in `DistributedDataParallel` or `fully_shard`.

    Parameters
    ----------
    model : nn.Module
        A model with `Attention` layers, such as a `Decoder`, or one `Attention`.
    mesh : DeviceMesh
        A mesh of one dimension.
    layout : str
        "heads", "contiguous", "zigzag" or "cyclic[block=B]", as in
        `precondattn.parallel.torch.context_parallel`. In the first two, the tokens of process i
        follow those of process i − 1; for the others `to_layout` orders them.

    Raises
    ------
    TypeError, ValueError
        for a model without `Attention`, and the errors of `context_parallel`.

    Examples
    --------
    In each of four processes started by `torchrun`:

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
