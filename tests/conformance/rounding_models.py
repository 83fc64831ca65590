"""Two backends for PyTorch with the rounding of the industry's kernels.

`flash_attention`         softmax attention, LASER, differential attention, LUCID
`flash_linear_attention`  the delta rule with and without decays

Where they round is what the suite's model says (`precondattn_conformance.rounding`), whose error is
in the bounds. That model computes sums in float64 and takes a call as a whole. These backends round
inputs, outputs and states to the dtypes of PyTorch too, take steps, and attention's sums are in
float32.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import precondattn as pa
from precondattn.arrays import upcast, upcast_all
from precondattn.method_backend import MethodRunner
from precondattn.spec.metric import DOT
from precondattn.spec.read import MEAN_AND_LOG_SUM
from precondattn_conformance.oracle import rounded
from precondattn_conformance.rounding import lucid
from precondattn_conformance.rounding.attention import rounded_attention
from precondattn_conformance.rounding.delta_rule import RoundedDeltaRule

Rounding = Callable[[Tensor], Tensor]

TF32_BITS = torch.tensor(0xFFFFE000 - 2**32, dtype=torch.int32)


def to_dtype(dtype: torch.dtype) -> Rounding:
    """Rounding to the nearest number of a dtype; the result is in float32."""
    return lambda x: x.to(dtype).float()


def tf32(x: Tensor) -> Tensor:
    """A float32 array as tensor cores read it."""
    return (x.contiguous().view(torch.int32) & TF32_BITS).view(torch.float32)


HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}
DELTA_RULES = (pa.GatedDelta, pa.Delta)


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


class RoundedStates(RoundedDeltaRule):
    """The delta rule whose state is rounded between two chunks, which no kernel does."""

    def _chunk(self, x):
        out, state = super()._chunk(x)
        return out, self.round(state)


class FlashLinearAttention(HalfPrecisionModel):
    name = "flash_linear_attention"
    form = RoundedDeltaRule

    def refuses(self, leaf, request):
        return None if type(leaf) in DELTA_RULES else "no model"

    def _model(self, leaf, x):
        """The leaf without its scale, its recurrence, which scales products instead, and x."""
        rounding = partial(rounded, dtype=str(x["v"].dtype).removeprefix("torch."))
        form = self.form(rounding, leaf.scale_for(x["q"].shape[3]))
        return replace(leaf, scale=1.0), form, in_numpy(x)

    def forward(self, leaf, inputs, frame):
        unscaled, form, x = self._model(leaf, inputs)
        out, _ = unscaled.run(leaf.zero_state(x), x, frame, form)
        return torch.tensor(out).to(inputs["v"].dtype), ()

    def backward(self, leaf, inputs, frame, out, residuals, cotangent):
        unscaled, form, x = self._model(leaf, inputs)
        zeros = leaf.zero_state(x)
        d_o = cotangent.double().numpy()
        return in_torch(unscaled.run_vjp(zeros, x, frame, d_o, zeros, form)[0])

    def step(self, leaf, past, inputs, frame):
        unscaled, form, x = self._model(leaf, inputs)
        keys = leaf.program.calls[0].slot_keys()
        state = in_numpy({slot: past[key] for slot, key in keys.items()})
        out, state = unscaled.run(state, x, frame, form)
        updates = {keys[slot]: pa.Replace(new) for slot, new in in_torch(state).items()}
        return torch.tensor(out).to(inputs["v"].dtype), updates

    def step_backward(self, leaf, past, inputs, frame, cotangent, d_buffers):
        unscaled, form, x = self._model(leaf, inputs)
        keys = leaf.program.calls[0].slot_keys()
        state, d_state = (in_numpy({s: a[k] for s, k in keys.items()}) for a in (past, d_buffers))
        d_o = cotangent.double().numpy()
        d, d_past = unscaled.run_vjp(state, x, frame, d_o, d_state, form)
        return in_torch(d), {keys[slot]: each for slot, each in in_torch(d_past).items()}


def in_numpy(x):
    return {name: a.double().numpy() for name, a in x.items()}


def in_torch(x):
    return {name: torch.tensor(a, dtype=torch.float32) for name, a in x.items()}
