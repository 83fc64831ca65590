"""The reference backend: the leaves' own methods, on any array library.

It is plain differentiable code. Half-precision inputs are converted to float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from precondattn.arrays import Array, upcast, upcast_all
from precondattn.backend import ArraySpec, Backend, Request, Support
from precondattn.cache import Updates
from precondattn.cache.held import held_part
from precondattn.frame import Frame

if TYPE_CHECKING:
    from precondattn.arrays import Arrays, Residuals


class Reference(Backend):
    """Runs the methods of each leaf. Its memory is quadratic in the number of tokens."""

    name = "reference"
    preference = -1_000_000
    wide_values = True

    def supports(self, mechanism: Any, request: Request) -> Support:
        if len(mechanism.program.calls) > 1:
            return Support.no("runs one leaf at a time")
        # A compiler would unroll loops over tokens, and compile again for every length.
        is_operator = request.is_symbolic and not request.verb.startswith("extend")
        return Support.yes(differentiable=not is_operator)

    def forward(
        self, mechanism: Any, inputs: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Residuals]:
        out, residuals = mechanism.forward(upcast_all(inputs), frame)
        return out, residuals

    def backward(
        self,
        mechanism: Any,
        inputs: Mapping[str, Array],
        frame: Frame,
        out: Array,
        residuals: Residuals,
        cotangent: Array,
    ) -> Arrays:
        gradients: Arrays = mechanism.backward(
            upcast_all(inputs), frame, upcast(out), residuals, upcast(cotangent)
        )
        return gradients

    def step(
        self,
        mechanism: Any,
        past: Mapping[str, Array],
        inputs: Mapping[str, Array],
        frame: Frame,
    ) -> tuple[Array, Updates]:
        keys = mechanism.program.slot_keys[0]
        past = {slot: past[key] for slot, key in keys.items()}
        past, frame = held_part(mechanism, past, frame)
        out, updates = mechanism.step(upcast_all(past), upcast_all(inputs), frame)
        return out, {keys[slot]: update for slot, update in updates.items()}

    def step_backward(
        self,
        mechanism: Any,
        past: Mapping[str, Array],
        inputs: Mapping[str, Array],
        frame: Frame,
        cotangent: Array,
        d_buffers: Mapping[str, Array],
    ) -> tuple[Arrays, Arrays]:
        keys = mechanism.program.slot_keys[0]
        gradients, d_past = mechanism.step_backward(
            upcast_all({slot: past[key] for slot, key in keys.items()}),
            upcast_all(inputs),
            frame,
            upcast(cotangent),
            upcast_all({slot: d_buffers[key] for slot, key in keys.items()}),
        )
        return gradients, {keys[slot]: d_buffer for slot, d_buffer in d_past.items()}

    def residual_shapes(
        self, mechanism: Any, inputs: Mapping[str, ArraySpec], frame: Frame
    ) -> tuple[ArraySpec, ...]:
        """None: a leaf does not declare those of its definition, and `backward` runs it again."""
        return ()
