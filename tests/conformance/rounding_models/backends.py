"""Two backends in plain PyTorch with the rounding of the industry's kernels.

`flash_attention`         softmax attention, LASER, differential attention, LUCID
`flash_linear_attention`  linear attention with and without decays, the delta rule
"""

from dataclasses import replace

import torch

import precondattn as pa
from precondattn.arrays import upcast, upcast_all
from precondattn.method_backend import MethodRunner
from precondattn.spec.read import MEAN_AND_LOG_SUM
from precondattn_conformance.rounding import lucid
from precondattn_conformance.rounding.attention import rounded_attention
from tests.conformance.rounding_models.recurrence import RoundedChunks
from tests.conformance.rounding_models.rounding import tf32, to_dtype

HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}
RECURRENT = (pa.GLA, pa.GatedDelta, pa.Delta, pa.SSD, pa.Retention, pa.Linear)


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
        if type(leaf) is pa.LucidSolve and lucid.has_model(leaf):
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
        return (
            None
            if type(leaf) in RECURRENT and not getattr(leaf, "normalize", False)
            else "no model"
        )

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
