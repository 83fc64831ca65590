"""Softmax attention by PyTorch's fused kernel, and LASER by the same kernel.

LASER reads o = ν + log(A e^{v − ν}). This is softmax attention with values e^{v − ν}, where the
values of each channel are close enough (`precondattn_portable/read_log_mean_exp.py`). With
a = A e^{v − ν},

    da = do / a,    (dq, dk, dw) by the kernel's own gradient with w = e^{v − ν},    dv = w ∘ dw.

The kernel returns λ, the log-sum-exp of each row. A sink σ is added to it afterwards,

    λ' = log(e^λ + e^σ),    o' = e^{λ − λ'} o,

and the kernel's own gradient, given λ' and o', is that with the sink. If λ is the last channel of
the output, the kernel's gradient gets values with 0 in that channel and an output with −1 there:
this adds the cotangent of λ to do vᵀ − rowsum(do ∘ o).

What the kernel does not support (windows, biases, distances, gates, soft caps, fewer queries than
keys, most masks) is computed by the row blocks of `precondattn_portable/attention.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from precondattn.arrays import Arrays, Residuals, Shape, has_only_a_shape, is_traced, upcast
from precondattn.frame import Frame, has_lengths_only
from precondattn.spec.laser import LOG_MEAN_EXP, RANGE
from precondattn.spec.metric import DOT
from precondattn.spec.read import MEAN, MEAN_AND_LOG_SUM
from precondattn.spec.softmax import SoftmaxAttention, sink_vjp
from precondattn_portable.attention import AttentionBlocks
from precondattn_portable.layout import zero_padding
from precondattn_portable.read_mean import are_far
from precondattn_torch.arithmetic import TORCH
from precondattn_torch.twice_differentiable import SdpaOptions, twice_differentiable

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values in the kernel's layout, or their gradients."""


def fits(
    leaf: SoftmaxAttention, shapes: Mapping[str, Shape], masks: frozenset[str], device: str
) -> bool:
    """Whether the kernel supports this call.

    In a causal call, padding comes after all keys that a valid query attends to, and needs no mask.
    """
    plain = (
        leaf.metric == DOT
        and leaf.forget == "none"
        and not leaf.bias
        and leaf.window is None
        and leaf.softcap is None
        and leaf.distance == "none"
    )
    if leaf.read == LOG_MEAN_EXP and device != "cpu":
        return False  # On other devices the kernel does not return λ, which its gradient needs.
    if not leaf.causal:
        return plain and not masks
    return plain and shapes["q"][1] == shapes["k"][1] and masks <= {"lengths"}


def fits_call(leaf: SoftmaxAttention, x: Mapping[str, Tensor], frame: Frame) -> bool:
    """Whether the kernel supports a full call of these arrays."""
    masks: frozenset[str] = frozenset()
    if frame.masks_pairs:
        return False
    if frame.k_segment is not None:
        masks = frozenset({"segment_ids"})
    elif frame.k_valid is not None:
        masks = frozenset({"lengths" if has_lengths_only(frame) else "key_mask"})
    shapes = {name: tuple(tensor.shape) for name, tensor in x.items()}
    return fits(leaf, shapes, masks, x["q"].device.type)


def needs_sums(leaf: SoftmaxAttention) -> bool:
    """Whether λ is needed besides the mean that the kernel returns."""
    return leaf.read != MEAN or leaf.sink


def scaled_dot_product(leaf: SoftmaxAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention of (b, t, h, d), (b, s, n, d) and (b, s, n, e); differentiable."""
    width = max(q.shape[3], v.shape[3])
    return attend(q, k, v, width, options_of(leaf, q.shape, k.shape))


def options_of(leaf: SoftmaxAttention, q: Shape, k: Shape) -> SdpaOptions:
    """The options of PyTorch's attention, from the shapes of q and k."""
    return {
        "is_causal": leaf.causal,
        "scale": leaf.scale_for(q[3]),
        "enable_gqa": bool(q[2] != k[2]),  # Sizes are symbolic while PyTorch traces.
    }


def attend(q: Tensor, k: Tensor, v: Tensor, width: int, options: SdpaOptions) -> Tensor:
    """PyTorch's attention, with rows padded with zeros to this width."""
    e = v.shape[3]
    # The kernel needs keys and values of equal width; otherwise it would store T × T numbers.
    if q.shape[3] != width or e != width or not q.stride(3) == k.stride(3) == v.stride(3) == 1:
        q, k, v = of_width(q, width), of_width(k, width), of_width(v, width)
    inputs = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    o = functional.scaled_dot_product_attention(*inputs, **options)
    if o.grad_fn is not None and not is_traced(o):
        twice_differentiable(o.grad_fn, inputs, options)
    o = o.transpose(1, 2)
    return o if width == e else o[..., :e]


def of_one_dtype(q: Tensor, k: Tensor, v: Tensor) -> Heads:
    """q, k and v in the dtype that is passed to the kernel.

    On accelerators, half precision is kept for speed, and the kernel rounds its output. On a CPU
    the output is float32.
    """
    if v.is_cpu:
        return upcast(q), upcast(k), upcast(v)
    return q.to(v.dtype), k.to(v.dtype), v


class WholeKernel:
    """The kernel, called once for all queries and keys."""

    def __init__(self, leaf: SoftmaxAttention, d: int) -> None:
        self.causal, self.scale = leaf.causal, leaf.scale_for(d)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The output (b, t, h, e) and the logarithms (b, t, h) of the sums of weights."""
        o, log_total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_of_equal_width(q, k, v), 0.0, self.causal, scale=self.scale
        )
        return o.transpose(1, 2)[..., : v.shape[3]], log_total.transpose(1, 2).contiguous()

    def backward(
        self, heads: Heads, o: Tensor, log_total: Tensor, cotangent: Tensor
    ) -> tuple[Heads, Arrays]:
        """The gradients of q, k and v, and of further inputs that this kernel has."""
        (n, d), e = heads[1].shape[2:], o.shape[3]
        inputs = _of_equal_width(*heads)
        pad = (0, inputs[2].shape[3] - e)
        d_q, d_k, d_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            functional.pad(cotangent, pad).transpose(1, 2),
            *inputs,
            functional.pad(o, pad).transpose(1, 2),
            log_total.transpose(1, 2).contiguous(),
            0.0,
            self.causal,
            scale=self.scale,
        )
        d_q, d_k, d_v = (a.transpose(1, 2) for a in (d_q, d_k, d_v))
        of_keys = _sum_of_heads(d_k[..., :d], n), _sum_of_heads(d_v[..., :e], n)
        return (d_q[..., :d], *of_keys), {}


Kernel = Any
"""An object with the methods of `WholeKernel`."""


class KernelAttention(AttentionBlocks):
    """Algorithm of `Softmax`: the kernel where it fits, row blocks elsewhere."""

    name = "PyTorch's kernel or row blocks"

    def forward(self, x: Arrays, frame: Frame) -> tuple[Tensor, Residuals]:
        kernel = self._kernel(x, frame)
        if kernel is None:
            return super().forward(x, frame)
        read = self._laser if self.leaf.read == LOG_MEAN_EXP else self._mean
        o, log_total = read(kernel, x)
        return zero_padding(o, frame), (log_total,)

    def backward(
        self, x: Arrays, frame: Frame, out: Tensor, residuals: Residuals, cotangent: Tensor
    ) -> Arrays:
        kernel = self._kernel(x, frame) if residuals else None
        if residuals and (kernel is None or are_far(residuals[0])):
            return super().backward(x, frame, out, residuals, cotangent)
        cotangent = zero_padding(cotangent, frame)
        if kernel is not None:
            is_laser = self.leaf.read == LOG_MEAN_EXP
            pull = self._laser_backward if is_laser else self._mean_backward
            return pull(kernel, x, out, residuals[0], cotangent)
        names = ("q", "k", "v")  # The output of `scaled_dot_product`, which keeps no residuals.
        with torch.inference_mode(False), torch.enable_grad():
            leaves = [_recorded(x[name]) for name in names]
            again = scaled_dot_product(self.leaf, *leaves)
        result = torch.autograd.grad(again, leaves, cotangent.to(again.dtype))
        return dict(zip(names, result, strict=True))

    def _kernel(self, x: Arrays, frame: Frame) -> Kernel | None:
        """The kernel if it supports the call and returns λ, which its gradient needs."""
        if not x["q"].is_cpu or not fits_call(self.leaf, x, frame) or not self._fits_values(x):
            return None
        return WholeKernel(self.leaf, x["q"].shape[3])

    def _fits_values(self, x: Arrays) -> bool:
        return self.leaf.read != LOG_MEAN_EXP or _is_close_together(x["v"])

    def _mean(self, kernel: Kernel, x: Arrays) -> tuple[Tensor, Tensor]:
        with_total = self.leaf.read == MEAN_AND_LOG_SUM
        v = x["v"][..., :-1] if with_total else x["v"]
        o, log_total = kernel.forward(x["q"], x["k"], v)
        o = o.contiguous()
        if self.leaf.sink:
            with_sink = torch.logaddexp(log_total, x["sink"].expand_as(log_total))
            o = o.mul_((log_total - with_sink).exp_()[..., None])
            log_total = with_sink
        out = torch.cat([o, log_total[..., None]], -1) if with_total else o
        return out, _of_no_keys(log_total)

    def _mean_backward(
        self, kernel: Kernel, x: Arrays, o: Tensor, log_total: Tensor, cotangent: Tensor
    ) -> Arrays:
        with_total, v, mean = self.leaf.read == MEAN_AND_LOG_SUM, x["v"], o
        if with_total:
            v, mean = _with_last(v, 0.0), _with_last(o, -1.0)
        heads = x["q"], x["k"], v
        (d_q, d_k, d_v), others = kernel.backward(heads, mean, log_total, cotangent)
        gradients: Arrays = {"q": d_q, "k": d_k, "v": _with_last(d_v, 0.0) if with_total else d_v}
        if self.leaf.sink:
            d_log_total = self.leaf.read.d_log_total(o, cotangent).transpose(1, 2)
            log_total = log_total.transpose(1, 2)[..., None]
            gradients["sink"] = sink_vjp(x["sink"], log_total, d_log_total)
        return {**gradients, **others}

    def _laser(self, kernel: Kernel, x: Arrays) -> tuple[Tensor, Tensor]:
        v, h = x["v"], x["q"].shape[2]
        shift = v.amax(1, keepdim=True)
        mean, log_total = kernel.forward(x["q"], x["k"], TORCH.exp(v - shift))
        o = mean.log_().add_(_of_each_head(shift, h)).contiguous()
        is_empty = log_total == -torch.inf
        if has_only_a_shape(o) or is_empty.any():
            o.masked_fill_(is_empty[..., None], 0.0)
        return o, _of_no_keys(log_total)

    def _laser_backward(
        self, kernel: Kernel, x: Arrays, o: Tensor, log_total: Tensor, cotangent: Tensor
    ) -> Arrays:
        v, h = x["v"], x["q"].shape[2]
        shift = v.amax(1, keepdim=True)
        weights, mean = TORCH.exp(v - shift), TORCH.exp(o - _of_each_head(shift, h))
        heads = x["q"], x["k"], weights
        arguments = heads, mean, log_total, cotangent / mean
        (d_q, d_k, d_weights), others = kernel.backward(*arguments)
        return {"q": d_q, "k": d_k, "v": d_weights * weights, **others}


def _of_no_keys(log_total: Tensor) -> Tensor:
    """λ, 0 in place of −∞ for a query without visible keys."""
    return log_total.masked_fill(log_total == -torch.inf, 0.0)


def _recorded(x: Tensor) -> Tensor:
    """A tensor of the same entries whose uses autograd records; a copy of tensors made in inference
    mode, of which it records none."""
    return (x.clone() if x.is_inference() else x.detach()).requires_grad_()


def _with_last(x: Tensor, value: float) -> Tensor:
    """A copy with `value` in the last channel."""
    return functional.pad(x[..., :-1], (0, 1), value=value)


def _is_close_together(v: Tensor) -> bool:
    """Whether all values of each channel are within the range that the read allows."""
    limit = RANGE[str(v.dtype).removeprefix("torch.")]
    return has_only_a_shape(v) or bool((v.amax(1) - v.amin(1) <= limit).all())


def _of_equal_width(q: Tensor, k: Tensor, v: Tensor) -> Heads:
    """q, k and v in the kernel's layout, with the heads of q and equal widths."""
    h, width = q.shape[2], max(q.shape[3], v.shape[3])
    q, k, v = (_of_each_head(of_width(a, width), h).transpose(1, 2) for a in (q, k, v))
    return q, k, v


def of_width(x: Tensor, width: int) -> Tensor:
    """x with rows padded with zeros and contiguous, as the kernel needs them.

    (`pad` would copy x even without padding, and would keep the strides of non-contiguous rows.)
    """
    missing = width - x.shape[3]
    x = functional.pad(x, (0, missing)) if missing else x
    return x if x.stride(3) == 1 else x.contiguous()


def _of_each_head(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


def _sum_of_heads(x: Tensor, heads: int) -> Tensor:
    b, t, h, d = x.shape
    return x if h == heads else x.reshape(b, t, heads, h // heads, d).sum(3)
