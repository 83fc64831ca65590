"""Recurrences with tokens divided among the devices of JAX: a scan of states (`states.py`).

In round i of log₂ P, a device sends T and F of the last 2^i devices up to itself to the device that
is 2^i places later. The first devices receive 0 for T and F: what they have starts at the first
token, from a state of 0, so their T is no longer read. In the last round no T is read.

In the forward pass a device computes T and F of its tokens, gets the state before them from the
scan, and computes its outputs from that state. In the backward pass it computes the gradient of
that state from its outputs, gets the gradient of its last state from the scan in reverse, and
computes the gradients of its inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array, lax

from precondattn.parallel.jax.piece import DeviceLine, DividedPiece
from precondattn.parallel.layouts import TokenOrder
from precondattn.parallel.states import (
    SegmentBorders,
    StateMap,
    bytes_of_steps,
    extended,
    extended_vjp,
    is_scaled,
    kept,
    steps_of_tokens,
    with_states,
)
from precondattn.parallel.states import refusal as refusal_of_states

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Leaf
    from precondattn.algebra.piece import BackendNames
    from precondattn.arrays import Tree

PASSED = "the states before them"
SENDS_VALUES = False


def refusal(leaf: Leaf, order: TokenOrder, masks: Collection[str]) -> str | None:
    """The reason why a leaf's states can not be scanned; None if they can."""
    return refusal_of_states(leaf, order)


def output(piece: DividedPiece) -> Array:
    """The output of a device's tokens."""
    segments, masks = piece.masks.segment, piece.masks.of_extension(piece.line.rank)
    borders = None if segments is None else SegmentBorders.of_segments(segments)
    scan = _Scan(piece.leaf, piece.line, piece.backend)
    out: Array = _scanned(scan, masks, borders, piece.inputs)
    return out


def bytes_sent(piece: DividedPiece) -> dict[str, int]:
    """The bytes that the first device sends in the scan forward; no device sends more."""
    shapes = jax.eval_shape(lambda inputs: piece.leaf.init_cache(**inputs).store, piece.inputs)
    states, transitions = bytes_of_steps(piece.leaf, shapes)
    rounds = (piece.line.devices - 1).bit_length()
    if not rounds:
        return {"states": 0, "transitions": 0}
    return {"states": (rounds + 1) * states, "transitions": (rounds - 1) * transitions}


def states_before(
    line: DeviceLine,
    steps: Sequence[StateMap],
    borders: SegmentBorders | None,
    *,
    is_reversed: bool = False,
) -> list[Array]:
    """S_begin of this device, for each of its states; 0 for the first device.

    With packed sequences it is S_end of the device before, whose last segment may end there.
    """

    def passed(arrays: Tree, distance: int) -> Tree:
        """Arrays of the device `distance` before this one (after it in reverse); 0 if none."""
        pairs = [(i, i + distance) for i in range(line.devices - distance)]
        if is_reversed:
            pairs = [(to, source) for source, to in pairs]
        return lax.ppermute(arrays, line.axis, pairs)

    distance = 1
    while distance < line.devices:
        is_last = 2 * distance >= line.devices  # Then no T is read.
        sent = [(None if is_last else step.transition, step.state) for step in steps]
        is_open = None
        if borders is not None:
            is_open = borders.is_open_before(line.rank, distance, is_reversed=is_reversed)
        earlier = [
            StateMap(transition, state, step.is_scaled, is_open)
            for step, (transition, state) in zip(steps, passed(sent, distance), strict=True)
        ]
        steps = [step.after(before) for step, before in zip(steps, earlier, strict=True)]
        distance *= 2
    states = [step.state for step in steps]
    return passed(states, 1) if line.devices > 1 else [jnp.zeros_like(x) for x in states]


@dataclass(frozen=True)
class _Scan:
    """The static arguments of a call."""

    leaf: Leaf
    line: DeviceLine
    backend: BackendNames


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scanned(
    scan: _Scan,
    masks: Mapping[str, Array],
    borders: SegmentBorders | None,
    inputs: Mapping[str, Array],
) -> Array:
    return _forward(scan, masks, borders, inputs)[0]


def _forward(
    scan: _Scan,
    masks: Mapping[str, Array],
    borders: SegmentBorders | None,
    inputs: Mapping[str, Array],
) -> tuple[Array, Tree]:
    """The output of a device's tokens, and the residuals of the backward pass."""
    leaf, (continues, is_open) = scan.leaf, _of_device(scan.line, borders)
    steps = {
        key: step._replace(is_open=is_open)
        for key, step in steps_of_tokens(leaf, inputs, scan.backend, masks).items()
    }
    before = states_before(scan.line, list(steps.values()), borders)
    states = {key: kept(state, continues) for key, state in zip(steps, before, strict=True)}
    cache = with_states(leaf.init_cache(**inputs), states)
    out, _ = extended(leaf, cache, inputs, scan.backend, masks)
    transitions = {key: step.transition for key, step in steps.items()}
    return out, (masks, borders, inputs, states, transitions)


def _backward(scan: _Scan, saved: Tree, cotangent: Array) -> Tree:
    masks, borders, inputs, states, transitions = saved
    leaf, (continues, is_open) = scan.leaf, _of_device(scan.line, borders)
    cache = with_states(leaf.init_cache(**inputs), states)
    _, _, pull = extended_vjp(leaf, cache, inputs, scan.backend, masks)
    _, d_past = pull(cotangent)
    steps = [
        StateMap(transitions[key], state, is_scaled(leaf), is_open).adjoint(
            kept(d_past[key], continues).astype(state.dtype)
        )
        for key, state in states.items()
    ]
    of_end = states_before(scan.line, steps, borders, is_reversed=True)
    gradients, _ = pull(cotangent, dict(zip(states, of_end, strict=True)))
    return None, None, {name: gradients[name].astype(x.dtype) for name, x in inputs.items()}


def _of_device(
    line: DeviceLine, borders: SegmentBorders | None
) -> tuple[Array | None, Array | None]:
    """Whether this device's first token continues a segment (b,), and whether all tokens do."""
    if borders is None:
        return None, None
    return borders.continues[line.rank], borders.is_open[line.rank]


_scanned.defvjp(_forward, _backward)
