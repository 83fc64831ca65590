"""PyTorch: the frame of an operator as a text and tensors.

A graph contains only strings and tensors. If the text is empty, only the tensors are known. Lengths
of caches and symbolic sizes, which a compiler does not know, are read when the operator runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from precondattn.arrays import host_integers
from precondattn.frame import EXTENSION, OF_TOKENS, UNKNOWN, Frame, Layout, held_by_all, rebuilt
from precondattn.limits import KEPT


@lru_cache(maxsize=KEPT)
def text_of(layout: Layout) -> str:
    """A layout as a text like `"full:6:6:::lengths"`: kind, t, s, held, longest, masks."""
    if layout == UNKNOWN:
        return ""
    numbers = (layout.t, layout.s, layout.held, layout.longest)
    texts = ("" if number is None else str(number) for number in numbers)
    return ":".join((layout.kind, *texts, ",".join(sorted(layout.masks))))


@lru_cache(maxsize=KEPT)
def layout_of(text: str) -> Layout:
    """The layout from a text of `text_of`."""
    if not text:
        return UNKNOWN
    kind, *numbers, masks = text.split(":")
    t, s, held, longest = (int(number) if number else None for number in numbers)
    return Layout(kind, t, s, frozenset(filter(None, masks.split(","))), held, longest)


def frame_of(text: str, tensors: Sequence[Tensor | None], like: Tensor) -> Frame:
    """The frame from the text of its layout and its `sources`, on the device of `like`."""
    layout = layout_of(text)
    if layout.kind and len(tensors) >= OF_TOKENS:
        layout = _found(layout, *tensors[:2])
    return rebuilt(layout, tensors, like)


def _found(layout: Layout, q_position: Tensor, k_position: Tensor) -> Layout:
    """The layout completed by the sizes that a compiler did not know."""
    t, s = q_position.shape[1], k_position.shape[1]
    if layout.kind == EXTENSION:
        s = s - t
    layout = layout._replace(t=t, s=s).without_symbols
    if layout.kind != EXTENSION or layout.longest is not None:
        return layout
    lengths = host_integers(q_position[:, 0])
    if lengths is None:
        return layout
    held = None if layout.masks else held_by_all(lengths, t, s)
    return layout._replace(held=held, longest=max(lengths, default=0))
