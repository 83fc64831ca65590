"""flash-linear-attention: the plain PyTorch references against which its kernels are tested.

Each is loaded from its file, since the package imports Triton. They compute in float32. References
without grouped heads require equal numbers of heads, so key and value heads are repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from precondattn.arrays import Array
from precondattn_conformance.peers.arrays import HALF32, Foreign, equally_wide, heads_first
from precondattn_conformance.peers.project import Project

FLA = Project(
    "fla",
    "flash-linear-attention",
    "https://github.com/fla-org/flash-linear-attention",
    package="fla-core",
)
ALL = (FLA,)
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


@FLA.peer("kda", dtypes=HALF32, state=STATE)
def kda_recurrent(
    q: Array, k: Array, v: Array, g: Array, beta: Array, scale: float | None, **state: object
) -> object:
    return _naive("kda", "naive_recurrent_kda")(q, k, v, g, beta, scale, **state)


@FLA.peer("kda", dtypes=HALF32, multiple=64, state=STATE)
def kda_chunk(
    q: Array, k: Array, v: Array, g: Array, beta: Array, scale: float | None, **state: object
) -> object:
    return _naive("kda", "naive_chunk_kda")(q, k, v, g, beta, scale, **state)


@FLA.peer("gated_delta", heads="equal", dtypes=HALF32, state=STATE)
def gated_delta_recurrent(
    q: Array, k: Array, v: Array, g: Array, beta: Array, scale: float | None, **state: object
) -> object:
    function = _naive("gated_delta_rule", "naive_recurrent_gated_delta_rule")
    return function(q, k, v, beta, g, scale, **state)


@FLA.peer("gated_delta", heads="equal", dtypes=HALF32, state=STATE)
def gated_delta_chunk(
    q: Array, k: Array, v: Array, g: Array, beta: Array, scale: float | None, **state: object
) -> object:
    function = _naive("gated_delta_rule", "naive_chunk_gated_delta_rule")
    return function(q, k, v, g, beta, scale=scale, **state)


def _delta(function: str, q: Array, k: Array, v: Array, beta: Array, **state: object) -> object:
    out, last = _naive("delta_rule", function)(*heads_first(q, k, v, beta), **state)
    return heads_first(out)[0], last


@FLA.peer("delta", heads="equal", dtypes=HALF32, state=STATE)
def delta_recurrent(q: Array, k: Array, v: Array, beta: Array, **state: object) -> object:
    return _delta("delta_rule_recurrence", q, k, v, beta, **state)


@FLA.peer("delta", heads="equal", multiple=32)
def delta_chunk(q: Array, k: Array, v: Array, beta: Array) -> object:
    return _delta("delta_rule_chunkwise", q, k, v, beta)


@FLA.peer("delta", heads="equal", multiple=128)
def delta_parallel(q: Array, k: Array, v: Array, beta: Array) -> object:
    return _delta("delta_rule_parallel", q, k, v, beta)


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


@FLA.peer("retention", layout="bhtd", heads="equal", dtypes=HALF32)
def retention_parallel(q: Array, k: Array, v: Array) -> object:
    return _naive("retention", "naive_retention")(q, k, v)


@FLA.peer("ssd", heads="equal", dtypes=HALF32, state=STATE)
def simple_gla_recurrent(
    q: Array, k: Array, v: Array, g: Array, scale: float, **state: object
) -> object:
    return _naive("simple_gla", "naive_recurrent_simple_gla")(q, k, v, g, scale, **state)


@FLA.peer("ssd", heads="equal", dtypes=HALF32, state=STATE)
def simple_gla_chunk(
    q: Array, k: Array, v: Array, g: Array, scale: float, **state: object
) -> object:
    return _naive("simple_gla", "naive_chunk_simple_gla")(q, k, v, g, scale=scale, **state)


@FLA.peer("ssd", heads="equal", dtypes=HALF32)
def simple_gla_parallel(q: Array, k: Array, v: Array, g: Array, scale: float) -> object:
    return _naive("simple_gla", "naive_parallel_simple_gla")(q, k, v, g, scale)


@FLA.peer("gsa", dtypes=HALF32)
def gsa_recurrent(q: Array, k: Array, v: Array, s: Array, g: Array, scale: float | None) -> object:
    return _naive("gsa", "naive_recurrent_gsa")(q, k, v, s, g, scale)


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


@FLA.peer("comba", heads="equal", dtypes=HALF32, state=STATE)
def comba_recurrent(
    q: Array,
    k: Array,
    v: Array,
    p: Array,
    g: Array,
    beta: Array,
    scale: float | None,
    **state: object,
) -> object:
    """Computes `comba[erases=decayed]`; its chunked form and its kernel compute `comba`."""
    return _naive("comba", "naive_recurrent_comba")(q, k, v, p, beta, g, scale, **state)


@FLA.peer("comba", heads="equal", dtypes=HALF32, state=STATE)
def comba_chunk(
    q: Array,
    k: Array,
    v: Array,
    p: Array,
    g: Array,
    beta: Array,
    scale: float | None,
    **state: object,
) -> object:
    return _naive("comba", "naive_chunk_comba")(q, k, v, p, g, beta, scale=scale, **state)


@FLA.peer("gdn2", heads="equal", dtypes=HALF32, state=STATE)
def gdn2_recurrent(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    b: Array,
    w: Array,
    scale: float | None,
    **state: object,
) -> object:
    return _naive("gdn2", "naive_recurrent_gdn2")(q, k, v, g, b, w, scale, **state)


@FLA.peer("gdn2", heads="equal", dtypes=HALF32, state=STATE)
def gdn2_chunk(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    b: Array,
    w: Array,
    scale: float | None,
    **state: object,
) -> object:
    return _naive("gdn2", "naive_chunk_gdn2")(q, k, v, g, b, w, scale, **state)


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


def _dplr(
    function: str, q: Array, k: Array, v: Array, a: Array, b: Array, g: Array, **state: object
) -> object:
    arrays = heads_first(q, k, v, a, b, g)
    out, last = _naive("generalized_delta_rule/dplr", function)(*arrays, **state)
    return heads_first(out)[0], last


@FLA.peer("dplr", heads="equal", dtypes=HALF32, state=STATE)
def dplr_recurrent(
    q: Array, k: Array, v: Array, a: Array, b: Array, g: Array, **state: object
) -> object:
    return _dplr("dplr_recurrence", q, k, v, a, b, g, **state)


@FLA.peer("dplr", heads="equal", dtypes=HALF32, multiple=32, state=STATE)
def dplr_chunk(
    q: Array, k: Array, v: Array, a: Array, b: Array, g: Array, **state: object
) -> object:
    return _dplr("dplr_chunkwise", q, k, v, a, b, g, **state)


@FLA.peer("softmax[forget=unscaled]", dtypes=HALF32)
def forgetting_attn(
    q: Array, k: Array, v: Array, g: Array, scale: float | None, window: int | None
) -> object:
    return _naive("forgetting_attn", "naive_forgetting_attn")(q, k, v, g, scale, window)


@FLA.peer("softmax")
def attn_parallel(
    q: Array,
    k: Array,
    v: Array,
    scale: float | None,
    window: int | None,
    causal: bool,
    sink: Array | None = None,
) -> object:
    function = _naive("attn", "naive_parallel_attn")
    return function(q, k, v, scale, window, causal, sink_bias=sink)


@FLA.peer("softmax[forget=unscaled]", dtypes=HALF32)
def attn_parallel_forget(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    scale: float | None,
    window: int | None,
    sink: Array | None = None,
) -> object:
    function = _naive("attn", "naive_parallel_attn")
    return function(q, k, v, scale, window, g=g, sink_bias=sink)


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


@FLA.peer("linear", heads="equal", multiple=64)
def linear_chunk(q: Array, k: Array, v: Array, scale: float | None, normalize: bool) -> object:
    return _naive("linear_attn", "naive_chunk_linear_attn")(q, k, v, scale, normalize)


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


@FLA.peer("rwkv6[scale=1]", layout="bhtd", heads="equal", dtypes=HALF32, multiple=32)
def rwkv6_chunk(q: Array, k: Array, v: Array, g: Array, u: Array) -> object:
    """Does not scale; the recurrent form scales by d^(-1/2)."""
    return _naive("rwkv6", "naive_chunk_rwkv6", "chunk_naive")(q, k, v, g, u)


@FLA.peer("qk_norm[norm=l2,eps=0](atk)", dtypes=HALF32)
def atk_recurrent(
    q: Array, k: Array, v: Array, g: Array, beta: Array, g_atk: Array, beta_atk: Array
) -> object:
    """Normalises queries and keys to length 1 itself."""
    function = _naive("precond_gated_delta_rule", "naive_recurrent_precond_gated_delta_rule")
    return function(q, k, v, g_atk, g, beta_atk, beta)


@FLA.peer("atk(kda)", heads="equal", dtypes=HALF32)
def atk_kda_recurrent(
    q: Array, k: Array, v: Array, g: Array, beta: Array, g_atk: Array, beta_atk: Array
) -> object:
    function = _naive("precond_kda", "naive_recurrent_precond_kda")
    return function(q, k, v, g, g_atk, beta_atk, beta)
