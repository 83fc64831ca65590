"""The recurrence of linear attention and the delta rule, token by token: launches.

The kernels (`cuda/scan.cu`) have the states in registers, and compute in float32. They are the same
for a gate of a head and for gates of its key channels. Besides inputs, outputs and their gradients,
the gradient's memory holds a state of d e numbers for each of `SEGMENT` tokens and for each segment
of the sequence, and, for each block of 32 value channels, the gradients of rows of key channels;
the forward pass holds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from precondattn.arrays import Array, namespace
from precondattn.frame import Frame
from precondattn.kernel_backend.stateful import StatefulKernels, scale_in_form
from precondattn.spec.linear_family import LinearFamily
from precondattn.spec.recurrence import AllTokens, Stream, StreamGradients
from precondattn_cupy.configurations import padded_width
from precondattn_cupy.launch import cpp_type, launch
from precondattn_cupy.layout import empty, in_one_piece

SEGMENT = 32
"""Tokens between the states that the gradient starts from."""
VALUES, WARPS, LANES = 4, 8, 32
"""Value channels of a warp, warps of a block (`cuda/scan.cu`), and threads of a warp."""


class Scan(AllTokens):
    """A `Form` of the recurrence (`precondattn.spec.recurrence`), with the outputs times `scale`.

    A stream's queries, keys and values may have fewer heads than the state. Gates (b, m, s, d, 1),
    or one for all channels. The queries' gradient does not include the scale.
    """

    def __init__(self, *, scale: float = 1.0) -> None:
        self.scale = scale

    def forward(self, x: Stream, state: Array) -> tuple[Array, Array]:
        call = ScanCall(x, state, self.scale)
        last = call.scratch(call.b, call.m, call.d, call.e)
        o = empty(call.v, (call.b, call.t, call.m, call.r, call.e))
        call.launch("scan_tokens", call.initial, last, None, o)
        return heads_first(o), last

    def vjp(self, x: Stream, state: Array, d_o: Array, d_final: Array) -> StreamGradients:
        call = ScanCall(x, state, self.scale)
        xp, blocks = namespace(call.k), call.blocks
        states = call.scratch(call.b * call.m, -(-call.s // SEGMENT), call.d, call.e)
        call.launch("scan_tokens", call.initial, None, states, None)
        d_o = tokens_first(xp.astype(d_o, call.k.dtype, copy=False))
        memory = call.scratch(call.b * call.m, blocks * WARPS, SEGMENT, VALUES * call.width)
        rows = (blocks, call.b, call.s, call.m)
        d_q = call.scratch(blocks, call.b, call.t, call.m, call.r, call.d)
        d_k, d_g = call.scratch(*rows, call.d), call.scratch(*rows, call.d)
        d_a = None if call.a is None else call.scratch(*rows, call.d)
        d_beta = None if call.beta is None else call.scratch(*rows)
        d_v = call.scratch(call.b, call.s, call.m, call.e)
        d_initial = call.scratch(call.b, call.m, call.d, call.e)
        gradients = (d_q, d_k, d_a, d_v, d_g, d_beta, d_initial)
        d_last = in_one_piece(d_final)
        call.launch("scan_tokens_back", states, d_o, d_last, memory, *gradients)

        def total(d: Array | None) -> Array:
            return None if d is None else heads_first(xp.sum(d, axis=0))

        d_gates = total(d_g)[..., None]
        if x.g.shape[3] == 1:
            d_gates = xp.sum(d_gates, axis=3, keepdims=True)
        stream = Stream(
            total(d_q), total(d_k), heads_first(d_v), d_gates, total(d_beta), total(d_a)
        )
        return StreamGradients(stream, d_initial)


class ScanCall:
    """The arrays and numbers of one call.

    `q` (b, t, heads, r, d), `k` and `a` (b, s, heads, d), `v` (b, s, heads, e), `g` (b, s, m, d or
    1) and `beta` (b, s, m). `a` are the keys that the delta rule erases; None if these are `k`.
    """

    def __init__(self, x: Stream, state: Array, scale: float) -> None:
        self.b, self.m, self.d, self.e = state.shape
        self.t, self.r = x.q.shape[2:4]
        self.s = x.k.shape[2]
        self.q, self.k, self.v = (tokens_first(array) for array in (x.q, x.k, x.v))
        self.a = None if x.erase is None else tokens_first(x.erase)
        self.g = self._numbers(x.g[..., 0])
        self.beta = None if x.beta is None else self._numbers(x.beta)
        self.initial = in_one_piece(state)
        self.scale = float(scale)
        self.width = max(padded_width(self.d), LANES)

    def _numbers(self, x: Array) -> Array:
        xp = namespace(x)
        return tokens_first(xp.astype(x, xp.float32, copy=False))

    @property
    def blocks(self) -> int:
        """Blocks of value channels."""
        return -(-int(self.e) // (VALUES * WARPS))

    def scratch(self, *shape: int) -> Array:
        """An uninitialized array in float32."""
        return empty(self.k, shape, namespace(self.k).float32)

    def launch(self, kernel: str, *arrays: Array | None) -> None:
        """Launch a kernel with the inputs and further arrays."""
        erases = () if self.a is None else (1,)
        inputs = (self.q, self.k, self.a, self.v, self.g, self.beta)
        a_heads = 1 if self.a is None else self.a.shape[2]
        heads = (self.m, self.r, *(x.shape[2] for x in (self.q, self.k)), a_heads, self.v.shape[2])
        sizes = (self.s, self.t, self.d, self.e, self.g.shape[3], SEGMENT)
        template = ", ".join(map(str, (cpp_type(self.k), self.width, *erases)))
        launch(
            "scan",
            f"{kernel}<{template}>",
            (self.blocks, self.b * self.m),
            LANES * WARPS,
            (*inputs, *arrays, *heads, *sizes, self.scale),
        )


def tokens_first(x: Array) -> Array:
    """An array (b, heads, tokens, …) as (b, tokens, heads, …), contiguous."""
    order = (0, 2, 1, *range(3, x.ndim))
    return in_one_piece(namespace(x).permute_dims(x, order))


def heads_first(x: Array) -> Array:
    """An array (b, tokens, heads, …) as (b, heads, tokens, …), as a view."""
    return namespace(x).permute_dims(x, (0, 2, 1, *range(3, x.ndim)))


class RecurrenceKernels(StatefulKernels):
    """The linear family with a decay for each token or key channel, CCQ's query, and ATK's key."""

    def form(self, leaf: LinearFamily, x: Mapping[str, Array], frame: Frame) -> Scan:  # type: ignore[override]
        return Scan(scale=scale_in_form(leaf, x))
