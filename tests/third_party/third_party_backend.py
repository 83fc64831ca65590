"""A third-party backend, installed as a package with one entry point.

It claims a piece, the solve of LUCID with normalised keys, with its own formulas that save the
inverse of the matrix; and a group, the whole of `lucid`, for calls without a gradient.
"""

from array_api_compat import array_namespace

import precondattn as pa

calls: list[str] = []
"""The calls that it ran, for the tests."""


class ThirdParty(pa.Backend):
    name = "third_party"
    preference = 10
    declines = ("extend: does not extend", "vjp lucid: lucid as a whole has no gradient")

    def supports(self, mechanism, request):
        if mechanism.program == pa.group_of("lucid"):
            if request.verb == "forward":
                return pa.Support.yes()
            return pa.Support.no("lucid as a whole has no gradient here")
        if not isinstance(mechanism, pa.LucidSolve):
            return pa.Support.no("knows lucid_solve only")
        if mechanism != pa.LucidSolve(eps=mechanism.eps, window=mechanism.window):
            return pa.Support.no("knows normalised keys without beta only")
        if request.verb == "extend":
            return pa.Support.no("does not extend")
        return pa.Support.yes()

    def forward(self, mechanism, inputs, frame):
        calls.append(str(mechanism))
        if not isinstance(mechanism, pa.LucidSolve):
            solve, softmax = mechanism.program.leaves
            y, _ = self._solve(solve, inputs, frame)
            return softmax.forward({"q": inputs["q"], "k": inputs["k"], "v": y}, frame)[0], ()
        y, inverse = self._solve(mechanism, inputs, frame)
        return y, (inverse,)

    def _solve(self, solve, inputs, frame):
        xp = array_namespace(inputs["k"])
        k, v = (xp.permute_dims(inputs[name], (0, 2, 1, 3)) for name in "kv")
        unit = self._unit(solve, k)
        overlap = xp.exp((unit @ xp.matrix_transpose(unit) - 1.0) * k.shape[-1] ** 0.5)
        frame = frame.among_keys(k.shape[2])
        below = frame.visible(causal=True, window=solve.window, strict=True)
        matrix = xp.where(below, overlap, 0.0) + xp.eye(k.shape[2], dtype=k.dtype)
        inverse = xp.linalg.inv(matrix)
        return xp.permute_dims(inverse @ v, (0, 2, 1, 3)), inverse

    def _unit(self, solve, k):
        xp = array_namespace(k)
        return k / xp.sqrt(xp.sum(k * k, axis=-1, keepdims=True) + k.shape[-1] * solve.eps)

    def backward(self, mechanism, inputs, frame, out, residuals, cotangent):
        calls.append(f"backward of {mechanism}")
        xp = array_namespace(cotangent)
        k, y, dy = (xp.permute_dims(a, (0, 2, 1, 3)) for a in (inputs["k"], out, cotangent))
        (inverse,) = residuals
        root = k.shape[-1] ** 0.5
        unit = self._unit(mechanism, k)
        overlap = xp.exp((unit @ xp.matrix_transpose(unit) - 1.0) * root)
        below = frame.among_keys(k.shape[2]).visible(
            causal=True, window=mechanism.window, strict=True
        )
        dv = xp.matrix_transpose(inverse) @ dy
        d = xp.where(below, -root * (dv @ xp.matrix_transpose(y)) * overlap, 0.0)
        du = d @ unit + xp.matrix_transpose(d) @ unit
        norm = xp.sqrt(xp.sum(k * k, axis=-1, keepdims=True) + k.shape[-1] * mechanism.eps)
        dk = (du - unit * xp.sum(unit * du, axis=-1, keepdims=True)) / norm
        return {"k": xp.permute_dims(dk, (0, 2, 1, 3)), "v": xp.permute_dims(dv, (0, 2, 1, 3))}

    def residual_shapes(self, mechanism, inputs, frame):
        b, s, n, _ = inputs["k"].shape
        return (pa.ArraySpec((b, n, s, s), inputs["k"].dtype),)
