"""The backend `methods-lucid-solve`: what it supports, and what it declines, with reasons.

It supports one piece, `lucid_solve`, and is used by every mechanism with it: `lucid`,
`lucid(laser)`, `differential(lucid)` and the rest. The computation is in `lucid_solve.py`.

It promises every convention of `pa.CONVENTIONS`. If a kernel follows another convention, leave the
promised one out of `promises` and set `only_by_name = True`. Conformance then does not compare
results that depend on it.
"""

import precondattn as pa

DTYPES = ("float32", "float64", "float16", "bfloat16")


class MethodsLucidSolve(pa.Backend):
    """LUCID's triangular solve for PyTorch: y = (I + stril Φ)⁻¹ v, and its gradient."""

    name = "methods-lucid-solve"
    libraries = frozenset({"torch"})

    # The conformance suite requires that at least one output of these expressions is
    # compared, and that memory grows no faster than this with the number of tokens.
    covers = frozenset({"lucid_solve"})
    memory = "linear"

    # Parts that are declined on purpose, with reasons. If less than half of a check is
    # compared for any other reason, conformance fails. Remove the parts you implement.
    declines = (
        "extend: no steps yet",
        "lengths: no masks yet",
        "key_mask: no masks yet",
        "segment_ids: no masks yet",
    )

    def supports(self, mechanism, request):
        """Whether a call is supported; if not, the reason that reports show."""
        if not isinstance(mechanism, pa.LucidSolve):
            return pa.Support.no("supports lucid_solve only")
        # Compared as a whole, so that an option added later is declined, not ignored.
        if mechanism != pa.LucidSolve(scale=mechanism.scale, eps=mechanism.eps):
            return pa.Support.no("supports the options scale and eps only")
        if mechanism.eps == 0:
            return pa.Support.no("needs eps above 0")
        if request.verb not in ("forward", "vjp"):
            return pa.Support.no("supports full calls only")
        if request.masks:
            return pa.Support.no("supports no " + ", ".join(sorted(request.masks)))
        if request.dtype not in DTYPES:
            return pa.Support.no(f"does not support {request.dtype}")
        return pa.Support.yes()

    def forward(self, mechanism, inputs, frame):
        """The output, and the residuals for `backward`, which are empty."""
        from . import lucid_solve

        k, v = inputs["k"], inputs["v"]
        return lucid_solve.forward(k, v, _scale(mechanism, k), mechanism.eps), ()

    def backward(self, mechanism, inputs, frame, out, residuals, cotangent):
        """The gradient of every input, by name."""
        from . import lucid_solve

        k = inputs["k"]
        scale, eps = _scale(mechanism, k), mechanism.eps
        d_k, d_v = lucid_solve.backward(k, out, cotangent, scale, eps)
        return {"k": d_k, "v": d_v}

    def residual_shapes(self, mechanism, inputs, frame):
        """The shapes of the residuals of `forward`, which torch.compile needs."""
        return ()


def _scale(mechanism, k):
    """The scale of the scores: 1/√d, unless the mechanism sets one."""
    return k.shape[-1] ** -0.5 if mechanism.scale is None else mechanism.scale
