"""The conversion of weights from timm's vision transformers to the modules here.

timm has one matrix for q, k and v, which is split into `q_proj`, `k_proj` and `v_proj` of
`VisionAttention`, and two matrices for the logits and values of outlook attention. Other weights,
such as those of layer norms, keep their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations

from torch import Tensor

from precondattn.given import at_least


def from_timm(
    state_dict: Mapping[str, Tensor], heads: int, *, order: str = "qkv"
) -> dict[str, Tensor]:
    """The `state_dict` for a module of this library, from a `state_dict` of timm.

    It converts timm's `Attention`, `WindowAttention`, `XCA`, `OutlookAttention` and DaViT's
    `ChannelAttention` to `VisionAttention`, XCiT's block to `XCABlock`, and timm's
    `VisionTransformer`. Unknown names are kept, so that `load_state_dict` reports them.

    Parameters
    ----------
    state_dict : dict of tensors
        The weights of such a module, or of a model that contains such modules, by timm's names.
    heads : int
        The number of heads.
    order : str
        The order of q, k and v in timm's matrix `qkv`. It is `"vqk"` for DaViT's
        `ChannelAttention`, which weights what it calls q by the products of k and v.

    Raises
    ------
    ValueError
        for a matrix of q, k and v whose size does not fit the number of heads, and for an unknown
        order.

    Examples
    --------
    >>> import torch
    >>> from precondattn.layers.torch import from_timm
    >>> weights = {"attn.qkv.weight": torch.ones(24, 6), "norm1.bias": torch.ones(6)}
    >>> {name: tuple(tensor.shape) for name, tensor in from_timm(weights, heads=2).items()}
    {'attn.q_proj.weight': (8, 6), 'attn.k_proj.weight': (8, 6), 'attn.v_proj.weight': (8, 6), \
'norm1.bias': (6,)}
    """
    heads = at_least(1, "heads", heads)
    if order not in map("".join, permutations("qkv")):
        raise ValueError(f"order must have each of q, k and v once, such as 'vqk'; found {order!r}")
    last = ("qkv.weight", "attn.weight")  # The second is of outlook attention, without q and k.
    places = {name.removesuffix(own) for name in state_dict for own in last if _is(name, own)}
    ours: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        place = next((p for p in sorted(places, key=len, reverse=True) if name.startswith(p)), None)
        own = (
            None if place is None else _of_attention(name.removeprefix(place), tensor, heads, order)
        )
        if own is None:
            ours[_renamed(name)] = tensor
        else:
            ours |= {f"{place}{key}": value.contiguous() for key, value in own.items()}
    return ours


def _of_attention(name: str, tensor: Tensor, heads: int, order: str) -> dict[str, Tensor] | None:
    """The converted weights of one weight of timm's attention; None for any other weight."""
    if name in ("qkv.weight", "qkv.bias"):
        if tensor.shape[0] % (3 * heads):
            raise ValueError(
                f"heads: the {tensor.shape[0]} rows of {name} are not q, k and v of {heads} heads"
            )
        kind = name.removeprefix("qkv.")
        parts = tensor.chunk(3)
        return {f"{row}_proj.{kind}": part for row, part in zip(order, parts, strict=True)}
    if name in ("attn.weight", "attn.bias"):
        return {name.replace("attn", "logits_proj"): tensor}
    if name in ("v.weight", "v.bias"):
        return {name.replace("v", "v_proj", 1): tensor}
    if name in ("proj.weight", "proj.bias"):
        return {f"o_{name}": tensor}
    if name == "relative_position_bias_table":
        return {"inputs.bias_table.weight": tensor}
    return {"inputs.logit_scale.weight": tensor.flatten()} if name == "temperature" else None


def _is(name: str, last: str) -> bool:
    return name == last or name.endswith(f".{last}")


def _renamed(name: str) -> str:
    """The name of the last norm, which timm names differently if it follows a mean of tokens."""
    return name.replace("fc_norm.", "norm.", 1) if name.startswith("fc_norm.") else name
