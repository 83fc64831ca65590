"""Weights of timm's vision transformers by the names of ours.

timm has one matrix for q, k and v, which become `q_proj`, `k_proj` and `v_proj` of
`VisionAttention`, and two for the logits and values of outlook attention; others, such as those of
layer norms, keep their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations

from torch import Tensor


def from_timm(
    state_dict: Mapping[str, Tensor], heads: int, *, order: str = "qkv"
) -> dict[str, Tensor]:
    """A `state_dict` of timm for `load_state_dict` of the module here.

    It serves timm's `Attention`, `WindowAttention`, `XCA`, `OutlookAttention`, and DaViT's
    `ChannelAttention` for `VisionAttention`, XCiT's block for `XCABlock`, and timm's
    `VisionTransformer`. A name that is not known here is kept, so that `load_state_dict` names it.

    Parameters
    ----------
    state_dict : dict of tensors
        With the names of timm, of a module or of a model that contains such modules.
    heads : int
        Their number of heads.
    order : str
        What the thirds of timm's matrix `qkv` are here: `"vqk"` for DaViT's `ChannelAttention`,
        which reads what it calls q by the products of k and v.

    Raises
    ------
    ValueError
        for a matrix of q, k and v that does not have this number of heads, and another order.

    Examples
    --------
    >>> import torch
    >>> from precondattn.layers.torch import from_timm
    >>> weights = {"attn.qkv.weight": torch.ones(24, 6), "norm1.bias": torch.ones(6)}
    >>> {name: tuple(tensor.shape) for name, tensor in from_timm(weights, heads=2).items()}
    {'attn.q_proj.weight': (8, 6), 'attn.k_proj.weight': (8, 6), 'attn.v_proj.weight': (8, 6), \
'norm1.bias': (6,)}
    """
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1:
        raise ValueError(f"heads must be a whole number, 1 or above; found {heads!r}")
    if order not in map("".join, permutations("qkv")):
        raise ValueError(f"order must have each of q, k and v once, such as 'vqk'; found {order!r}")
    last = ("qkv.weight", "attn.weight")  # The second, of outlook attention, has no q and k.
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
    """Our weights of one of timm's, of an attention module; None if it is no weight of it."""
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
    """The last norm, which timm calls otherwise where it follows a mean of tokens."""
    return name.replace("fc_norm.", "norm.", 1) if name.startswith("fc_norm.") else name
