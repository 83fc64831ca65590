"""The mask function of this integration, which Transformers calls once for all layers of a type.

A mechanism is causal and has its window itself, so that all it needs is which slots are padding, or
which packed sequence each token belongs to. That is a tensor (b, 1, 1, s) in place of the mask
(b, 1, t, s): with four axes, Transformers passes it on as it is.

    boolean   False for padding
    integers  the number of the packed sequence
    None      neither

A user's own mask (b, heads or 1, t, s) is passed on too. It restricts a mechanism's pattern. A mask
(b, s) of other numbers than 0 and 1 is refused before each call, because Transformers converts its
numbers to booleans.

Transformers describes the pattern of a mask by a function of indices. A pattern that is neither
causal, nor a causal window, nor either of these packed, raises. An encoder has a mask function of
its own, whose pattern is that every token sees every other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    packed_sequence_mask_function,
    sliding_window_overlay,
)

from precondattn.algebra.mechanism import Mechanism
from precondattn.given import Given

Pattern = Callable[..., Any]


def mask_of_tokens(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Tensor | int = 0,
    kv_offset: Tensor | int = 0,
    mask_function: Pattern = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **others: Given,
) -> Tensor | None:
    """Padding or packed sequences (b, 1, 1, s), with the signature of Transformers' `sdpa_mask`."""
    if use_vmap:
        raise ValueError(UNKNOWN)
    if torch.compiler.is_compiling():
        like = torch.arange(q_length, device=others.get("device"))
        sequences = traced_sequences(mask_function, batch_size, like)
    else:
        sequences = packed_sequences(mask_function)
    if sequences is not None:
        return sequences.to(torch.int32)[:, None, None, :]
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask: padding (b, s) expected; found the shape {(*attention_mask.shape,)}"
        )
    if not torch.compiler.is_compiling():
        seen = int(q_offset) + q_length
        if attention_mask.shape[1] < seen:
            raise ValueError(
                f"attention_mask: {seen} tokens, with those in the cache, need as many columns; "
                f"found {attention_mask.shape[1]}"
            )
        if allow_is_causal_skip and bool(attention_mask[:, :seen].all()):
            return None
    return _columns(attention_mask.bool(), kv_offset, kv_length)[:, None, None, :]


def mask_of_encoder(
    *,
    mask_function: Pattern,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **others: Given,
) -> Tensor | None:
    """Padding (b, 1, 1, s) for an encoder; None without padding."""
    if mask_function is not bidirectional_mask_function or use_vmap:
        raise ValueError(
            "attention_mask: the model asks for a pattern in which a token does not see all others "
            "(causal, or a window), and its attention was replaced by that of an encoder"
        )
    if attention_mask is None or (not torch.compiler.is_compiling() and attention_mask.all()):
        return None
    return attention_mask.bool()[:, None, None, :]


def _columns(mask: Tensor, start: Tensor | int, count: int) -> Tensor:
    """Columns `start` to `start + count` of a mask (b, s); those beyond its end are False."""
    index = torch.arange(count, device=mask.device) + start
    inside = index < mask.shape[1]
    return mask.index_select(1, index.clamp(max=mask.shape[1] - 1)) & inside


UNKNOWN = (
    "attention_mask: the model asks for a pattern that is neither causal nor a causal sliding "
    "window (such as bidirectional attention among image tokens), which no mechanism has"
)


def _nothing(*indices: Given) -> None:
    return None


_AND = and_masks(_nothing).__code__
_WINDOW = sliding_window_overlay(1).__code__
_PACKED = packed_sequence_mask_function(None).__code__
_remap = getattr(
    masking_utils, "remap_positions_for_packed_sequence", None
)  # Transformers 5.23 and newer have it.
_REMAPPED = None if _remap is None else _remap(_nothing, None).__code__
KNOWN = (_AND, _WINDOW, _PACKED, _REMAPPED)


def packed_sequences(pattern: Pattern) -> Tensor | None:
    """The ids of the packed sequences (b, t) of a causal pattern; None if there are none."""
    if pattern is causal_mask_function:
        return None
    sequences, is_causal = None, False
    waiting = [pattern]
    while waiting:
        part = waiting.pop()
        if part is causal_mask_function:
            is_causal = True
            continue
        code = getattr(part, "__code__", None)
        variables = _closure_of(part)
        if code is _AND:
            waiting += variables["mask_functions"]
        elif code is not None and code is _REMAPPED:
            waiting.append(variables["mask_function"])
        elif code is _PACKED:
            sequences = variables["packed_sequence_mask"]
        elif code is not _WINDOW:
            raise ValueError(UNKNOWN)
    if not is_causal:
        raise ValueError(UNKNOWN)
    return sequences


def traced_sequences(pattern: Pattern, batch: int, index: Tensor) -> Tensor | None:
    """The packed sequences of a pattern in compiled code, where no function shows what it holds.

    The pattern is computed for each token and the one before it, which are of one sequence if it is
    true. Its shape says whether it depends on the batch, as that of packed sequences does. Only
    `packed_sequences` looks at the parts of a pattern, and refuses unknown ones.
    """
    if pattern is causal_mask_function:
        return None
    code = getattr(pattern, "__code__", None)
    if code is None or code not in KNOWN:
        raise ValueError(UNKNOWN)
    rows = torch.arange(batch, device=index.device)[:, None, None]
    q, k = index[None], (index - 1).clamp(min=0)[None]
    is_same = pattern(rows, index[:1], q, k)
    return None if is_same.ndim < 3 else (~is_same[:, 0]).cumsum(-1)


def _closure_of(function: Pattern) -> dict[str, Given]:
    """The variables in the closure of a nested function, by name."""
    names = function.__code__.co_freevars
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


class ModelMasks(NamedTuple):
    """The masks of one call, by a mechanism's names."""

    key_mask: Tensor | None = None
    segment_ids: Tensor | None = None
    attn_mask: Tensor | None = None


def masks_of(
    mask: Tensor | None, mechanism: Mechanism, start: Tensor | int, count: int
) -> ModelMasks:
    """The masks that an attention function gets, for `count` queries from position `start` on.

    A mask that was not made by `mask_of_tokens` is the user's own, (b, heads or 1, t, s).
    """
    if mask is None:
        return ModelMasks()
    if mask.ndim == 4 and mask.shape[1] == mask.shape[2] == 1 and not mask.is_floating_point():
        rows = mask[:, 0, 0]
        return ModelMasks(rows) if mask.dtype == torch.bool else ModelMasks(None, rows)
    if mask.ndim != 4 or mask.dtype != torch.bool or mask.shape[2] != count:
        raise ValueError(
            f"attention_mask: padding (b, s) expected, or a boolean mask of your own (b, heads or "
            f"1, t, s), True where a token may attend to another; found the shape "
            f"{(*mask.shape,)} and {mask.dtype}"
        )
    check_own_pattern(mask, mechanism, start)
    return ModelMasks(attn_mask=mask)


def check_own_pattern(mask: Tensor, mechanism: Mechanism, start: Tensor | int) -> None:
    """Raise for a mask (b, h or 1, t, s) that lets a token attend where the mechanism does not.

    In Transformers such a mask replaces the pattern of a model, and a mechanism can only restrict
    its own.
    """
    if torch.compiler.is_compiling():
        raise ValueError(
            "attention_mask: a mask of your own has to be read, which compiled code does not do; "
            "call the model without torch.compile"
        )
    causal, window = mechanism.offers.causal, mechanism.offers.window
    query = torch.arange(mask.shape[2], device=mask.device)[:, None] + start
    key = torch.arange(mask.shape[3], device=mask.device)
    outside = (query < key) & causal
    if window is not None:
        outside = outside | ((query - key).abs() >= window)
    if bool((mask & outside).any()):
        pattern = "causal" if window is None else f"a window of {window}"
        raise ValueError(
            f"attention_mask: this mask of your own lets a token attend where {mechanism} does "
            f"not, whose pattern is {pattern}; a mask can restrict it, not replace it"
        )


HANDLE = "precondattn_checked_masks"
"""The attribute of a model with the handle of its check."""


def check_masks(model: Given, is_checked: bool = True) -> None:
    """Check the masks of a model's calls from now on, or no longer."""
    if handle := model.__dict__.pop(HANDLE, None):
        handle.remove()
    if is_checked:
        setattr(model, HANDLE, model.register_forward_pre_hook(_check, with_kwargs=True))


def _check(model: Given, args: tuple[Given, ...], kwargs: Given) -> None:
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    if isinstance(mask, Tensor) and mask.ndim == 2:
        check_numbers(mask)


def check_numbers(mask: Tensor) -> None:
    """Raise an error for a mask (b, s) with floating-point numbers other than 0 and 1.

    In compiled code the device raises it.
    """
    if not mask.is_floating_point():
        return
    message = "attention_mask (b, s) must have 1 for tokens and 0 for padding; found others"
    are_valid = ((mask == 0) | (mask == 1)).all()
    if torch.compiler.is_compiling():
        torch._assert_async(are_valid, message)
    elif not are_valid:
        raise ValueError(message)
