"""Linear attention and retention of several projects, and Mamba-2's state space model."""

from __future__ import annotations

import math
from functools import cache, partial
from types import SimpleNamespace

from precondattn.arrays import Array, upcast
from precondattn_conformance.peers.arrays import (
    HALF32,
    Foreign,
    in_one_dtype,
)
from precondattn_conformance.peers.files import names_of
from precondattn_conformance.peers.project import Project, on_github

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
NO_EVENTS = SimpleNamespace(get=lambda _: SimpleNamespace(dispatch=lambda _: None))


@cache
def _layer(path: str, name: str) -> Foreign:
    """A class of fast-transformers, with its own feature map elu(x) + 1."""
    import torch

    maps = FAST_TRANSFORMERS.imported("fast_transformers/feature_maps/base.py")
    names = names_of("torch") | {
        "Module": torch.nn.Module,
        "Dropout": torch.nn.Dropout,
        "sqrt": math.sqrt,
        "EventDispatcher": NO_EVENTS,
        "AttentionEvent": lambda *_: None,
        "elu_feature_map": maps.elu_feature_map,
        "check_state": lambda state, _: state,
    }
    module = FAST_TRANSFORMERS.excerpt(f"fast_transformers/{path}", name, imported=names)
    return getattr(module, name)


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


# A breakpoint at NaN weights would stop the run.
_of_lolcats = partial(
    LOLCATS.defined,
    "src/model/linear_attention/linear_attention.py",
    fast_causal_dot_product=None,
    breakpoint=lambda: None,
)


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


@LIGHTNING.peer(
    "retention[scale=1.0]", library="torch", layout="bhtd", heads="equal", dtypes=HALF32
)
def linear_attn(q: Array, k: Array, v: Array) -> Array:
    """Takes the decays in float32."""
    path, masks = "lightning_attn/ops/torch/linear_attention.py", ("get_mask", "get_full_mask")
    return LIGHTNING.defined(path, "linear_attn", *masks)(q, k, v, _slopes(q.shape[1]))


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
    layer = TORCHSCALE.defined(path, "MultiScaleRetention")
    b, h, t, e = v.shape
    past = torch.arange(t)[:, None] - torch.arange(t)
    decays = torch.exp(-_slopes(h)[:, None, None] * past.clamp(min=0)).tril().to(q.dtype)
    sizes = SimpleNamespace(num_heads=h, head_dim=e)
    rows = v.transpose(1, 2).reshape(b, t, h * e)
    out = layer.parallel_forward(sizes, q * 2.0**-20, k, rows, decays)
    return (out * 2.0**20).transpose(1, 2)


@AXLEARN.peer("linear[scale=1.0]", library="jax", layout="bhtd")
def linear_scan(q: Array, k: Array, v: Array, initial_state: Array | None = None) -> object:
    """Keeps its state in float32, or in bfloat16 if the inputs are in bfloat16."""
    from jax import numpy as jnp

    if initial_state is None:
        initial_state = jnp.zeros((*q.shape[:2], q.shape[3], v.shape[3]), jnp.float32)
    path = "axlearn/common/rattention/kernels/linear_attention_kernels.py"
    run = AXLEARN.defined(path, "_inner_linear_scan", given="jax einops")
    return run(q, k, v, initial_state)


# Mamba-2's state space model: the references of Mamba's kernels, and mamba2-minimal.

MAMBA = on_github(
    "state-spaces/mamba@e9594ce1c732d97440f0332fdc43170a2294dbfa", "2026-07-23", "Mamba"
)
MINIMAL = on_github(
    "tommyip/mamba2-minimal@4f4413731f24303b4e046962bce6ca5b6a3b13d6",
    "2024-06-17",
    "mamba2-minimal",
)
CHUNK = 64


def _reference(path: str, *names: str) -> Foreign:
    return MAMBA.defined(f"mamba_ssm/ops/{path}.py", *names, given="torch einops")


def _ssd(
    where: tuple[Project, str, str],
    *arrays: Array,
    initial_state: Array | None = None,
    output_final_state: bool = False,
) -> tuple[Array, Array]:
    q, k, v, g = arrays
    before = None if initial_state is None else initial_state.mT[:, None]
    x, g, k, q = in_one_dtype(v, g, k, q)
    project, path, name = where
    run = project.defined(path, name, "segsum", given="torch einops")
    out, after = run(x, g, k, q, CHUNK, before)
    return out.to(v.dtype), after.mT


for _project, _path, _name in (
    (MAMBA, "mamba_ssm/modules/ssd_minimal.py", "ssd_minimal_discrete"),
    (MINIMAL, "mamba2.py", "ssd"),
):
    _load: Foreign = partial(partial, _ssd, (_project, _path, _name))
    _takes = "q k v g initial_state=? output_final_state=?"
    _arrangement: Foreign = {"library": "torch", "heads": "equal", "multiple": CHUNK}
    _project.direct(_name, "ssd", _load, _takes, **_arrangement)


@MAMBA.peer("ssd", library="torch", multiple=CHUNK)
def ssd_chunk_refs(q: Array, k: Array, v: Array, g: Array) -> Array:
    """The references of Mamba's kernels, called as `ssd_chunk_scan_combined_ref` calls them.

    That function has one A for each head, g = dt A, and multiplies values by dt; here dt is 1.
    """
    import torch

    sums = upcast(g).unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2).cumsum(-1)
    one = torch.ones_like(sums)
    states = _reference("triton/ssd_chunk_state", "chunk_state_ref")(k, v, one, sums)
    passed = _reference("triton/ssd_state_passing", "state_passing_ref")
    before = passed(states.flatten(-2), sums[..., -1])[0].unflatten(-1, states.shape[-2:])
    return _reference("triton/ssd_chunk_scan", "chunk_scan_ref")(k, q, v, one, sums, before)


def _of_steps(v: Array, g: Array) -> tuple[Array, Array]:
    """x and dt with x dt = v and A dt = g for A = −1; for a decay of 1, dt is almost 0."""
    dt = (-g).clamp(min=1e-26)[..., None]
    return v / dt, dt.expand_as(v)


@MAMBA.peer("ssd", library="torch", dtypes=HALF32[:1], gradient=False)
def selective_scan_ref(q: Array, k: Array, v: Array, g: Array) -> Array:
    """Mamba-1's reference, with the same step and decay for all channels of a head."""
    import torch

    scan = _reference("selective_scan_interface", "selective_scan_ref")
    x, dt = (a.flatten(2).mT for a in _of_steps(v, g))
    decay = -torch.ones(x.shape[1], q.shape[-1])
    out = scan(x, dt, decay, k.permute(0, 2, 3, 1), q.permute(0, 2, 3, 1))
    return out.mT.unflatten(2, v.shape[2:])


@MAMBA.peer("ssd", library="torch", dtypes=HALF32[:1], gradient=False)
def selective_state_update_ref(
    q: Array, k: Array, v: Array, g: Array, initial_state: Array | None = None
) -> tuple[Array, Array]:
    """Computes one token after the other, changing the state in place."""
    import torch

    update = _reference("triton/selective_state_update", "selective_state_update_ref")
    shape = (*v[:, 0].shape, q.shape[-1])
    state = torch.zeros(shape) if initial_state is None else initial_state.mT.clone()
    decay, (x, dt) = -torch.ones(shape[1:]), _of_steps(v, g)
    tokens = [update(state, x[:, t], dt[:, t], decay, k[:, t], q[:, t]) for t in range(q.shape[1])]
    return torch.stack(tokens, 1), state.mT
