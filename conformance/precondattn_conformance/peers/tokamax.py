"""Tokamax: the plain JAX implementations against which its kernels are tested."""

from __future__ import annotations

from functools import partial

from precondattn.arrays import Array
from precondattn_conformance.peers.arrays import Foreign, scale_of
from precondattn_conformance.peers.project import Project

TOKAMAX = Project("tokamax", "Tokamax", "https://github.com/openxla/tokamax", package="tokamax")
ALL = (TOKAMAX,)


def _attention(*arrays: Array | None, **options: Foreign) -> Array:
    *_, bias, _ = arrays
    if bias is not None and options.get("logits_soft_cap") is not None:
        raise ValueError("it caps the logits with their bias, and ours are capped before it")
    return TOKAMAX.imported("tokamax").dot_product_attention(*arrays, **options)


@TOKAMAX.peer("softmax", library="jax")
def xla_is_causal(
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> Array:
    # Here the window includes the token itself; Tokamax counts the tokens on each side of it.
    near = None if window is None else (window - 1, 0 if causal else window - 1)
    options: dict[str, Foreign] = {"is_causal": causal, "local_window_size": near}
    return _attention(q, k, v, None, None, **options, scale=scale, implementation="xla")


def _capped(
    implementation: str,
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    scale: float | None,
    softcap: float | None,
    bias: Array | None,
) -> Array:
    options: dict[str, Foreign] = {"scale": scale, "logits_soft_cap": softcap}
    return _attention(q, k, v, bias, visible, **options, implementation=implementation)


for _name in ("xla", "xla_chunked"):  # Chunks have 512 queries and 1,024 keys.
    _load, _takes = partial(partial, _capped, _name), "q k v visible scale softcap bias?"
    TOKAMAX.direct(_name, "softmax", _load, _takes, library="jax")


@TOKAMAX.peer("softmax", library="jax")
def flex_attention(
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    scale: float | None,
    softcap: float | None,
    bias: Array | None = None,
) -> Array:
    import jax.numpy as jnp

    factor = scale_of(q, scale)

    def score(logits: Array) -> Array:
        logits = logits * factor
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        return logits if bias is None else logits + bias

    attend = TOKAMAX.imported("tokamax._src.ops.flex_attention.base").FlexAttention()
    return attend(q, k, v, score_mod=score, mask_mod=lambda shape: jnp.broadcast_to(visible, shape))
