"""A step of LUCID around PaTH, a group of two leaves.

    y = lucid_solve(k, v, w, beta),    out = path(q, k, y, w, beta)

Both transport the same cached keys past the same flushes, and PaTH's values are the cached y. The
group gathers the tokens since the last flush, and transports the keys, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from precondattn.algebra.piece import Piece
from precondattn.algebra.program import Program
from precondattn.backend import Request
from precondattn.cache import Append, Updates
from precondattn.frame import Frame
from precondattn.limits import KEPT
from precondattn.spec.lucid import LucidSolve
from precondattn.spec.path import Path
from precondattn_triton.lucid.solve import LucidSolveKernels
from precondattn_triton.lucid.transported_extension import solve_new_tokens
from precondattn_triton.path.extension import extend_recent
from precondattn_triton.path.leaf import PathKernels
from precondattn_triton.path.step import path_step


class LucidPathStep:
    """The group of LUCID's solve in PaTH's metric, and PaTH."""

    def refuses(self, group: Piece, request: Request) -> str | None:
        """The reason why there is no step of the group, or None."""
        if request.verb != "extend" or not _is_lucid_around_path(group.program):
            return "its group of LUCID and PaTH is a step with the same keys and reflections"
        solve, path = _leaves_of(group.program)
        return LucidSolveKernels().refuses(solve, request) or PathKernels().refuses(path, request)

    def step(
        self, group: Piece, past: Mapping[str, Tensor], x: Mapping[str, Tensor], frame: Frame
    ) -> tuple[Tensor, Updates]:
        """The output for new tokens (b, t, h, e), and the updates of the cache's buffers."""
        solve, path = _leaves_of(group.program)
        of_solve, of_path = group.program.slot_keys
        y, norms, recent = solve_new_tokens(solve, _by_slot(past, of_solve), x, frame)
        past, x = _by_slot(past, of_path), {**x, "v": y}
        if y.shape[1] == 1:
            out, updates = path_step(path, past, x, frame)
        else:
            recent = recent._replace(v=torch.cat((recent.v[:, : recent.pending], y), 1))
            out, updates = extend_recent(path, past, x, frame, recent)
        new = {of_path[slot]: update for slot, update in updates.items()}
        new[of_solve["solved"]] = Append(y)
        if norms is not None:
            new[of_solve["rms"]] = Append(norms)
        return out, new


@lru_cache(maxsize=KEPT)
def _is_lucid_around_path(program: Program) -> bool:
    solve, path = _leaves_of(program)
    first, second = (dict(call.arguments) for call in program.calls)
    return (
        solve.metric == path.metric
        and second["v"] == program.calls[0].out
        and all(first[name] == second[name] for name in ("k", "w", "beta"))
    )


def _leaves_of(program: Program) -> tuple[LucidSolve, Path]:
    return cast("tuple[LucidSolve, Path]", program.leaves)


def _by_slot(past: Mapping[str, Tensor], keys: Mapping[str, str]) -> dict[str, Tensor]:
    return {slot: past[key] for slot, key in keys.items()}
