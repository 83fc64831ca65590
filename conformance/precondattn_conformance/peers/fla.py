"""flash-linear-attention: the plain PyTorch references against which its kernels are tested.

Each is loaded from its file, since the package imports Triton. They compute in float32. References
without grouped heads require equal numbers of heads, so key and value heads are repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

from precondattn.arrays import Array
from precondattn_conformance.libraries import HALF
from precondattn_conformance.peers.arrays import (
    HALF32,
    Foreign,
    equally_wide,
)
from precondattn_conformance.peers.project import Project

FLA = Project(
    "fla",
    "flash-linear-attention",
    "https://github.com/fla-org/flash-linear-attention",
    package="fla-core",
)
STATE = ("initial_state", "output_final_state")


def references(operation: str, file: str = "naive") -> ModuleType:
    """The module of an operation that contains its references."""
    return FLA.imported(f"fla/ops/{operation}/{file}.py")


def _naive(operation: str, function: str, file: str = "naive") -> Foreign:
    return getattr(references(operation, file), function)


def by_key_heads(
    function: Callable[[Array | None], tuple[Array, Array | None]],
    heads: int,
    initial_state: Array | None = None,
) -> tuple[Array, Array | None]:
    """Call a function of equal heads, with a state per key head repeated for query heads."""
    if initial_state is None:
        return function(None)
    group = heads // initial_state.shape[1]
    out, last = function(initial_state.repeat_interleave(group, 1))
    return out, None if last is None else last[:, ::group]


@FLA.peer("gla", heads="equal", dtypes=HALF32)
def gla_recurrent(
    q: Array, k: Array, v: Array, g: Array, initial_state: Array | None = None
) -> object:
    function = _naive("gla", "naive_recurrent_gla")
    return by_key_heads(
        lambda state: function(q, k, v, g, state, output_final_state=True),
        q.shape[2],
        initial_state,
    )


def _path(
    q: Array, k: Array, v: Array, w: Array, beta: Array, g: Array, scale: float | None
) -> object:
    """Adapter of the PaTH reference, which has no default scale."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _naive("path_attn", "naive_path_attn")(q, k, v, w, beta, g, scale)


@FLA.peer("path", dtypes=HALF32)
def path_parallel(
    q: Array, k: Array, v: Array, w: Array, beta: Array, scale: float | None
) -> object:
    return _path(q, k, v, w, beta, q.new_zeros(q.shape[:3]), scale)


@FLA.peer("path[forget=scaled]", dtypes=HALF32)
def path_forget(
    q: Array, k: Array, v: Array, w: Array, beta: Array, g: Array, scale: float | None
) -> object:
    return _path(q, k, v, w, beta, g, scale)


def _mesa(
    function: str, q: Array, k: Array, v: Array, g: Array, lam: Array, *chunk_size: int
) -> Array:
    """Adapter of the Mesa references, which take values as wide as keys, and a β per token."""
    import torch

    e, (q, k, v) = v.shape[-1], equally_wide(q, k, v)
    lam = torch.nn.functional.pad(lam, (0, q.shape[-1] - lam.shape[-1]), value=1.0)
    out = _naive("mesa_net", function)(q, k, v, g, lam, torch.ones_like(g), *chunk_size)[0]
    return out[..., :e]


@FLA.peer("mesa", dtypes=HALF32)
def mesa_exact(q: Array, k: Array, v: Array, g: Array, lam_mesa: Array) -> Array:
    return _mesa("naive_mesa_net_exact", q, k, v, g, lam_mesa)


OF_AN_OUTPUT = (
    *("outputs", "gradients", "future", "stability", "dtypes"),
    *("determinism", "order_of_calls", "strides", "threads"),
)
"""The checks that compare an output with the oracle's."""


@FLA.peer(
    "mesa",
    dtypes=HALF32,
    multiple=64,
    limits=dict.fromkeys(OF_AN_OUTPUT, "a CG solver approximates the matrix inverse"),
)
def mesa_cg(q: Array, k: Array, v: Array, g: Array, lam_mesa: Array) -> Array:
    return _mesa("naive_mesa_net_CG", q, k, v, g, lam_mesa, 64)


@FLA.peer("deltaformer", heads="equal", dtypes=HALF32)
def deltaformer(q: Array, k: Array, v: Array, beta: Array) -> Array:
    """Takes values as wide as queries, and scales by that width."""
    d, e = q.shape[-1], v.shape[-1]
    q, k, v = equally_wide(q, k, v)
    function = _naive("deltaformer", "naive_deltaformer_attn")
    return function(q * (q.shape[-1] / d) ** 0.5, k, v, beta)[..., :e]


@FLA.peer("delta_product", heads="equal", dtypes=HALF32)
def delta_product_recurrent(
    q: Array, k: Array, v: Array, g: Array, beta: Array, scale: float | None, steps: int
) -> object:
    """Takes the steps of a token as separate rows (b, t steps, h, d), and has no default scale."""
    k, v, beta = (x.flatten(1, 2) for x in (k, v, beta))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    function = _naive("gated_delta_product", "naive_recurrent_gated_delta_product")
    return function(q, k, v, g, beta, scale, num_householder=steps)


def _attention(
    q: Array,
    k: Array,
    v: Array,
    scale: float | None,
    window: int | None,
    causal: bool = True,
    sink: Array | None = None,
    **gate: Array,
) -> object:
    function = _naive("attn", "naive_parallel_attn")
    return function(q, k, v, scale, window, causal, sink_bias=sink, **gate)


_attend: Foreign = partial(partial, _attention)
FLA.direct("attn_parallel", "softmax", _attend, "q k v scale window causal sink=?")
FLA.direct(
    *("attn_parallel_forget", "softmax[forget=unscaled]", _attend),
    "q k v scale window g= sink=?",
    dtypes=HALF32,
)


@FLA.peer("linear", heads="equal", dtypes=HALF32)
def linear_recurrent(
    q: Array,
    k: Array,
    v: Array,
    scale: float | None,
    normalize: bool,
    initial_state: Array | None = None,
) -> object:
    function = _naive("linear_attn", "naive_recurrent_linear_attn")
    return by_key_heads(
        lambda state: function(q, k, v, scale, state, True, normalize), q.shape[2], initial_state
    )


@FLA.peer("rwkv6", layout="bhtd", heads="equal", dtypes=HALF32)
def rwkv6_recurrent(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    u: Array,
    scale: float | None,
    initial_state: Array | None = None,
) -> object:
    function = _naive("rwkv6", "naive_recurrent_rwkv6", "recurrent_naive")
    return by_key_heads(
        lambda state: function(q, k, v, g, u, scale, state, True), q.shape[1], initial_state
    )


EQUAL = {"heads": "equal"}
HEADS_FIRST = EQUAL | {"layout": "bhtd"}

# Functions that take their arguments as they are: name, mechanism, operation, function, arguments.
# The recurrent form of Comba computes `comba[erases=decayed]`, its chunked form and its kernel
# `comba`. The chunked form of RWKV-6 does not scale. ATK normalises queries and keys itself.
_arrangement: Foreign
for _name, _mechanism, _operation, _function, _takes, _arrangement in (
    ("delta_recurrent", "delta", "delta_rule", "delta_rule_recurrence", "q k v beta **state",
     HEADS_FIRST),
    ("delta_chunk", "delta", "delta_rule", "delta_rule_chunkwise", "q k v beta",
     HEADS_FIRST | {"dtypes": None, "multiple": 32}),
    ("delta_parallel", "delta", "delta_rule", "delta_rule_parallel", "q k v beta",
     HEADS_FIRST | {"dtypes": None, "multiple": 128}),
    ("dplr_recurrent", "dplr", "generalized_delta_rule/dplr", "dplr_recurrence",
     "q k v a b g **state", HEADS_FIRST),
    ("dplr_chunk", "dplr", "generalized_delta_rule/dplr", "dplr_chunkwise",
     "q k v a b g **state", HEADS_FIRST | {"multiple": 32}),
    ("kda_recurrent", "kda", "kda", "recurrent_kda", "q k v g beta scale **state", {}),
    ("kda_chunk", "kda", "kda", "chunk_kda", "q k v g beta scale **state", {"multiple": 64}),
    ("gated_delta_recurrent", "gated_delta", "gated_delta_rule", "recurrent_gated_delta_rule",
     "q k v beta g scale **state", EQUAL),
    ("gated_delta_chunk", "gated_delta", "gated_delta_rule", "chunk_gated_delta_rule",
     "q k v g beta scale= **state", EQUAL),
    ("retention_parallel", "retention", "retention", "retention", "q k v", HEADS_FIRST),
    ("simple_gla_recurrent", "ssd", "simple_gla", "recurrent_simple_gla",
     "q k v g scale **state", EQUAL),
    ("simple_gla_chunk", "ssd", "simple_gla", "chunk_simple_gla",
     "q k v g scale= **state", EQUAL),
    ("simple_gla_parallel", "ssd", "simple_gla", "parallel_simple_gla", "q k v g scale", EQUAL),
    ("gsa_recurrent", "gsa", "gsa", "recurrent_gsa", "q k v s g scale", {}),
    ("comba_recurrent", "comba", "comba", "recurrent_comba",
     "q k v p beta g scale **state", EQUAL),
    ("comba_chunk", "comba", "comba", "chunk_comba", "q k v p g beta scale= **state", EQUAL),
    ("gdn2_recurrent", "gdn2", "gdn2", "recurrent_gdn2", "q k v g b w scale **state", EQUAL),
    ("gdn2_chunk", "gdn2", "gdn2", "chunk_gdn2", "q k v g b w scale **state", EQUAL),
    ("forgetting_attn", "softmax[forget=unscaled]", "forgetting_attn", "forgetting_attn",
     "q k v g scale window", {}),
    ("linear_chunk", "linear", "linear_attn", "chunk_linear_attn", "q k v scale normalize",
     EQUAL | {"dtypes": None, "multiple": 64}),
    ("rwkv6_chunk", "rwkv6[scale=1]", "rwkv6", "chunk_rwkv6", "q k v g u",
     HEADS_FIRST | {"multiple": 32, "file": "chunk_naive"}),
    ("atk_recurrent", "qk_norm[norm=l2,eps=0](atk)", "precond_gated_delta_rule",
     "recurrent_precond_gated_delta_rule", "q k v g_atk g beta_atk beta", {}),
    ("atk_kda_recurrent", "atk(kda)", "precond_kda", "recurrent_precond_kda",
     "q k v g g_atk beta_atk beta", EQUAL),
):  # fmt: skip
    _more = {"dtypes": HALF32, "file": "naive"} | _arrangement
    _prefix = "" if _mechanism in ("delta", "dplr") else "naive_"
    _load = partial(_naive, _operation, _prefix + _function, str(_more.pop("file")))
    _state = {"state": STATE} if "**state" in _takes else {}
    FLA.direct(_name, _mechanism, _load, _takes, **_more, **_state)


# flash-linear-attention's kernels, in Triton on a GPU.
#
# The functions have the same input names, layouts and default scale as precondattn's; decays are
# logarithms. The adapters handle these differences:
#
# * linear attention, retention and GLA require equal head counts, so keys, values and gates are
#   repeated for each query head, and for the delta rule queries and keys for each value head;
# * PaTH takes its directions and strengths in float32, which keeps their rounded values;
# * the delta rule does not support float32.
#
# They were compared with the functions of version 0.6.0.

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


EQUAL_IN_32 = EQUAL | {"dtypes": HALF32}
_with_state_of = partial(partial, partial, _with_state)
for _name, _load, _takes, _arrangement in (
    ("linear", _with_state_of("linear_attn", "chunk_linear_attn"),
     "q k v scale initial_state? normalize=", EQUAL_IN_32),
    ("retention", _with_state_of("retention", "chunk_retention"), "q k v scale initial_state?",
     EQUAL_IN_32),
    ("gla", _with_state_of("gla", "chunk_gla"), "q k v g scale initial_state?", EQUAL_IN_32),
    ("gsa", partial(_kernel, "gsa", "chunk_gsa"), "q k v s g scale", {"dtypes": HALF32}),
    ("delta", partial(_kernel, "delta_rule", "chunk_delta_rule"), "q k v beta scale **state",
     {"heads": "equal", "dtypes": HALF, "state": STATE}),
    ("kda", partial(_kernel, "kda", "chunk_kda"), "q k v g beta scale **state",
     {"dtypes": HALF32, "state": STATE}),
):  # fmt: skip
    FLA.direct(f"kernel_{_name}", _name, _load, _takes, devices=GPU, **_arrangement)
