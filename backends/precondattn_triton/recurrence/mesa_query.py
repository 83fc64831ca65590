"""Mesa's query (H + diag λ)⁻¹ q: the states of H in chunks, then a solve for each chunk's queries.

H is the state of a linear attention with values β k (`chunk_states.py`); `solve_queries.py` solves
with it. The gradient is one more solve, and that of the linear attention
(`chunkwise_gradient.py`).

All products have float32's accuracy, also for inputs of 16 bits and where PyTorch may use tf32: the
residual is checked to a few roundings. A query that is not solved is NaN. Whether there is one is
known on the GPU, and an error is raised on the CPU: a call waits for its solve. A call that a CUDA
graph captures does not wait, and raises no error.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from precondattn.arrays import is_traced
from precondattn.backend import Request
from precondattn.frame import Frame
from precondattn.kernel_backend.stateful import StatefulKernels, decays
from precondattn.spec.mesa_query import MesaQuery
from precondattn.spec.positive_definite import ROUNDINGS, tolerance_of
from precondattn.spec.recurrence import Stream
from precondattn_triton.precision import exact
from precondattn_triton.recurrence import solve_queries
from precondattn_triton.recurrence.chunkwise import Chunkwise, carry, prepare

WIDEST = 128
"""Rows of wider keys, of which a program keeps five for each token, do not fit its registers."""


class SolvingChunkwise(Chunkwise):
    """The recurrence in chunks, with a solve for their queries."""

    def solve_by_iteration(
        self, leaf: MesaQuery, x: Stream, state: Tensor, q: Tensor, ridge: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(H + diag λ)⁻¹ q of queries (b, m, t, r, d), λ (1, m, 1, r, d), and the final H."""
        call = self.call(x._replace(q=q), state)
        prepare(call, x)
        final = carry(call)
        missing, queries = (call.s - call.t) // call.chunk, call.b * call.m * call.r
        rows = min(call.configuration("mesa_query").rows, call.chunk)
        programs = (call.count - missing) * call.chunk // rows
        o = call.empty(call.b, call.t, call.m, call.r, call.d)
        residuals = call.empty(queries, programs)
        tolerance, most = tolerance_of(leaf, q), leaf.most_iterations(call.d)
        call.launch(
            solve_queries.solve,
            "mesa_query",
            (programs, queries),
            ridge=ridge.expand(1, call.m, 1, call.r, call.d).contiguous(),
            o=o,
            residuals=residuals,
            directions=call.empty(queries, call.tokens, call.width),
            ROWS=rows,
            KEYS=call.keys("mesa_query"),
            missing=missing,
            tolerance=tolerance,
            rounding=ROUNDINGS * torch.finfo(torch.float32).eps,
            most=most,
        )
        # The one number of a call of kernels that the host reads: the error needs it at once.
        if not is_traced(residuals) and (residual := float(residuals.max())) > 0:
            raise leaf.not_solved(residual, most, tolerance)
        return o.transpose(1, 2), final


class SolvedQuery(StatefulKernels):
    """The kernels of the leaf `MesaQuery`."""

    def refuses(self, leaf: MesaQuery, request: Request) -> str | None:  # type: ignore[override]
        d = dict(request.shapes)["k"][-1]
        if d > WIDEST:
            return f"its solve supports d <= {WIDEST}; found d={d}"
        return super().refuses(leaf, request)

    def form(self, leaf: MesaQuery, x: Mapping[str, Tensor], frame: Frame) -> SolvingChunkwise:  # type: ignore[override]
        return SolvingChunkwise(exact(), half=False, decays=decays(leaf, frame))
