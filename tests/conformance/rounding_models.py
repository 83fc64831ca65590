"""Two backends in plain PyTorch with the rounding of the industry's kernels.

`flash_attention`         softmax attention, LASER, differential attention, LUCID
`flash_linear_attention`  linear attention with and without decays, the delta rule

Products are as tensor cores compute them: rounded factors, sums in float32.

    Z = r(X) r(Y),    dX = r(dZ) r(Y)ᵀ,    dY = r(X)ᵀ r(dZ)

r rounds to the dtype of the call or, if a kernel's factors are in float32, to tf32: tensor cores
read the first 10 bits of a float32's fraction.

The recurrence is that of flash-linear-attention, with chunks of 64 tokens.

    A = tril(D ∘ q kᵀ),    o = r(A) u + e^G ∘ q h,    h ← e^{G_C} h + kᵀ (e^{G_C − G} ∘ u)

States h, decays, one for each head, and all sums are in float32. Both factors of every product are
rounded to the dtype of the call, among them the chunk's state and A. For the delta rule,

    u = Y − W h,    (W, Y) = M (β e^G k, β v),    M = (I + β stril(D ∘ k kᵀ))⁻¹,

M is computed in float32, and M, W, Y and u are stored in the dtype of the call. Each gradient has
the products of its forward step, with the same rounding.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

import precondattn as pa
from precondattn.arrays import upcast, upcast_all
from precondattn.method_backend import MethodRunner
from precondattn.spec.metric import DOT
from precondattn.spec.read import MEAN_AND_LOG_SUM
from precondattn.spec.recurrence import Stream, StreamGradients
from precondattn_conformance.rounding import lucid
from precondattn_conformance.rounding.attention import rounded_attention

Rounding = Callable[[Tensor], Tensor]

TF32_BITS = torch.tensor(0xFFFFE000 - 2**32, dtype=torch.int32)


def to_dtype(dtype: torch.dtype) -> Rounding:
    """Rounding to the nearest number of a dtype; the result is in float32."""
    return lambda x: x.to(dtype).float()


def tf32(x: Tensor) -> Tensor:
    """A float32 array as tensor cores read it."""
    return (x.contiguous().view(torch.int32) & TF32_BITS).view(torch.float32)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, rounding):
        x, y = rounding(x), rounding(y)
        ctx.save_for_backward(x, y)
        ctx.rounding = rounding
        return x @ y

    @staticmethod
    def backward(ctx, d_z):
        x, y = ctx.saved_tensors
        d_z = ctx.rounding(d_z)
        return d_z @ y.mT, x.mT @ d_z, None


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rounding):
        ctx.rounding = rounding
        return rounding(x)

    @staticmethod
    def backward(ctx, d_x):
        return ctx.rounding(d_x), None


def product(x: Tensor, y: Tensor, rounding: Rounding) -> Tensor:
    """The product X Y (…, m, n), for leading axes that broadcast."""
    axes = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return _Product.apply(x.expand(*axes, *x.shape[-2:]), y.expand(*axes, *y.shape[-2:]), rounding)


def stored(x: Tensor, rounding: Rounding) -> Tensor:
    """An array that one kernel stores and another loads; its gradient is rounded likewise."""
    return _Rounded.apply(x, rounding)


CHUNK = 64
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
        decay = torch.ones(CHUNK, CHUNK).tril() * _decay(until)
        scores = decay[:, :, None] * product(q, k[:, :, None].mT, r)
        u = v if beta is None else self._written(k, v, until, reading, beta, h)
        inter = reading[:, :, None] * product(q, h[:, :, None], r)
        out = self.scale * (inter + product(scores, u[:, :, None], r))
        return out, h * reading[:, :, -1, :, None] + product(k.mT, writing * u, r)

    def _written(self, k, v, until, reading, beta, h):
        r = self.rounding
        strict = torch.ones(CHUNK, CHUNK).tril(-1) * _decay(until) * product(k, k.mT, r)
        inverse = _Inverse.apply(beta[..., None] * strict, r)
        y = stored(product(inverse, beta[..., None] * v, r), r)
        w = stored(product(inverse, beta[..., None] * reading * k, r), r)
        return stored(y - product(w, h, r), r)


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


HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}
RECURRENT = (pa.GatedDelta, pa.Delta, pa.SSD)


class HalfPrecisionModel(pa.Backend):
    """A backend whose leaves compute in half precision."""

    libraries = frozenset({"torch"})
    only_by_name = True

    def prepare(self, piece, request):
        if len(piece.program.calls) > 1:
            return "leaves only"
        if request.dtype not in HALF:
            return "half precision only"
        return self.refuses(piece, request) or MethodRunner(self, piece)

    def residual_shapes(self, mechanism, inputs, frame):
        return ()


class FlashAttention(HalfPrecisionModel):
    name = "flash_attention"

    def refuses(self, leaf, request):
        if type(leaf) in (pa.Softmax, pa.Path) and leaf.read != MEAN_AND_LOG_SUM:
            return None
        if type(leaf) is pa.LucidSolve and leaf.has_unit_diagonal and leaf.metric is DOT:
            return "no steps" if request.verb.startswith("extend") else None
        return "no model"

    def _attention(self, leaf, like):
        return rounded_attention(leaf, to_dtype(like.dtype))

    def _roundings(self, like):
        return lucid.Roundings(to_dtype(like.dtype), to_dtype(torch.float16), tf32)

    @torch.no_grad()
    def forward(self, leaf, inputs, frame):
        x, like = upcast_all(inputs), inputs["v"]
        if isinstance(leaf, pa.LucidSolve):
            out = lucid.forward(leaf, x, frame, self._roundings(like))
        else:
            out = self._attention(leaf, like).forward(x, frame)[0]
        return out.to(like.dtype), ()

    @torch.no_grad()
    def backward(self, leaf, inputs, frame, out, residuals, cotangent):
        x, like = upcast_all(inputs), inputs["v"]
        o, d_o = upcast(out), upcast(cotangent)
        if isinstance(leaf, pa.LucidSolve):
            return lucid.backward(leaf, x, frame, o, d_o, self._roundings(like))
        return self._attention(leaf, like).backward(x, frame, o, (), d_o)

    @torch.no_grad()
    def step(self, leaf, past, inputs, frame):
        keys, like = leaf.program.calls[0].slot_keys(), inputs["v"]
        buffers = upcast_all({slot: past[key] for slot, key in keys.items()})
        out, updates = self._attention(leaf, like).step(buffers, upcast_all(inputs), frame)
        return out.to(like.dtype), {keys[slot]: update for slot, update in updates.items()}


class FlashLinearAttention(HalfPrecisionModel):
    name = "flash_linear_attention"

    def refuses(self, leaf, request):
        return None if type(leaf) in RECURRENT else "no model"

    def _model(self, leaf, x):
        """The leaf without its scale, and its recurrence form, which scales products instead."""
        form = RoundedChunks(to_dtype(x["v"].dtype), leaf.scale_for(x["q"].shape[3]))
        return replace(leaf, scale=1.0), form

    @torch.no_grad()
    def forward(self, leaf, inputs, frame):
        unscaled, form = self._model(leaf, inputs)
        x = upcast_all(inputs)
        out, _ = unscaled.run(leaf.zero_state(x), x, frame, form)
        return out.to(inputs["v"].dtype), ()

    @torch.no_grad()
    def backward(self, leaf, inputs, frame, out, residuals, cotangent):
        unscaled, form = self._model(leaf, inputs)
        x = upcast_all(inputs)
        zeros = leaf.zero_state(x)
        return unscaled.run_vjp(zeros, x, frame, upcast(cotangent), zeros, form)[0]

    @torch.no_grad()
    def step(self, leaf, past, inputs, frame):
        unscaled, form = self._model(leaf, inputs)
        keys = leaf.program.calls[0].slot_keys()
        state = {slot: past[key] for slot, key in keys.items()}
        out, state = unscaled.run(state, upcast_all(inputs), frame, form)
        updates = {keys[slot]: pa.Replace(new) for slot, new in state.items()}
        return out.to(inputs["v"].dtype), updates

    @torch.no_grad()
    def step_backward(self, leaf, past, inputs, frame, cotangent, d_buffers):
        unscaled, form = self._model(leaf, inputs)
        keys = leaf.program.calls[0].slot_keys()
        state, d_state = ({s: upcast(a[k]) for s, k in keys.items()} for a in (past, d_buffers))
        d, d_past = unscaled.run_vjp(
            state, upcast_all(inputs), frame, upcast(cotangent), d_state, form
        )
        return d, {keys[slot]: each for slot, each in d_past.items()}
