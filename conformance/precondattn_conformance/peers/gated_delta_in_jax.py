"""Gated delta rules and linear attention of MaxText, EasyDeL, ejKernel and axlearn in JAX."""

from __future__ import annotations

from functools import cache

from precondattn.arrays import Array
from precondattn_conformance.peers import given
from precondattn_conformance.peers.arrays import HALF32, Foreign, scale_of, widened
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
ALL = (MAXTEXT, EASYDEL, EJKERNEL)

JAX: dict[str, Foreign] = {"library": "jax", "heads": "equal"}


@cache
def _of_maxtext(function: str) -> Foreign:
    path = "src/maxtext/models/qwen3.py"
    return getattr(MAXTEXT.excerpt(path, function, imported=given.of_jax()), function)


@MAXTEXT.peer("gated_delta", dtypes=HALF32, **JAX)
def naive_jax_chunk_gated_delta_rule(
    q: Array, k: Array, v: Array, g: Array, beta: Array, initial_state: Array | None = None
) -> object:
    run = _of_maxtext("naive_jax_chunk_gated_delta_rule")
    return run(q, k, v, g, beta, initial_state=initial_state)


@MAXTEXT.peer("gated_delta", dtypes=HALF32, **JAX)
def jax_chunk_gated_delta_rule(
    q: Array, k: Array, v: Array, g: Array, beta: Array, initial_state: Array | None = None
) -> object:
    """The default dtype is bfloat16; here it is that of the queries."""
    run = _of_maxtext("jax_chunk_gated_delta_rule")
    return run(q, k, v, g, beta, initial_state=initial_state, compute_dtype=q.dtype)


@MAXTEXT.peer("gated_delta", dtypes=HALF32, **JAX)
def jax_ar_gated_delta_rule(
    q: Array, k: Array, v: Array, g: Array, beta: Array, initial_state: Array | None = None
) -> object:
    """Computes one token after the other."""
    from jax import lax
    from jax import numpy as jnp

    step = _of_maxtext("jax_ar_gated_delta_rule")
    if initial_state is None:
        initial_state = jnp.zeros((q.shape[0], q.shape[2], q.shape[3], v.shape[3]))

    def of_token(state: Array, x: tuple[Array, ...]) -> tuple[Array, Array]:
        out, state = step(*(a[:, None] for a in x), state, compute_dtype=q.dtype)
        return state, out[:, 0]

    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta))
    state, out = lax.scan(of_token, initial_state.astype("float32"), tokens)
    return jnp.moveaxis(out, 0, 1), state


@cache
def _of_easydel(function: str, *more: str) -> Foreign:
    path = "easydel/operations/kernels/kda.py"
    names = given.of_jax() | {"_MATMUL_PRECISION": None}
    return getattr(EASYDEL.excerpt(path, function, *more, imported=names), function)


@EASYDEL.peer("gated_delta", layout="bhtd", dtypes=HALF32, **JAX)
def recurrent_kda(
    q: Array, k: Array, v: Array, g: Array, beta: Array, initial_state: Array | None = None
) -> tuple[Array, Array]:
    """Has one decay for each head, which is the gated delta rule and not KDA."""
    run = _of_easydel("_recurrent_kda_fwd")
    out, state = run(q, k, v, beta, g, initial_state, use_qk_l2norm=False)
    return out.astype(q.dtype), state


@EASYDEL.peer("gated_delta", layout="bhtd", dtypes=HALF32, **JAX)
def chunk_kda(
    q: Array, k: Array, v: Array, g: Array, beta: Array, initial_state: Array | None = None
) -> tuple[Array, Array]:
    """Has one decay for each head, which is the gated delta rule and not KDA."""
    run = _of_easydel("_chunk_kda_fwd")
    out, state = run(q, k, v, beta, g, initial_state=initial_state, use_qk_l2norm=False)
    return out.astype(q.dtype), state


@EASYDEL.peer("gated_delta", **JAX)
def recurrent_gated_delta_rule_step(
    q: Array, k: Array, v: Array, g: Array, beta: Array, initial_state: Array | None = None
) -> tuple[Array, Array]:
    from jax import lax
    from jax import numpy as jnp

    path, name = "easydel/operations/kernels/inference_gdn.py", "recurrent_gated_delta_rule_step"
    step = getattr(EASYDEL.excerpt(path, name, imported=given.of_jax()), name)
    if initial_state is None:
        initial_state = jnp.zeros((q.shape[0], q.shape[2], q.shape[3], v.shape[3]), dtype=q.dtype)

    def of_token(state: Array, x: tuple[Array, ...]) -> tuple[Array, Array]:
        out, after = step(*x, state)
        return after.astype(state.dtype), out

    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta))
    state, out = lax.scan(of_token, initial_state, tokens)
    return jnp.moveaxis(out, 0, 1).astype(q.dtype), state


@cache
def _of_ejkernel(file: str, function: str, *more: str) -> Foreign:
    path = f"ejkernel/kernels/_xla/{file}.py"
    return getattr(EJKERNEL.excerpt(path, function, *more, imported=given.of_jax()), function)


@cache
def _recurrent() -> Foreign:
    """ejKernel's recurrence with its custom derivative, assembled as in its own module."""
    import jax

    parts = {
        name: _of_ejkernel(f"recurrent/_xla_impl_{kind}", name, *more)
        for kind, name, *more in (
            ("fwd", "_recurrent_attention_fwd", "_recurrent_attention_step"),
            ("bwd", "_recurrent_attention_bwd"),
        )
    }
    path = "ejkernel/kernels/_xla/recurrent/_interface.py"
    names = ("_recurrent_core", "_recurrent_fwd", "_recurrent_bwd")
    module = EJKERNEL.excerpt(path, *names, imported=given.of_jax() | parts)
    core = jax.custom_vjp(module._recurrent_core, nondiff_argnums=(4, 7, 9, 10))
    core.defvjp(module._recurrent_fwd, module._recurrent_bwd)
    return core


def _equally_wide(q: Array, k: Array, v: Array, g: Array | None = None) -> list[Foreign]:
    """q, k, v and key gates padded to one width, which ejKernel's recurrence requires."""
    width = max(q.shape[-1], v.shape[-1])
    return [None if x is None else widened(x, width) for x in (q, k, v, g)]


@EJKERNEL.peer("linear", dtypes=HALF32, **JAX)
def recurrent(q: Array, k: Array, v: Array, scale: float | None) -> Array:
    scale, e = scale_of(q, scale), v.shape[-1]
    q, k, v, _ = _equally_wide(q, k, v)
    out, _ = _recurrent()(q, k, v, None, None, None, None, scale, None, False, None)
    return out[..., :e].astype(q.dtype)


@EJKERNEL.peer("gla", dtypes=HALF32, **JAX)
def recurrent_gated(q: Array, k: Array, v: Array, g: Array, scale: float | None) -> Array:
    scale, e = scale_of(q, scale), v.shape[-1]
    q, k, v, g = _equally_wide(q, k, v, g)
    out, _ = _recurrent()(q, k, v, None, None, g, None, scale, None, False, None)
    return out[..., :e].astype(q.dtype)


@EJKERNEL.peer("gla", dtypes=HALF32, **JAX)
def recurrent_forward(q: Array, k: Array, v: Array, g: Array, scale: float | None) -> Array:
    """ejKernel's forward recurrence without its custom derivative."""
    more = ("_recurrent_attention_step",)
    run = _of_ejkernel("recurrent/_xla_impl_fwd", "_recurrent_attention_fwd", *more)
    scale, e = scale_of(q, scale), v.shape[-1]
    q, k, v, g = _equally_wide(q, k, v, g)
    return run(q, k, v, gk=g, softmax_scale=scale)[0][..., :e].astype(q.dtype)


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
