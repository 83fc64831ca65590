"""The recurrence with a gate for each key channel, token by token: launches.

The kernels (`cuda/channel_scan.cu`) have the states in registers, and compute in float32. Besides
inputs, outputs and their gradients, the gradient's memory holds a state of d e numbers for each of
`SEGMENT` tokens and for each segment of the sequence, and, for each block of 32 value channels, the
gradients of rows of key channels; the forward pass holds nothing.
"""

from __future__ import annotations

from precondattn.arrays import Array, namespace
from precondattn.spec.recurrence import AllTokens, Stream, StreamGradients
from precondattn_cupy.launch import cpp_type, launch
from precondattn_cupy.layout import in_one_piece
from precondattn_cupy.recurrence.chunk_arrays import ChunkCall, heads_first, tokens_first

SEGMENT = 32
"""Tokens between the states that the gradient starts from."""
VALUES, WARPS, LANES = 4, 8, 32
"""Value channels of a warp, warps of a block (`cuda/channel_scan.cu`), and threads of a warp."""


class ChannelScan(AllTokens):
    """A `Form` of the recurrence (`precondattn.spec.recurrence`), with the outputs times `scale`.

    A stream's queries, keys and values may have fewer heads than the state. Gates (b, m, s, d, 1),
    or one for all channels.
    """

    def __init__(self, *, scale: float = 1.0) -> None:
        self.scale = scale

    def forward(self, x: Stream, state: Array) -> tuple[Array, Array]:
        call = ChannelCall(x, state, self.scale)
        last = call.scratch(call.b, call.m, call.d, call.e)
        o = call.outputs(call.b, call.t, call.m, call.r, call.e)
        call.scan("scan_channels", call.initial, last, None, o)
        return heads_first(o), last

    def vjp(self, x: Stream, state: Array, d_o: Array, d_final: Array) -> StreamGradients:
        call = ChannelCall(x, state, self.scale)
        xp, blocks = namespace(call.k), call.blocks
        states = call.scratch(call.heads, -(-call.s // SEGMENT), call.d, call.e)
        call.scan("scan_channels", call.initial, None, states, None)
        d_o = tokens_first(xp.astype(d_o, call.k.dtype, copy=False))
        memory = call.scratch(call.heads, blocks * WARPS, SEGMENT, VALUES * call.width)
        rows = (blocks, call.b, call.s, call.m)
        d_q = call.scratch(blocks, call.b, call.t, call.m, call.r, call.d)
        d_k, d_g = call.scratch(*rows, call.d), call.scratch(*rows, call.d)
        d_a = None if call.a is None else call.scratch(*rows, call.d)
        d_beta = None if call.beta is None else call.scratch(*rows)
        d_v = call.scratch(call.b, call.s, call.m, call.e)
        d_initial = call.scratch(call.b, call.m, call.d, call.e)
        gradients = (d_q, d_k, d_a, d_v, d_g, d_beta, d_initial)
        d_last = in_one_piece(d_final)
        call.scan("scan_channels_back", states, d_o, d_last, memory, *gradients)

        def total(d: Array | None) -> Array:
            return None if d is None else heads_first(xp.sum(d, axis=0))

        d_gates = total(d_g)[..., None]
        if x.g.shape[3] == 1:
            d_gates = xp.sum(d_gates, axis=3, keepdims=True)
        stream = Stream(
            total(d_q), total(d_k), heads_first(d_v), d_gates, total(d_beta), total(d_a)
        )
        return StreamGradients(stream, d_initial)


class ChannelCall(ChunkCall):
    """The arrays of one call, with gates (b, s, m, d)."""

    def __init__(self, x: Stream, state: Array, scale: float) -> None:
        super().__init__(x, state, False, scale)
        xp = namespace(x.g)
        shape = (self.b, self.m, self.s, self.d)
        self.gates = self._numbers(xp.broadcast_to(x.g[..., 0], shape))
        self.width = max(self.width, LANES)

    @property
    def blocks(self) -> int:
        """Blocks of value channels."""
        return -(-int(self.e) // (VALUES * WARPS))

    def scan(self, kernel: str, *arrays: Array | None) -> None:
        """Launch a kernel with the inputs and further arrays."""
        inputs = (self.q, self.k, self.a, self.v, self.gates, self.beta)
        heads = (self.m, self.r, self.q_heads, self.k_heads, self.a_heads, self.v_heads)
        sizes = (self.s, self.t, self.d, self.e, SEGMENT)
        template = ", ".join(map(str, (cpp_type(self.k), self.width, *self.erases)))
        launch(
            "channel_scan",
            f"{kernel}<{template}>",
            (self.blocks, self.heads),
            LANES * WARPS,
            (*inputs, *arrays, *heads, *sizes, self.scale),
        )
