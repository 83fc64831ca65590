"""Gated delta rules of training and serving frameworks, in JAX and PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from precondattn.arrays import Array
from precondattn_conformance.peers.arrays import (
    HALF32,
    Foreign,
    scale_of,
    widened,
)
from precondattn_conformance.peers.files import names_of
from precondattn_conformance.peers.project import on_github

MAXTEXT = on_github(
    "AI-Hypercomputer/maxtext@e591f30cbbf217ed67ef71263ec0538239f9c3b8", "2026-08-22", "MaxText"
)
EASYDEL = on_github(
    "erfanzar/EasyDeL@090a03b2e0b3606bd38e0e3fcfdc640cd7e6e246", "2026-04-22", "EasyDeL"
)
EJKERNEL = on_github(
    "erfanzar/ejkernel@2107406ec1b90a7fa06b3af40799c8f9c7f02aff", "2025-11-10", "ejKernel"
)
JAX: dict[str, Foreign] = {"library": "jax", "heads": "equal"}
QWEN = "src/maxtext/models/qwen3.py"


def _of_maxtext(function: str, q: Array, *arrays: Array, **state: Array | None) -> Foreign:
    """One whose default dtype is bfloat16; here it is that of the queries."""
    run = MAXTEXT.defined(QWEN, function, given="jax")
    return run(q, *arrays, **state, compute_dtype=q.dtype)


def _of_easydel(function: str, q: Array, *arrays: Array, **state: Array | None) -> Foreign:
    """One with one decay for each head, which is the gated delta rule and not KDA."""
    path = "easydel/operations/kernels/kda.py"
    run = EASYDEL.defined(path, function, given="jax", _MATMUL_PRECISION=None)
    k, v, g, beta = arrays
    out, last = run(q, k, v, beta, g, **state, use_qk_l2norm=False)
    return out.astype(q.dtype), last


def _token_by_token(
    step: Callable[..., tuple[Array, Array]],
    dtype: str | None,
    *arrays: Array,
    initial_state: Array | None = None,
) -> tuple[Array, Array]:
    """Outputs and the last state of a step `(state, *arrays of a token) -> (state, output)`.

    The state is in a dtype, or in that of the queries.
    """
    from jax import lax
    from jax import numpy as jnp

    q, _, v, *_ = arrays
    if initial_state is None:
        initial_state = jnp.zeros((q.shape[0], q.shape[2], q.shape[3], v.shape[3]), q.dtype)
    state = initial_state.astype(dtype or initial_state.dtype)
    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in arrays)
    state, out = lax.scan(lambda state, x: step(state, *x), state, tokens)
    return jnp.moveaxis(out, 0, 1).astype(q.dtype), state


def _step_of_maxtext(state: Array, *token: Array) -> tuple[Array, Array]:
    function, token = "jax_ar_gated_delta_rule", tuple(x[:, None] for x in token)
    out, after = _of_maxtext(function, *token, initial_state=state)
    return after, out[:, 0]


def _step_of_easydel(state: Array, *token: Array) -> tuple[Array, Array]:
    path, name = "easydel/operations/kernels/inference_gdn.py", "recurrent_gated_delta_rule_step"
    out, after = EASYDEL.defined(path, name, given="jax")(*token, state)
    return after.astype(state.dtype), out


_arrangement: Foreign
for _project, _name, _load, _arrangement in (
    (MAXTEXT, "naive_jax_chunk_gated_delta_rule",
     partial(MAXTEXT.defined, QWEN, "naive_jax_chunk_gated_delta_rule", given="jax"), {}),
    (MAXTEXT, "jax_chunk_gated_delta_rule",
     partial(partial, _of_maxtext, "jax_chunk_gated_delta_rule"), {}),
    (MAXTEXT, "jax_ar_gated_delta_rule",
     partial(partial, _token_by_token, _step_of_maxtext, "float32"), {}),
    (EASYDEL, "recurrent_kda", partial(partial, _of_easydel, "_recurrent_kda_fwd"),
     {"layout": "bhtd"}),
    (EASYDEL, "chunk_kda", partial(partial, _of_easydel, "_chunk_kda_fwd"), {"layout": "bhtd"}),
    (EASYDEL, "recurrent_gated_delta_rule_step",
     partial(partial, _token_by_token, _step_of_easydel, None), {"dtypes": None}),
):  # fmt: skip
    _arrangement = {**JAX, "dtypes": HALF32, **_arrangement}
    _project.direct(_name, "gated_delta", _load, "q k v g beta initial_state=?", **_arrangement)


def _of_ejkernel(file: str, function: str, *more: str) -> Foreign:
    return EJKERNEL.defined(f"ejkernel/kernels/_xla/{file}.py", function, *more, given="jax")


_FORWARD = ("recurrent/_xla_impl_fwd", "_recurrent_attention_fwd", "_recurrent_attention_step")


@cache
def _recurrent() -> Foreign:
    """ejKernel's recurrence with its custom derivative, assembled as in its own module."""
    import jax

    backward = "_recurrent_attention_bwd"
    parts = {
        _FORWARD[1]: _of_ejkernel(*_FORWARD),
        backward: _of_ejkernel("recurrent/_xla_impl_bwd", backward),
    }
    path = "ejkernel/kernels/_xla/recurrent/_interface.py"
    names = ("_recurrent_core", "_recurrent_fwd", "_recurrent_bwd")
    module = EJKERNEL.excerpt(path, *names, imported=names_of("jax") | parts)
    core = jax.custom_vjp(module._recurrent_core, nondiff_argnums=(4, 7, 9, 10))
    core.defvjp(module._recurrent_fwd, module._recurrent_bwd)
    return core


def _recurrence(differentiates: bool, *arrays: Array, scale: float | None) -> Array:
    """ejKernel's recurrence of q, k, v and perhaps g, in one width; or its forward pass alone."""
    q, _, v, *_ = arrays
    width = max(q.shape[-1], v.shape[-1])
    wide_q, k, wide_v, g = (*(widened(x, width) for x in arrays), None)[:4]
    wide, scale = (wide_q, k, wide_v), scale_of(q, scale)
    if differentiates:
        out, _ = _recurrent()(*wide, None, None, g, None, scale, None, False, None)
    else:
        out, *_ = _of_ejkernel(*_FORWARD)(*wide, gk=g, softmax_scale=scale)
    return out[..., : v.shape[-1]].astype(q.dtype)


for _name, _mechanism, _takes, _differentiates in (
    ("recurrent", "linear", "q k v scale=", True),
    ("recurrent_gated", "gla", "q k v g scale=", True),
    ("recurrent_forward", "gla", "q k v g scale=", False),
):
    _load = partial(partial, _recurrence, _differentiates)
    EJKERNEL.direct(_name, _mechanism, _load, _takes, dtypes=HALF32, **JAX)


@EJKERNEL.peer("softmax", library="jax", heads="equal")
def attention(
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    scale: float | None,
    softcap: float | None,
    sink: Array | None = None,
) -> Array:
    """The defaults are bfloat16 and a float32 softmax; here both use the queries' dtype."""
    run = _of_ejkernel("attention/_interface", "attention")
    return run(
        q,
        k,
        v,
        visible,
        softmax_aux=None if sink is None else sink[:, None],
        softmax_scale=scale,
        logits_soft_cap=softcap,
        dtype=q.dtype,
        softmax_dtype=q.dtype,
    )[0]


MEGATRON = on_github(
    "NVIDIA/Megatron-LM@d98e8a64ddf34856e74b24714e3bedb2f5a39553",
    "2026-08-22",
    "Megatron-LM",
    "megatron",
)
GATED_DELTA_NET = on_github(
    "NVlabs/GatedDeltaNet@5ddd1e4845336f6b07b506ad77a8c92db9e5478d",
    "2025-03-17",
    "Gated DeltaNet",
    "gated-delta-net",
)
FLASHINFER = on_github(
    "flashinfer-ai/flashinfer@fb28d7242b3506a2348265962041acc1fb56cca4", "2026-08-22", "FlashInfer"
)
STATE = ("initial_state", "output_final_state")


ROW = {"library": "torch", "heads": "equal", "dtypes": HALF32, "state": STATE}
NARROW = (
    "centering 'keeps exp() in fp32 range for roughly twice the decay strength', and not for more"
)
for _file, _mechanism, _function, _takes, _limits in (
    ("gdn", "gated_delta", "torch_chunk_gated_delta_rule", "q k v g beta scale= **state", {}),
    ("gdn2", "gdn2", "torch_chunk_gdn2", "q k v g b w scale= **state", {"stability": NARROW}),
):
    _load = partial(MEGATRON.defined, f"megatron/core/ssm/gated_delta_net/{_file}.py", _function)
    MEGATRON.direct(_function, _mechanism, _load, _takes, **ROW, limits=_limits)


@MEGATRON.peer("gated_delta", library="torch", dtypes=HALF32, gradient=False)
def gated_delta_rule_ref(
    q: Array, k: Array, v: Array, g: Array, beta: Array, scale: float | None
) -> Array:
    """The reference of the project's tests, which changes the state in place."""
    import torch

    path = "tests/unit_tests/ssm/test_gdp_dynamic_inference.py"
    state = torch.zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3])
    run = MEGATRON.defined(path, "_gated_delta_rule_ref")
    return run(q, k, v, g, beta, state, None, False, scale)


@MEGATRON.peer("softmax[sink=true]", library="torch", heads="equal", dtypes=HALF32)
def sink_attention_reference(
    q: Array, k: Array, v: Array, scale: float | None, sink: Array
) -> Array:
    path = "tests/unit_tests/inference/test_dynamic_sink_attention.py"
    run = MEGATRON.defined(path, "_sink_attention_reference")
    return run(q, k, v, scale_of(q, scale), sink).to(q.dtype)


def _of_gated_delta_net(function: str, *arrays: Array) -> Array:
    """A reference; the one in chunks of 64 returns its last state too."""
    path, (q, k, v, g, beta) = "lit_gpt/gated_delta_rule_ops/chunk.py", arrays
    run = GATED_DELTA_NET.defined(path, function, given="torch einops")
    out = run(q, k, v, beta, g, 64)[0] if "chunk" in function else run(q, k, v, beta, g)
    return out.to(q.dtype)


for _name, _multiple in (("recurrent_gated_delta_rule_ref", 1), ("chunk_gated_delta_rule_ref", 64)):
    _load = partial(partial, _of_gated_delta_net, _name)
    _arrangement = {"layout": "bhtd", "heads": "equal", "multiple": _multiple, "dtypes": HALF32}
    GATED_DELTA_NET.direct(_name, "gated_delta", _load, "q k v g beta", **_arrangement)

_load = partial(FLASHINFER.defined, "tests/kda/test_recurrent_kda.py", "naive_recurrent_kda")
FLASHINFER.direct("naive_recurrent_kda", "kda", _load, "q k v g beta scale **state", **ROW)


@FLASHINFER.peer(
    "gated_delta",
    library="torch",
    heads="equal",
    widths="equal",
    dtypes=HALF32[:1],
    gradient=False,
)
def delta_rule(q: Array, k: Array, v: Array, g: Array, beta: Array, scale: float | None) -> Array:
    """Takes sequences one after another in one array, and changes its state in place."""
    path = "tests/gdn/reference_delta_rule.py"
    run = FLASHINFER.defined(path, "delta_rule", "matmul", "exclusive_cumsum")
    q, k, v, decay, beta_ = (x.flatten(0, 1) for x in (q, k, v, g.exp(), beta))
    lengths = [g.shape[1]] * g.shape[0]
    out, _ = run(q, k, v, lengths, alpha=decay, beta=beta_, scale_factor=scale_of(q, scale))
    return out.unflatten(0, g.shape[:2])
