"""Recurrences with tokens divided among the devices of JAX: a scan of states (`states.py`).

The first devices receive 0 for T and F: what they have starts at the first token, from a state of
0, so their T is no longer read.

In the forward pass a device computes T and F of its tokens, gets the state before them from the
scan, and computes its outputs from that state. In the backward pass it computes the gradient of
that state from its outputs, gets the gradient of its last state from the scan in reverse, and
computes the gradients of its inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from precondattn.algebra.mechanism import Leaf
from precondattn.algebra.piece import BackendNames
from precondattn.arrays import Tree
from precondattn.parallel.jax.call import DeviceLine
from precondattn.parallel.states import (
    SegmentBorders,
    StateMap,
    extended,
    is_scaled,
    kept,
    states_before,
    steps_of_tokens,
    with_states,
)
from precondattn.parallel.ways import DividedPiece


def output(piece: DividedPiece) -> Array:
    """The output of a device's tokens."""
    segments, masks = piece.masks.segment, piece.masks.of_extension(piece.call.line.rank)
    borders = None if segments is None else SegmentBorders.of_segments(segments)
    scan = _Scan(piece.leaf, piece.call.line, piece.call.backend)
    return _scanned(scan, (masks, borders), piece.inputs)


@dataclass(frozen=True)
class _Scan:
    """The static arguments of a call."""

    leaf: Leaf
    line: DeviceLine
    backend: BackendNames

    def states_before(
        self, steps: Sequence[StateMap], borders: SegmentBorders | None, *, is_reversed: bool
    ) -> list[Array]:
        """S_begin of this device, for each of its states; 0 for the first device."""
        axis, devices, rank = self.line.axis, self.line.devices, self.line.rank

        def passed(arrays: Tree, distance: int) -> Tree:
            """The arrays of the device `distance` before this one (after it in reverse)."""
            if devices == 1:
                return jax.tree.map(jnp.zeros_like, arrays)
            pairs = [(i, i + distance) for i in range(devices - distance)]
            if is_reversed:
                pairs = [(to, source) for source, to in pairs]
            return lax.ppermute(arrays, axis, pairs)

        return states_before(devices, steps, passed, borders, rank, is_reversed=is_reversed) or []


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scanned(scan: _Scan, of_tokens: Tree, inputs: Mapping[str, Array]) -> Array:
    """The output of a device's tokens; `of_tokens` has their masks and the borders of segments."""
    return _forward(scan, of_tokens, inputs)[0]


def _forward(scan: _Scan, of_tokens: Tree, inputs: Mapping[str, Array]) -> tuple[Array, Tree]:
    masks, borders = of_tokens
    leaf, (continues, is_open) = scan.leaf, _of_device(scan.line, borders)
    steps = {
        key: step._replace(is_open=is_open)
        for key, step in steps_of_tokens(leaf, inputs, scan.backend, masks).items()
    }
    before = scan.states_before(list(steps.values()), borders, is_reversed=False)
    states = {key: kept(state, continues) for key, state in zip(steps, before, strict=True)}
    cache = with_states(leaf.init_cache(**inputs), states)
    out, _ = extended("extend", leaf, cache, inputs, scan.backend, masks)
    transitions = {key: step.transition for key, step in steps.items()}
    return out, (of_tokens, inputs, states, transitions)


def _backward(scan: _Scan, saved: Tree, cotangent: Array) -> Tree:
    (masks, borders), inputs, states, transitions = saved
    leaf, (continues, is_open) = scan.leaf, _of_device(scan.line, borders)
    cache = with_states(leaf.init_cache(**inputs), states)
    _, _, pull = extended("extend_vjp", leaf, cache, inputs, scan.backend, masks)
    _, d_past = pull(cotangent)
    steps = [
        StateMap(transitions[key], state, is_scaled(leaf), is_open).adjoint(
            kept(d_past[key], continues).astype(state.dtype)
        )
        for key, state in states.items()
    ]
    of_end = scan.states_before(steps, borders, is_reversed=True)
    gradients, _ = pull(cotangent, dict(zip(states, of_end, strict=True)))
    return None, {name: gradients[name].astype(x.dtype) for name, x in inputs.items()}


def _of_device(
    line: DeviceLine, borders: SegmentBorders | None
) -> tuple[Array | None, Array | None]:
    """Whether this device's first token continues a segment (b,), and whether all tokens do."""
    if borders is None:
        return None, None
    return borders.continues[line.rank], borders.is_open[line.rank]


_scanned.defvjp(_forward, _backward)
