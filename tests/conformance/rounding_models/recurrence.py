"""The rounding of flash-linear-attention, as a chunked recurrence with chunks of 64 tokens.

    A = tril(D ∘ q kᵀ),    o = r(A) u + e^G ∘ q h,    h ← e^{G_C} h + kᵀ (e^{G_C − G} ∘ u)

States h, decays and all sums are in float32. Both factors of every product are rounded to the dtype
of the call, among them the chunk's state and A. For the delta rule,

    u = Y − W h,    (W, Y) = M (β e^G k, β v),    M = (I + β stril(D ∘ k kᵀ))⁻¹,

M is computed in float32, and M, W, Y and u are stored in the dtype of the call. With a decay for
each channel, A is computed from float32 factors q e^{G − G₀} and k e^{G₀ − G} in tf32, where G₀ is
at the start of a block of 16 tokens, and within such a block in float32. Each gradient has the
products of its forward step, with the same rounding.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from precondattn.spec.recurrence import Stream, StreamGradients
from tests.conformance.rounding_models.rounding import Rounding, product, stored, tf32

CHUNK = 64
BLOCK = 16
NEVER = -1e5
"""A finite log-decay in place of −∞."""


class RoundedChunks:
    """The recurrence for outputs that are multiplied by a scale, with rounding."""

    def __init__(self, rounding: Rounding, scale: float, carried: Rounding | None = None):
        self.rounding, self.scale = rounding, scale
        self.carried = carried or (lambda state: state)
        """Rounds the state between two chunks; the identity except in a test."""

    def forward(self, x: Stream, state: Tensor) -> tuple[Tensor, Tensor]:
        s, t = x.k.shape[2], x.q.shape[2]
        chunks = -(-s // CHUNK)
        q, k, v, g, beta = (self._in_chunks(a, chunks * CHUNK - s, chunks) for a in self._whole(x))
        h, outs = state, []
        for c in range(chunks):
            strength = None if beta is None else beta[:, :, c]
            out, h = self._chunk(q[:, :, c], k[:, :, c], v[:, :, c], g[:, :, c], strength, h)
            h = self.carried(h)
            outs.append(out)
        return torch.cat(outs, dim=3)[:, :, :, s - t : s].transpose(2, 3), h

    def vjp(self, x: Stream, state: Tensor, d_o: Tensor, d_final: Tensor) -> StreamGradients:
        # A custom operator runs below PyTorch's autograd; code in another thread does not.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self._differentiated, x, state, d_o, d_final).result()

    def _differentiated(
        self, x: Stream, state: Tensor, d_o: Tensor, d_final: Tensor
    ) -> StreamGradients:
        given = [a.detach().requires_grad_() for a in (state, *x) if a is not None]
        results = self.forward(Stream(*given[1:]), given[0])
        d_state, *d_x = torch.autograd.grad(
            results, given, (d_o, d_final), allow_unused=True, materialize_grads=True
        )
        return StreamGradients(Stream(*d_x), d_state)

    def _whole(self, x: Stream):
        """The stream with a query for every key; tokens are the third axis."""
        missing = x.k.shape[2] - x.q.shape[2]
        q = torch.nn.functional.pad(x.q, (0, 0, 0, 0, missing, 0))
        return q, x.k, x.v, x.g, x.beta

    def _in_chunks(self, x: Tensor | None, padding: int, chunks: int) -> Tensor | None:
        if x is None:
            return None
        x = torch.nn.functional.pad(x, (0, 0) * (x.ndim - 3) + (0, padding))
        return x.unflatten(2, (chunks, CHUNK))

    def _chunk(self, q, k, v, g, beta, h):
        """The outputs (b, m, r, C, e) of a chunk, and the state after it (b, m, d, e)."""
        r = self.rounding
        q = q.transpose(2, 3)
        g = g[..., 0].clamp(min=NEVER).double()
        until = g.cumsum(2)
        reading = until.exp().float()
        writing = (until[:, :, -1:] - until).exp().float()
        scores = self._scores(q, k, g, until)
        u = v if beta is None else self._written(k, v, until, reading, beta, h)
        inter = product(q, h[:, :, None], r) if reading.shape[-1] == 1 else None
        if inter is None:
            out = self.scale * product(q * reading[:, :, None], h[:, :, None], r)
        else:
            out = self.scale * reading[:, :, None] * inter
        out = out + self.scale * product(scores, u[:, :, None], r)
        if reading.shape[-1] == 1:
            written = product(k.mT, writing * u, r)
        else:
            written = product((writing * k).mT, u, r)
        return out, h * reading[:, :, -1, :, None] + written

    def _written(self, k, v, until, reading, beta, h):
        r = self.rounding
        strict = torch.ones(CHUNK, CHUNK).tril(-1) * _decay(until) * product(k, k.mT, r)
        inverse = _inverse(beta[..., None] * strict, r)
        y = stored(product(inverse, beta[..., None] * v, r), r)
        w = stored(product(inverse, beta[..., None] * reading * k, r), r)
        return stored(y - product(w, h, r), r)

    def _scores(self, q, k, g, until):
        """A (b, m, r, C, C), the decayed scores."""
        if until.shape[-1] == 1:
            decay = torch.ones(CHUNK, CHUNK).tril() * _decay(until)
            return decay[:, :, None] * product(q, k[:, :, None].mT, self.rounding)
        rows = []
        for start in range(0, CHUNK, BLOCK):
            block = slice(start, start + BLOCK)
            border = until[:, :, start : start + 1]
            since = (until[:, :, block] - border).exp().float()
            before = (border - until[:, :, :start]).exp().float()
            earlier = product(
                q[:, :, :, block] * since[:, :, None],
                (k[:, :, :start] * before)[:, :, None].mT,
                tf32,
            )
            apart = until[:, :, block, None] - until[:, :, None, block]
            decay = torch.where(torch.ones(BLOCK, BLOCK).tril()[..., None] > 0, apart, NEVER)
            weighted = decay.exp().float() * k[:, :, None, block]
            own = (q[:, :, :, block, None] * weighted[:, :, None]).sum(-1)
            later = torch.zeros(*own.shape[:-1], CHUNK - start - BLOCK)
            rows.append(torch.cat([earlier, own, later], dim=-1))
        return torch.cat(rows, dim=-2)


def _decay(until: Tensor) -> Tensor:
    """D (b, m, C, C) below and on the diagonal, for one decay of each token."""
    apart = until - until.mT
    return torch.where(torch.ones(CHUNK, CHUNK).tril() > 0, apart, NEVER).exp().float()


class _Inverse(torch.autograd.Function):
    """M = (I + L)⁻¹ in float32, stored in the dtype of the call; dL = −Mᵀ dM Mᵀ."""

    @staticmethod
    def forward(ctx, strict, rounding):
        one = torch.eye(CHUNK)
        inverse = torch.linalg.solve_triangular(one + strict, one, upper=False, unitriangular=True)
        inverse = rounding(inverse)
        ctx.save_for_backward(inverse)
        ctx.rounding = rounding
        return inverse

    @staticmethod
    def backward(ctx, d_inverse):
        (inverse,) = ctx.saved_tensors
        r = ctx.rounding
        return -(inverse.mT @ r(r(d_inverse) @ inverse.mT)).tril(-1), None


def _inverse(strict: Tensor, rounding: Rounding) -> Tensor:
    return _Inverse.apply(strict, rounding)
