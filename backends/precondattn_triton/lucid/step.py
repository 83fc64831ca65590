"""A step of LUCID: from the cache's buffers to launches of `decode.py`, for a few tokens.

More new tokens are solved with the cached ones (`extension.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from precondattn.algebra.piece import Piece
from precondattn.backend import Request
from precondattn.cache import Updates
from precondattn.frame import Frame
from precondattn.kernel_backend.limits import MOST_HEADS, NARROWEST, padded_width
from precondattn.kernel_backend.lucid import WIDEST, LucidStepKernels, leaves_of
from precondattn.preconditioners.lucid import is_lucid
from precondattn_triton.configurations import configuration
from precondattn_triton.decoding import splits_of, step_masks
from precondattn_triton.launching import launch
from precondattn_triton.lucid import decode as lucid_decode
from precondattn_triton.lucid.extension import extend_and_attend
from precondattn_triton.lucid.plan import LOG2_E
from precondattn_triton.lucid.solve import FEWEST_NEW_TOKENS, LucidSolveKernels
from precondattn_triton.precision import is_half, product_precision
from precondattn_triton.tiles import heads


class LucidStep(LucidStepKernels):
    """The group `y1 = lucid_solve(k, v); out = softmax(q, k, v=y1)`."""

    def refuses(self, group: Piece, request: Request) -> str | None:
        t = dict(request.shapes)["q"][1]
        if t == 1:
            return super().refuses(group, request)
        solve, softmax = leaves_of(group)
        if not is_lucid(group.program) or softmax.window or not softmax.causal:
            return "its step is that of plain LUCID around causal softmax"
        if t >= FEWEST_NEW_TOKENS:
            return LucidSolveKernels().refuses(solve, request)
        if solve.window:
            return "its solve has no window"
        return self._refuses_few(request)

    def _refuses_few(self, request: Request) -> str | None:
        """The reason why there is no step by fewer than FEWEST_NEW_TOKENS tokens, or None."""
        shapes = dict(request.shapes)
        b, t, h, d = shapes["q"]
        n, e = shapes["v"][2:]
        if 0 in shapes["q"] + shapes["v"] or b * n > MOST_HEADS:
            return f"its step supports no empty arrays, and at most {MOST_HEADS} heads"
        width = padded_width(max(d, e))
        # Products in float32 have three parts: more than 16 rows of 256 channels would spill.
        is_wide = request.dtype == "float32" and width > 128
        fits = self.fits(t * (h // n + 1), request.dtype, 2 * width if is_wide else width)
        if width > WIDEST or not fits:
            return (
                f"its step by fewer than {FEWEST_NEW_TOKENS} tokens supports d, e <= {WIDEST}, and "
                f"as many queries and keys of a key/value head as fit a tile; found d={d}, e={e} "
                f"and {t * (h // n + 1)}"
            )
        return None

    def step(
        self, group: Piece, past: Mapping[str, Tensor], x: Mapping[str, Tensor], frame: Frame
    ) -> tuple[Tensor, Updates]:
        solve, softmax = leaves_of(group)
        solve_keys = group.program.slot_keys[0]
        if x["q"].shape[1] >= FEWEST_NEW_TOKENS:
            slots = {slot: past[key] for slot, key in solve_keys.items()}
            scale = softmax.scale_for(x["q"].shape[3])
            out, y, new_rms = extend_and_attend(solve, scale, slots, x, frame)
            return out, self.updates(group, x["k"], y, new_rms)
        keys, solved = past[solve_keys["key"]], past[solve_keys["solved"]]
        normalizes = solve.normalize == "keys"
        rms = heads(past[solve_keys["rms"]][..., None]) if normalizes else None
        q, k, v = x["q"], x["k"], x["v"]
        beta = heads(x["lucid_beta"][..., None]) if solve.beta else None
        b, t, h, d = q.shape
        n, e = v.shape[2:]
        masks = step_masks(frame, b, keys.shape[1])
        count, past_valid, new_valid, is_token = masks
        past_b, new_b, token_b = masks.strides
        widths = padded_width(d), padded_width(e)
        rows = padded_width(t * (h // n + 1))
        tuned = configuration("lucid_decode", max(widths), is_half(q.dtype), q)
        warps = 4 if rows == NARROWEST else 8
        splits, per_split = splits_of(q, count, b * n, tuned.columns)
        totals = q.new_empty((b * n, splits, rows, widths[1]), dtype=torch.float32)
        maxima, sums = (totals.new_empty((b * n, splits, rows)) for _ in range(2))
        scale, key_scale = softmax.scale_for(d) * LOG2_E, solve.scale_for(d) * LOG2_E
        sizes = lucid_decode.LucidStepSizes(
            n, h // n, t, d, e, solve.eps, scale, key_scale, key_scale * d
        )
        fixed = {"NORMALIZE": normalizes, "ROWS": rows, "KEY_WIDTH": widths[0], "WIDTH": widths[1]}
        launch(
            lucid_decode.read_past, (splits, b * n),
            heads(q), heads(k), heads(keys), heads(solved), rms, past_valid, totals, maxima, sums,
            count, sizes, past_b, per_split,
            **fixed, TOKENS=tuned.columns, PRECISION=product_precision(q.dtype),
            num_warps=max(tuned.warps, warps), num_stages=tuned.stages,
        )  # fmt: skip
        out = torch.empty((b, t, h, e), dtype=v.dtype, device=v.device)
        y = torch.empty((b, t, n, e), dtype=v.dtype, device=v.device)
        own_rms = None if rms is None else totals.new_empty((b, t, n))
        launch(
            lucid_decode.finish, (b * n,),
            heads(q), heads(k), heads(v), beta, new_valid, is_token, totals, maxima, sums, out, y,
            own_rms, splits, sizes, new_b, token_b,
            **fixed, num_warps=4 if rows <= 32 else 8,
        )  # fmt: skip
        return out, self.updates(group, k, y, own_rms)
