"""Two backends whose methods get the piece run, and which compute its definition in float32.

Each supports one piece, for full calls without masks.
"""

import precondattn as pa
from precondattn.arrays import upcast, upcast_all

DTYPES = ("float32", "float64", "float16", "bfloat16")


class MethodsBackend(pa.Backend):
    libraries = frozenset({"torch"})
    memory = "linear"
    declines = ("lengths: no masks", "key_mask: no masks", "segment_ids: no masks")

    def supports(self, mechanism, request):
        if request.masks:
            return pa.Support.no("supports no " + ", ".join(sorted(request.masks)))
        if request.dtype not in DTYPES:
            return pa.Support.no(f"does not support {request.dtype}")
        return self.supports_piece(mechanism, request)

    def forward(self, mechanism, inputs, frame):
        out, _ = mechanism.forward(upcast_all(inputs), frame)
        return out.to(inputs["v"].dtype), ()

    def backward(self, mechanism, inputs, frame, out, residuals, cotangent):
        x = upcast_all(inputs)
        out, residuals = mechanism.forward(x, frame)
        gradients = mechanism.backward(x, frame, out, residuals, upcast(cotangent))
        return {name: gradient.to(inputs[name].dtype) for name, gradient in gradients.items()}

    def residual_shapes(self, mechanism, inputs, frame):
        """The shapes of the residuals of `forward`, which torch.compile needs."""
        return ()


class MethodsLucidSolve(MethodsBackend):
    name = "methods-lucid-solve"
    covers = frozenset({"lucid_solve"})
    declines = (*MethodsBackend.declines, "extend: no steps")

    def supports_piece(self, mechanism, request):
        # Compared as a whole, so that an option added later is declined, not ignored.
        if mechanism != pa.LucidSolve(scale=getattr(mechanism, "scale", None)):
            return pa.Support.no("supports lucid_solve with the option scale only")
        if request.verb not in ("forward", "vjp"):
            return pa.Support.no("supports full calls only")
        return pa.Support.yes()


class MethodsGatedDelta(MethodsBackend):
    name = "methods-gated-delta"
    covers = frozenset({"gated_delta"})

    def supports_piece(self, mechanism, request):
        if mechanism != pa.GatedDelta(scale=getattr(mechanism, "scale", None)):
            return pa.Support.no("supports gated_delta with the option scale only")
        return pa.Support.yes()

    def step(self, mechanism, past, inputs, frame):
        """The output for new tokens, and the state after them in place of the cached one."""
        ((key, state),) = past.items()
        (slot,) = mechanism.program.slot_keys[0]
        out, updates = mechanism.step({slot: state}, upcast_all(inputs), frame)
        return out.to(inputs["v"].dtype), {key: updates[slot]}

    def step_backward(self, mechanism, past, inputs, frame, cotangent, d_buffers):
        """The gradients of inputs and of the cached state."""
        ((key, state),) = past.items()
        (slot,) = mechanism.program.slot_keys[0]
        gradients, d_past = mechanism.step_backward(
            {slot: state}, upcast_all(inputs), frame, upcast(cotangent), {slot: d_buffers[key]}
        )
        gradients = {name: g.to(inputs[name].dtype) for name, g in gradients.items()}
        return gradients, {key: d_past[slot]}
