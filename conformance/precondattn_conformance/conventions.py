"""Conventions that a backend may leave unpromised (`pa.CONVENTIONS`), and cases that need them.

    bottom_right   fewer queries than keys, where a mask depends on positions
    head_order     two different head counts above 1, so that heads are grouped
    empty_rows     a row that sees no key, by a mask or by biases of −∞
    hidden_nan     the check `future`
    float64        the dtype float64

Results that depend on an unpromised convention are not compared. Without bottom_right, a case with
fewer queries is declined. Without head_order, a case with grouped heads gets as many heads of each
kind. Without empty_rows, rows that see no key are left out of outputs and cotangents. Without
hidden_nan, a key has other finite numbers instead of NaN. Without float64, the numbers of a float64
case are rounded to float32, and the bounds are those of float32.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

import precondattn as pa
from precondattn.algebra.declaration import HEADS
from precondattn.dispatch.discovery import discover
from precondattn_conformance.case import Case
from precondattn_conformance.declared import mechanism_of
from precondattn_conformance.inputs import CallLayout
from precondattn_conformance.layout_names import named
from precondattn_conformance.oracle import Oracle

BOTTOM_RIGHT, EMPTY_ROWS, FLOAT64 = "bottom_right", "empty_rows", "float64"
HEAD_ORDER, HIDDEN_NAN = "head_order", "hidden_nan"

MEANING = {
    BOTTOM_RIGHT: "with fewer queries than keys, the last query is aligned with the last key",
    HEAD_ORDER: "of h query heads and n key heads, query head i reads key head floor(i n / h)",
    EMPTY_ROWS: "a row that sees no key is 0, and has no gradient",
    HIDDEN_NAN: "a NaN or infinity in a key reaches no query that does not see the key",
    FLOAT64: "float64 inputs are computed in float64",
}
"""The meaning of each convention, in the order of reports."""

PROBE = "conventions"
"""The name of the check that tests one convention."""
PROBES = {
    BOTTOM_RIGHT: CallLayout(BOTTOM_RIGHT, t=3, s=9, h=2, n=2, values_per_head=1),
    HEAD_ORDER: CallLayout(HEAD_ORDER),
    EMPTY_ROWS: CallLayout(EMPTY_ROWS, h=2, n=2, values_per_head=1, mask="key_mask"),
    HIDDEN_NAN: CallLayout(HIDDEN_NAN, h=2, n=2, values_per_head=1),
    FLOAT64: CallLayout(FLOAT64, h=2, n=2, values_per_head=1),
}
"""A small call for each convention, which needs only this one."""


def unpromised_by(backend: str | tuple[str, ...] | None) -> frozenset[str]:
    """The conventions that the backend under test, the first one named, does not promise."""
    if not backend:
        return frozenset()
    name = backend if isinstance(backend, str) else backend[0]
    return pa.CONVENTIONS - getattr(discover().named(name), "promises", pa.CONVENTIONS)


def require_promised(case: Case, backend: str | None, unpromised: frozenset[str]) -> None:
    """Raise an UnsupportedError for a case that can not be compared without these conventions."""
    if case.check == PROBE:
        return
    for convention in sorted(unpromised & {BOTTOM_RIGHT, HEAD_ORDER} & needed(case)):
        raise pa.UnsupportedError(f"{backend} does not promise {meaning(convention)}")


def meaning(convention: str) -> str:
    """A convention with its meaning: `bottom_right (with fewer queries than keys, …)`."""
    return f"{convention} ({MEANING[convention]})"


def needed(case: Case) -> frozenset[str]:
    """The conventions on which the result of a case depends."""
    found = _needed(case.mechanism, case.layout, case.kind)
    if case.dtype == "float64":
        found |= {FLOAT64}
    has_bad_keys = case.check == "future" or case.layout.name == HIDDEN_NAN
    is_causal = mechanism_of(case.mechanism).offers.causal
    return found | {HIDDEN_NAN} if has_bad_keys and is_causal else found


@cache
def _needed(expression: str, layout: CallLayout, kind: str) -> frozenset[str]:
    mechanism = mechanism_of(expression)
    letters = {letter for pattern in mechanism.inputs.values() for letter in pattern.letters}
    depends_on_positions = mechanism.offers.causal or mechanism.offers.window is not None
    found = set()
    if layout.t < layout.s and letters >= {"t", "s"} and depends_on_positions:
        found.add(BOTTOM_RIGHT)
    if len({layout.sizes[letter] for letter in letters & {*HEADS}} - {1}) > 1:
        found.add(HEAD_ORDER)
    if kind == "hidden_by_bias" or _has_empty_rows(mechanism, layout):
        found.add(EMPTY_ROWS)
    return frozenset(found)


def _has_empty_rows(mechanism: pa.Mechanism, layout: CallLayout) -> bool:
    """Whether the masks of a call hide all keys from some query."""
    leaves = mechanism.program.leaves
    relates_tokens = any(leaf.relates_tokens for leaf in leaves)
    hiding = ("lengths", "key_mask", "attn_mask")
    if not relates_tokens or not any(map(layout.has, hiding)):
        return False
    if any(isinstance(leaf, pa.Windowed) for leaf in leaves):
        return True  # A small window of the grid may be fully masked.
    masks, (b, t, s) = layout.masks(), (layout.b, layout.t, layout.s)
    position, query = np.arange(s), np.arange(s - t, s)
    valid = np.ones((b, s), bool) & masks.get("key_mask", np.asarray(True))
    if "lengths" in masks:
        valid &= position < masks["lengths"][:, None]
    first, last = np.zeros((b, t), int), np.full((b, t), s - 1)
    if mechanism.offers.causal:
        last = np.minimum(last, query)
    if (window := mechanism.offers.window) is not None:
        first = np.maximum(first, query - window + 1)
        last = np.minimum(last, query + window - 1)
    if "segment_ids" in masks:
        ids = masks["segment_ids"]
        begins = np.concatenate([np.ones((b, 1), bool), ids[:, 1:] != ids[:, :-1]], axis=1)
        starts = np.maximum.accumulate(np.where(begins, position, 0), axis=1)
        first = np.maximum(first, starts[:, s - t :])
    is_seen = (first[..., None] <= position) & (position <= last[..., None])
    if "prefix" in masks:  # With segments, the rows of other segments would be empty too.
        is_seen |= position < masks["prefix"][:, None, None]
    is_seen = (is_seen & valid[:, None, :])[:, None] & masks.get("attn_mask", True)
    return not is_seen.any(axis=3).all()


def with_equal_heads(case: Case) -> Case:
    """The case with equal numbers of query, key and value heads."""
    if HEAD_ORDER not in needed(case):
        return case
    layout = case.layout._replace(n=case.layout.h, values_per_head=1)
    return replace(case, layout=named(layout))


def without_empty_rows(case: Case, expected: Oracle) -> Oracle:
    """The oracle's results with NaN in rows that see no key, which are not compared, and with a
    cotangent of 0 there."""
    out = expected.out
    if EMPTY_ROWS not in needed(case):
        return expected
    rows = ((out == 0) | (out == -np.inf)).all(axis=-1, keepdims=True)
    cotangent = np.where(rows, 0.0, expected.cotangent)
    return expected.with_arrays(out=np.where(rows, np.nan, out), cotangent=cotangent)
