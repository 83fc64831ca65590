"""Checks of the arguments of a layer's call, before any work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from precondattn.algebra.call import Keeping
from precondattn.arrays import FLOATING, Array, dtype_name, library_of, namespace
from precondattn.cache import Cache
from precondattn.cache.kept import without_kept
from precondattn.execution import pair_masks
from precondattn.execution.array_checks import check_stored
from precondattn.execution.pair_masks import ATTN_MASK, check_takes_masks
from precondattn.given import Given
from precondattn.layers.histories import ROWS
from precondattn.layers.plan import LayerPlan
from precondattn.layers.segments import CallSegments, segments_of

OWN = {"key_mask", "first_token"}
"""The buffers that a mechanism's cache may have besides those of its leaves."""

LayerOutput = Any
"""The output y, or y and the extended cache if a cache is given."""


class LayerCall(NamedTuple):
    """The arguments of a layer's call; None for those that are not given."""

    x: Array
    mask: Array | None = None
    positions: Array | None = None
    cache: Given = None
    segment_ids: Array | None = None
    cu_seqlens: Given = None
    attn_mask: Array | None = None
    prefix: Given = None
    donate: bool = False
    keep: int = 0
    states_every: int | None = None

    def refuse(self, owner: str, *names: str) -> None:
        """Raise an error if any of these arguments of a layer with divided tokens is given."""
        given = [name for name in names if getattr(self, name) is not None]
        if given:
            raise ValueError(
                f"{owner}: a layer whose tokens are divided supports no {' and '.join(given)}"
            )


def checked(
    plan: LayerPlan, weight: Array, call: LayerCall, is_cast: Callable[[Array], bool]
) -> tuple[CallSegments | None, Keeping | None]:
    """The segments of a call and the states that it keeps, after a check of all arguments.

    `is_cast` says whether autocast chooses the dtype of x.
    """
    library, x, mask, positions = library_of(weight), call.x, call.mask, call.positions
    if library_of(x) != library:
        raise TypeError(f"x must be an array of {library}; found {type(x).__name__}")
    check_stored("x", x, of_nested="use torch.nested.to_padded_tensor(x, 0.0), and give a mask")
    if x.ndim != 3 or x.shape[2] != plan.width:
        raise ValueError(f"x must have shape (b, t, {plan.width}); found {tuple(x.shape)}")
    if x.dtype != weight.dtype and not (dtype_name(x) in FLOATING and is_cast(x)):
        raise TypeError(f"x must be {dtype_name(weight)}, as the weights; found {dtype_name(x)}")
    b, t = x.shape[:2]
    if mask is not None:
        if library_of(mask) != library or mask.dtype != namespace(mask).bool:
            found = dtype_name(mask) if library_of(mask) else type(mask).__name__
            advice = "; where 0 is padding, write mask != 0" if library_of(mask) == library else ""
            raise TypeError(f"mask must be a boolean array of {library}; found {found}{advice}")
        if tuple(mask.shape) != (b, t):
            raise ValueError(f"mask must have shape {(b, t)}; found {tuple(mask.shape)}")
    if positions is not None:
        if library_of(positions) != library:
            raise TypeError(f"positions must be of {library}; found {type(positions).__name__}")
        if tuple(positions.shape) not in ((t,), (1, t), (b, t)):
            raise ValueError(
                f"positions must have shape ({t},) or {(b, t)}; found {tuple(positions.shape)}"
            )
    if call.segment_ids is not None or call.cu_seqlens is not None:
        if mask is not None:
            raise ValueError(
                "mask can not be given with segments; give padding a segment of its own instead"
            )
        if call.cache is not None:
            raise ValueError("cache can not be given with segments: its sequences are a batch")
    if call.cache is not None:
        _check_cache(plan, call.cache, b)
    if call.attn_mask is not None:
        _check_attn_mask(plan, call)
    keeping = Keeping.read("Attention", call.keep, call.states_every)
    if keeping is not None and call.cache is None:
        raise ValueError("Attention: keep and states_every are for a call with a cache")
    segments = segments_of(str(plan.mechanism), call.segment_ids, call.cu_seqlens, x)
    return segments, keeping


def _check_attn_mask(plan: LayerPlan, call: LayerCall) -> None:
    if call.cache is None:
        b, t = call.x.shape[:2]
        check_takes_masks(plan.mechanism, frozenset({ATTN_MASK}))
        sizes = {"b": b, "h": plan.sizes.by_letter["h"], "t": t, "s": t}
        pair_masks.check_attn_mask(str(plan.mechanism), call.attn_mask, call.x, sizes)
    elif call.mask is not None:
        raise ValueError(
            "attn_mask can not be given with mask and a cache: its columns are tokens by their "
            "position, and padding has none; give key columns that are False"
        )


def _check_cache(plan: LayerPlan, cache: Given, b: int) -> None:
    if not isinstance(cache, Cache):
        raise TypeError(f"cache must be from init_cache; found {type(cache).__name__}")
    if cache.kinds and not cache.store:
        raise ValueError("cache: it was donated and can not be used again")
    rows = {ROWS + name: (count, *shape) for name, count, shape in plan.histories}
    needed = {*rows, *plan.buffers}
    if without_kept(cache).store.keys() - OWN != needed:
        raise ValueError(
            f"cache is of another layer: it has the buffers {sorted(cache.store)}, and "
            f"{sorted(needed)} are needed"
        )
    if cache.length.shape[0] != b:
        raise ValueError(f"cache has {cache.length.shape[0]} sequences, and x has {b}")
    for name, shape in rows.items():
        found = tuple(cache.store[name].shape)
        if found != (b, *shape):
            raise ValueError(f"cache: {name!r} must have shape {(b, *shape)}; found {found}")
