"""Linear attention and retention of several projects, in PyTorch and JAX."""

from __future__ import annotations

import math
from functools import cache
from types import ModuleType, SimpleNamespace

from precondattn.arrays import Array
from precondattn_conformance.peers import given
from precondattn_conformance.peers.arrays import HALF32, Foreign
from precondattn_conformance.peers.project import on_github

FAST_TRANSFORMERS = on_github(
    "idiap/fast-transformers@2ad36b97e64cb93862937bd21fcc9568d989561f",
    "2023-03-23",
    "fast-transformers",
)
LOLCATS = on_github(
    "HazyResearch/lolcats@375df84f58417a57b78c875fa3f8fa76e84ab12e", "2024-12-24", "LoLCATs"
)
LIGHTNING = on_github(
    "OpenNLPLab/lightning-attention@d15c38529bbd5c2c82b44ddda3cac885825aa873",
    "2025-02-23",
    "Lightning Attention",
)
TORCHSCALE = on_github(
    "microsoft/torchscale@4d1e0e82e5adf86dd424f1463192635b73fc8efc", "2024-04-11", "TorchScale"
)
AXLEARN = on_github(
    "apple/axlearn@34aed43c1b6e581c4753d06d7cbeedd5010ef26b", "2026-07-08", "axlearn"
)
ALL = (FAST_TRANSFORMERS, LOLCATS, LIGHTNING, TORCHSCALE, AXLEARN)

NO_EVENTS = SimpleNamespace(get=lambda _: SimpleNamespace(dispatch=lambda _: None))


@cache
def _layer(path: str, name: str) -> Foreign:
    """A class of fast-transformers, with its own feature map elu(x) + 1."""
    import torch

    maps = FAST_TRANSFORMERS.imported("fast_transformers/feature_maps/base.py")
    given_ = given.of_pytorch() | {
        "Module": torch.nn.Module,
        "Dropout": torch.nn.Dropout,
        "sqrt": math.sqrt,
        "EventDispatcher": NO_EVENTS,
        "AttentionEvent": lambda *_: None,
        "elu_feature_map": maps.elu_feature_map,
        "check_state": lambda state, _: state,
    }
    return getattr(
        FAST_TRANSFORMERS.excerpt(f"fast_transformers/{path}", name, imported=given_), name
    )


@FAST_TRANSFORMERS.peer("softmax", library="torch", heads="equal")
def full_attention(
    q: Array, k: Array, v: Array, visible: Array, scale: float | None, bias: Array | None = None
) -> Array:
    import torch

    added = torch.zeros_like(visible, dtype=q.dtype) if bias is None else bias
    added = torch.where(visible, added, -torch.inf)
    layer = _layer("attention/full_attention.py", "FullAttention")(scale, attention_dropout=0.0)
    mask = SimpleNamespace(all_ones=False, additive_matrix=added)
    return layer(q, k, v, mask, None, SimpleNamespace(all_ones=True))


@FAST_TRANSFORMERS.peer("elu1(linear[normalize=true,eps=0])", library="torch", heads="equal")
def recurrent_linear_attention(q: Array, k: Array, v: Array) -> Array:
    """Computes one token after the other."""
    import torch

    path = "recurrent/attention/self_attention/linear_attention.py"
    layer, state, outs = _layer(path, "RecurrentLinearAttention")(q.shape[-1], eps=0.0), None, []
    if q.shape[1] != k.shape[1]:
        raise ValueError("it takes a query, a key and a value a step")
    for t in range(q.shape[1]):
        out, state = layer(q[:, t], k[:, t], v[:, t], state)
        outs.append(out)
    return torch.stack(outs, 1)


@cache
def _of_lolcats(function: str) -> Foreign:
    """A function of LoLCATs without its breakpoint at NaN weights, which would stop the run."""
    path = "src/model/linear_attention/linear_attention.py"
    names = given.of_pytorch() | {"fast_causal_dot_product": None, "breakpoint": lambda: None}
    return getattr(LOLCATS.excerpt(path, function, imported=names), function)


@LOLCATS.peer("softmax", library="torch", layout="bhtd", heads="equal")
def softmax_attention(q: Array, k: Array, v: Array, causal: bool) -> Array:
    return _of_lolcats("softmax_attention")(q, k, v, causal=causal, fp32_attention=False)[0]


@LOLCATS.peer("linear[normalize=true,scale=1.0]", library="torch", layout="bhtd", heads="equal")
def quadratic_attention(q: Array, k: Array, v: Array, eps: float) -> Array:
    is_half = q.dtype.itemsize < 4
    return _of_lolcats("quadratic_attention")(q, k, v, fp32_attention=is_half, eps=eps)[0]


@LOLCATS.peer("linear[scale=1.0]", library="torch", layout="bhtd", heads="equal")
def causal_dot_product(q: Array, k: Array, v: Array) -> Array:
    return _of_lolcats("causal_dot_product")(q, k, v)


def _slopes(heads: int) -> Array:
    """The negated logarithms of retention's decays."""
    import torch

    return -torch.log1p(-(2.0 ** (-5 - torch.arange(heads, dtype=torch.float64))))


@cache
def _lightning() -> ModuleType:
    path, functions = "lightning_attn/ops/torch/linear_attention.py", ("get_mask", "get_full_mask")
    return LIGHTNING.excerpt(path, "linear_attn", *functions, imported=given.of_pytorch())


@LIGHTNING.peer(
    "retention[scale=1.0]", library="torch", layout="bhtd", heads="equal", dtypes=HALF32
)
def linear_attn(q: Array, k: Array, v: Array) -> Array:
    """Takes the decays in float32."""
    return _lightning().linear_attn(q, k, v, _slopes(q.shape[1]))


@TORCHSCALE.peer(
    "retention[scale=1.0]",
    library="torch",
    layout="bhtd",
    heads="equal",
    dtypes=("float64", "float32", "bfloat16"),
)
def parallel_forward(q: Array, k: Array, v: Array) -> Array:
    """Divides a row of weights by the sum of their magnitudes where that exceeds 1.

    In the model a norm follows, which cancels the factor. Here queries are divided by 2²⁰, so that
    no sum exceeds 1, and the output is multiplied by it; the range of float16 is too small for
    that.
    """
    import torch

    path = "torchscale/component/multiscale_retention.py"
    layer = TORCHSCALE.excerpt(path, "MultiScaleRetention", imported=given.of_pytorch())
    b, h, t, e = v.shape
    past = torch.arange(t)[:, None] - torch.arange(t)
    decays = torch.exp(-_slopes(h)[:, None, None] * past.clamp(min=0)).tril().to(q.dtype)
    sizes = SimpleNamespace(num_heads=h, head_dim=e)
    rows = v.transpose(1, 2).reshape(b, t, h * e)
    out = layer.MultiScaleRetention.parallel_forward(sizes, q * 2.0**-20, k, rows, decays)
    return (out * 2.0**20).transpose(1, 2)


@cache
def _inner_linear_scan() -> Foreign:
    path = "axlearn/common/rattention/kernels/linear_attention_kernels.py"
    names = given.of_jax() | given.of_einops()
    return AXLEARN.excerpt(path, "_inner_linear_scan", imported=names)._inner_linear_scan


@AXLEARN.peer("linear[scale=1.0]", library="jax", layout="bhtd")
def linear_scan(q: Array, k: Array, v: Array, initial_state: Array | None = None) -> object:
    """Keeps its state in float32, or in bfloat16 if the inputs are in bfloat16."""
    from jax import numpy as jnp

    if initial_state is None:
        initial_state = jnp.zeros((*q.shape[:2], q.shape[3], v.shape[3]), jnp.float32)
    return _inner_linear_scan()(q, k, v, initial_state)
