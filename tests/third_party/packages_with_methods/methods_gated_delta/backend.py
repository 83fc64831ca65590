"""The backend `methods-gated-delta`: what it supports, and what it declines, with reasons.

It supports one mechanism, `gated_delta`, and is used by every composition of it, such as
`ccq(gated_delta)`. The computation is in `gated_delta.py`.

It promises every convention of `pa.CONVENTIONS`. If a kernel follows another convention, leave the
promised one out of `promises` and set `only_by_name = True`. Conformance then does not compare
results that depend on it.
"""

import precondattn as pa

DTYPES = ("float32", "float64", "float16", "bfloat16")
NAMES = ("q", "k", "v", "g", "beta")


class MethodsGatedDelta(pa.Backend):
    """The gated delta rule for PyTorch, its gradient, and steps from one state to the next."""

    name = "methods-gated-delta"
    libraries = frozenset({"torch"})

    # The conformance suite requires that at least one output of these expressions is
    # compared, and that memory grows no faster than this with the number of tokens.
    covers = frozenset({"gated_delta"})
    memory = "linear"

    # Parts that are declined on purpose, with reasons. If less than half of a check is
    # compared for any other reason, conformance fails. Remove the parts you implement.
    declines = (
        "lengths: no masks yet",
        "key_mask: no masks yet",
        "segment_ids: no masks yet",
    )

    def supports(self, mechanism, request):
        """Whether a call is supported; if not, the reason that reports show."""
        if not isinstance(mechanism, pa.GatedDelta):
            return pa.Support.no("supports gated_delta only")
        # Compared as a whole, so that an option added later is declined, not ignored.
        if mechanism != pa.GatedDelta(scale=mechanism.scale):
            return pa.Support.no("supports the option scale only")
        if request.masks:
            return pa.Support.no("supports no " + ", ".join(sorted(request.masks)))
        if request.dtype not in DTYPES:
            return pa.Support.no(f"does not support {request.dtype}")
        return pa.Support.yes()

    def forward(self, mechanism, inputs, frame):
        """The output, and the residuals for `backward`, which are empty."""
        from . import gated_delta

        out, _ = gated_delta.forward(*_arguments(mechanism, inputs))
        return out, ()

    def backward(self, mechanism, inputs, frame, out, residuals, cotangent):
        """The gradient of every input, by name."""
        from . import gated_delta

        arguments = _arguments(mechanism, inputs)
        *gradients, _ = gated_delta.backward(*arguments, None, cotangent, None)
        return dict(zip(NAMES, gradients, strict=True))

    def step(self, mechanism, past, inputs, frame):
        """The output for new tokens, and the state after them in place of the cached one."""
        from . import gated_delta

        ((name, state),) = past.items()
        out, state = gated_delta.forward(*_arguments(mechanism, inputs), state)
        return out, {name: pa.Replace(state)}

    def step_backward(self, mechanism, past, inputs, frame, cotangent, d_buffers):
        """The gradients of inputs and of the cached state."""
        from . import gated_delta

        ((name, state),) = past.items()
        *gradients, d_state = gated_delta.backward(
            *_arguments(mechanism, inputs), state, cotangent, d_buffers[name]
        )
        return dict(zip(NAMES, gradients, strict=True)), {name: d_state}

    def residual_shapes(self, mechanism, inputs, frame):
        """The shapes of the residuals of `forward`, which torch.compile needs."""
        return ()


def _arguments(mechanism, inputs):
    """The inputs in order, and the scale: 1/√d, unless the mechanism sets one."""
    d = inputs["q"].shape[-1]
    scale = d**-0.5 if mechanism.scale is None else mechanism.scale
    return *(inputs[name] for name in NAMES), scale
