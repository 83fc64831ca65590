"""flash-linear-attention's kernels, in Triton on a GPU.

The functions have the same input names, layouts and default scale as precondattn's; decays are
logarithms. The adapters handle these differences:

* linear attention, retention and GLA require equal head counts, so keys, values and gates are
  repeated for each query head, and for the delta rule queries and keys for each value head;
* PaTH takes its directions and strengths in float32, which keeps their rounded values;
* the delta rule does not support float32.

They were compared with the functions of version 0.6.0.
"""

from __future__ import annotations

from functools import partial

from precondattn.arrays import Array
from precondattn_conformance.libraries import HALF
from precondattn_conformance.peers.arrays import HALF32, Foreign
from precondattn_conformance.peers.fla import FLA, STATE, by_key_heads

ALL = (FLA,)

GPU = frozenset({"cuda"})
of_gpu = partial(FLA.peer, devices=GPU)


def _kernel(operation: str, function: str) -> Foreign:
    return getattr(FLA.imported(f"fla.ops.{operation}"), function)


def _with_state(operation: str, function: str, *arguments: Foreign, **options: Foreign) -> object:
    """A kernel of equal heads, which takes the state before the call after its other arguments."""
    *arrays, initial_state = arguments
    run = partial(_kernel(operation, function), **options)
    return by_key_heads(
        lambda state: run(*arrays, state, state is not None), arrays[0].shape[2], initial_state
    )


WIDEST_WRONG_TILE = 64
"""The largest key width for which fla's refusal on Hopper is justified."""


@of_gpu("gated_delta", dtypes=HALF32, state=STATE)
def kernel_gated_delta(
    q: Array, k: Array, v: Array, g: Array, beta: Array, scale: float | None, **state: Foreign
) -> object:
    """Allows the gradient on Hopper for key widths that are computed correctly.

    With Triton from 3.4 to 3.7.0, fla refuses this gradient on Hopper at every width. Only a
    product in tiles of 64 key channels is wrong there, and wider keys use tiles of 128 (issue 640
    of flash-linear-attention). fla's module checks a flag, which is set here for wider keys only.
    """
    chunk_o: Foreign = FLA.imported("fla.ops.common.chunk_o")
    if hasattr(chunk_o, "TRITON_ABOVE_3_7_1"):
        is_mended = FLA.imported("fla.utils").TRITON_ABOVE_3_7_1
        chunk_o.TRITON_ABOVE_3_7_1 = is_mended or q.shape[-1] > WIDEST_WRONG_TILE
    function = _kernel("gated_delta_rule", "chunk_gated_delta_rule")
    return function(q, k, v, g, beta, scale, **state)


@of_gpu("path", dtypes=HALF32)
def kernel_path(q: Array, k: Array, v: Array, w: Array, beta: Array, scale: float | None) -> object:
    function = _kernel("path_attn.parallel", "parallel_path_attn")
    return function(q, k, v, w.float(), beta.float(), scale=scale)


EQUAL = {"heads": "equal", "dtypes": HALF32}
_with_state_of = partial(partial, partial, _with_state)
for _name, _load, _takes, _arrangement in (
    ("linear", _with_state_of("linear_attn", "chunk_linear_attn"),
     "q k v scale initial_state? normalize=", EQUAL),
    ("retention", _with_state_of("retention", "chunk_retention"), "q k v scale initial_state?",
     EQUAL),
    ("gla", _with_state_of("gla", "chunk_gla"), "q k v g scale initial_state?", EQUAL),
    ("gsa", partial(_kernel, "gsa", "chunk_gsa"), "q k v s g scale", {"dtypes": HALF32}),
    ("delta", partial(_kernel, "delta_rule", "chunk_delta_rule"), "q k v beta scale **state",
     {"heads": "equal", "dtypes": HALF, "state": STATE}),
    ("kda", partial(_kernel, "kda", "chunk_kda"), "q k v g beta scale **state",
     {"dtypes": HALF32, "state": STATE}),
):  # fmt: skip
    FLA.direct(f"kernel_{_name}", _name, _load, _takes, devices=GPU, **_arrangement)
