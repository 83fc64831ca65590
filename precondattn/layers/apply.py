"""The call of a layer for both frameworks: from x to inputs, to the mechanism, to the output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precondattn.algebra.call import Keeping
from precondattn.arrays import Array, Arrays, arange_like, cast, namespace, zero_where_not
from precondattn.cache import Cache
from precondattn.cache.conversion import ordinary
from precondattn.cache.kept import without_kept
from precondattn.cache.kinds import empty_if_donated
from precondattn.execution.parts import Places
from precondattn.given import Given
from precondattn.layers.checks import LayerCall, LayerOutput
from precondattn.layers.functions import causal_convolution, linear, rotation
from precondattn.layers.histories import Histories, joined, split
from precondattn.layers.padding import packing
from precondattn.layers.parameters import Weights
from precondattn.layers.plan import OUT, PROJECTION, LayerPlan, PlanEntry
from precondattn.layers.recipe import RecipeTokens
from precondattn.layers.recipes.outputs import AFTER_PROJECTION
from precondattn.layers.segments import CallSegments


def apply(
    plan: LayerPlan,
    weights: Weights,
    call: LayerCall,
    *,
    depth: int,
    segments: CallSegments | None = None,
    keeping: Keeping | None = None,
    divided: Given = None,
    mechanism: Callable[..., Array] | None = None,
    summed: Callable[[Array], Array] | None = None,
) -> LayerOutput:
    """The output y (b, t, width), and the extended cache if a cache is given.

    If tokens are `divided` (`torch/divided.py`), there are no mask, segments and cache, and
    `mechanism` is called in place of the plan's. If heads are divided among devices, `summed`
    computes the sum over devices.
    """
    x, mask, positions, cache = call.x, call.mask, call.positions, call.cache
    if divided is not None and positions is None:
        positions = divided.positions
    tokens = None if mask is None else packing(mask)
    if positions is not None and positions.ndim == 1:
        positions = positions[None, :]
    if tokens is not None:
        x = tokens.packed(x)
        if positions is not None:
            xp = namespace(positions)
            positions = tokens.packed(xp.broadcast_to(positions, x.shape[:2]))
    valid = None if segments is None or segments.valid is None else segments.valid[..., None]
    if valid is not None:
        x = zero_where_not(valid, x)
    count = None if tokens is None else tokens.count
    callers, cache = cache, None if cache is None else ordinary(without_kept(cache))
    inner, rows = (None, None) if cache is None else split(cache, plan)
    place = None if segments is None else segments.place
    histories = Histories(rows, count, place)
    wide = x.dtype if x.dtype.itemsize >= 4 else namespace(x).float32
    angles: dict[tuple[int, float], tuple[Array, Array]] = {}

    def rotation_of(width: int, theta: float) -> tuple[Array, Array]:
        if (width, theta) not in angles:  # The angles are the same for queries and keys.
            at = _positions(x, cache, segments) if positions is None else positions
            angles[width, theta] = rotation(at, width, theta, wide)
        return angles[width, theta]

    values: dict[str, Array] = {}

    def made(entry: PlanEntry) -> Array:
        def convolved(rows: Array, weight: Array, bias: Array | None) -> Array:
            if divided is not None:
                return divided.convolved(rows, weight, bias)
            before = histories.preceded(entry.name, rows, weight.shape[0] - 1)
            return causal_convolution(before, weight, bias, histories.place)

        reads = {name: values[value] for name, value in entry.reads}
        tokens = RecipeTokens(x, rotation_of, reads, convolved, depth)
        return entry.recipe.make(tokens, weights[entry.name])

    for entry in plan.entries[:-1]:
        values[entry.name] = made(entry)
    inputs = {name: values[name] for name in plan.inputs}
    masks: Arrays = {} if count is None else {"lengths": count}
    if segments is not None:
        masks = segments.masks
    of_pairs = {"attn_mask": call.attn_mask, "prefix": call.prefix}
    of_pairs = {name: each for name, each in of_pairs.items() if each is not None}
    if tokens is not None and "attn_mask" in of_pairs:
        of_pairs["attn_mask"] = tokens.packed_pairs(of_pairs["attn_mask"])
    masks = {**masks, **of_pairs}
    after = None
    if inner is None:
        values[OUT] = (mechanism or plan.mechanism)(**inputs, **masks)
    else:
        options: dict[str, Any] = {} if keeping is None else keeping.options
        places = None
        if keeping is not None and histories.kept:
            places = Places(inner.length, x.shape[1], count, keeping)
        try:
            values[OUT], longer = plan.mechanism.extend(
                inner, **inputs, **masks, donate=call.donate, **options
            )
        finally:
            empty_if_donated(callers, inner)
        after = joined(longer, histories.kept, cache.kinds)  # type: ignore[union-attr]
        if places is not None:
            after = places.kept_in(after, histories.between(places))
    out = made(plan.entries[-1])
    last, bias = weights[OUT][PROJECTION], weights[OUT].get(AFTER_PROJECTION)
    if summed is None:
        y = linear(cast(out, x.dtype), last, axes=2, bias=bias)
    else:
        y = summed(linear(cast(out, x.dtype), last, axes=2))
        y = y if bias is None else y + bias
    if valid is not None:
        y = zero_where_not(valid, y)
    y = y if tokens is None else tokens.unpacked(y)
    return y if after is None else (y, after)


def _positions(x: Array, cache: Cache | None, segments: CallSegments | None) -> Array:
    """The positions of new tokens, (b, t) or (1, t)."""
    if segments is not None:
        return segments.place
    positions = arange_like(x.shape[1], x)[None, :]
    return positions if cache is None else positions + cache.length[:, None]
