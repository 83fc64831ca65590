"""Attention layers of model packages, with their projections bypassed."""

from __future__ import annotations

from functools import cache, partial
from types import ModuleType

from precondattn.arrays import Array
from precondattn_conformance.peers.arrays import (
    HALF32,
    Foreign,
    equally_wide_by_default,
    only_self_attention,
    widened,
)
from precondattn_conformance.peers.files import names_of
from precondattn_conformance.peers.project import Project, on_github

# timm: `Attention` and `DiffAttention`, with identity projections and norms.
#
# The package requires torchvision, but its attention does not, so the layers' files are imported
# without the package.

TIMM = Project(
    "timm", "timm", "https://github.com/huggingface/pytorch-image-models", package="timm"
)


def _attention(q: Array, k: Array, v: Array, visible: Array, *, fused: bool) -> Array:
    import torch

    only_self_attention(q, k)
    e = v.shape[-1]
    q, k, v = equally_wide_by_default(q, k, v)
    b, t, h, d = q.shape
    layer = TIMM.imported_from("timm/layers", "attention").Attention(3 * h * d, h, d, h * d)
    layer.qkv = layer.proj = torch.nn.Identity()
    layer.fused_attn = fused
    rows = torch.stack([q, k, v], 2).reshape(b, t, -1)
    return layer(rows, visible).reshape(b, t, h, d)[..., :e]


def _differential(
    q: Array,
    k: Array,
    v: Array,
    q2: Array,
    k2: Array,
    lam: Array,
    visible: Array,
    *,
    fused: bool,
) -> Array:
    import torch

    only_self_attention(q, k)
    # Values are twice as wide as keys.
    (b, t, h, d), e = q.shape, v.shape[-1]
    width = max(d, (e + 1) // 2)
    to_scale = (width / d) ** 0.5
    pairs = (q * to_scale, q2 * to_scale), (k, k2)
    stacked = [torch.stack([widened(x, width) for x in pair], 3) for pair in pairs]
    rows = torch.cat([x.reshape(b, t, -1) for x in (*stacked, widened(v, 2 * width))], -1)
    module = TIMM.imported_from("timm/layers", "diff_attention")
    layer = module.DiffAttention(2 * h * width, h)
    layer.sub_norm = layer.proj = torch.nn.Identity()
    del layer.qkv  # A function can not replace a module.
    layer.qkv = lambda _: rows
    layer._compute_lambda, layer.lambda_init, layer.fused_attn = (lambda: lam), 0.0, fused
    # The output is as wide as the input, whose values are not used otherwise.
    out = layer(rows[..., : 2 * h * width], visible)
    return out.reshape(b, t, h, 2 * width)[..., :e]


for _suffix, _fused in (("", False), ("_fused", True)):
    for _name, _mechanism, _function, _takes in (
        ("attention", "softmax", _attention, "q k v visible"),
        ("diff_attention", "differential", _differential, "q k v q2 k2 lam visible"),
    ):
        _load = partial(partial, _function, fused=_fused)
        TIMM.direct(f"{_name}{_suffix}", _mechanism, _load, _takes, heads="equal")


# x-transformers: `Attend`, by its own formula or by PyTorch's (`flash=True`).
#
# Its own formula has a float32 softmax for every dtype.

X_TRANSFORMERS = Project(
    "x_transformers",
    "x-transformers",
    "https://github.com/lucidrains/x-transformers",
    package="x-transformers",
)


def _attend(
    q: Array,
    k: Array,
    v: Array,
    visible: Array | None = None,
    key_mask: Array | None = None,
    bias: Array | None = None,
    softcap: float | None = None,
    **options: Foreign,
) -> Array:
    if softcap is not None and bias is not None:
        raise ValueError("it caps the logits with their bias, and ours are capped before it")
    if softcap is not None:
        options |= {"softclamp_logits": True, "logit_softclamp_value": softcap}
    attend = X_TRANSFORMERS.imported("x_transformers.attend").Attend(**options)
    return attend(q, k, v, mask=key_mask if visible is None else visible, attn_bias=bias)[0]


EQUAL = {"heads": "equal"}
for _name, _options, _takes, _arrangement in (
    ("attend_grouped", {}, "causal=", {"dtypes": HALF32}),
    ("attend", {}, "visible= softcap= bias=?", {**EQUAL, "dtypes": HALF32}),
    ("attend_causal", {}, "causal= key_mask=? bias=?", {**EQUAL, "dtypes": HALF32}),
    ("attend_flash", {"flash": True}, "visible= bias=?", EQUAL),
    ("attend_flash_causal", {"flash": True}, "causal= key_mask=? bias=?", EQUAL),
):
    _load, _takes = partial(partial, _attend, **_options), f"q k v scale= {_takes}"
    X_TRANSFORMERS.direct(_name, "softmax", _load, _takes, layout="bhtd", **_arrangement)


# Packages of lucidrains, each with one form of attention in PyTorch.


def _project(name: str, title: str) -> Project:
    return Project(name, title, f"https://github.com/lucidrains/{title}", package=title)


LOCAL = _project("local_attention", "local-attention")
LINEAR = _project("linear_attention_transformer", "linear-attention-transformer")
PERFORMER = _project("performer", "performer-pytorch")
NYSTROM = _project("nystrom_attention", "nystrom-attention")
SPARSE = _project("native_sparse_attention", "native-sparse-attention-pytorch")


@LOCAL.peer("softmax[window=5]", layout="bhtd", heads="equal")
def local_attention(
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    window: int | None,
    scale: float | None,
    key_mask: Array | None = None,
) -> Array:
    """Local attention to a block and the one before it, of which `exact_windowsize` makes a
    band."""
    only_self_attention(q, k, 2)
    if window is None or window < 2:
        raise ValueError("it takes windows of at least one other token")
    attend = LOCAL.imported("local_attention").LocalAttention(
        window - 1, causal=causal, exact_windowsize=True, autopad=True, scale=scale
    )
    return attend(q, k, v, mask=key_mask)


@LINEAR.peer("elu1(linear[normalize=true,eps=0])", layout="bhtd", heads="equal")
def causal_linear_attn(q: Array, k: Array, v: Array, key_mask: Array | None = None) -> Array:
    """Has the features softmax(q) and exp(k), which for logarithms are those of elu + 1."""
    only_self_attention(q, k, 2)
    module = LINEAR.imported("linear_attention_transformer.linear_attention_transformer")
    q, k = (_elu1(x).log() for x in (q, k))
    wide = widened(v, q.shape[-1])
    out = module.causal_linear_attn(q, k, wide.clone(), key_mask, bucket_size=1)
    return out[..., : v.shape[-1]]


@PERFORMER.peer("elu1(linear[normalize=true,eps=0])", layout="bhtd", heads="equal")
def causal_linear_attention_noncuda(q: Array, k: Array, v: Array) -> Array:
    only_self_attention(q, k, 2)
    module = PERFORMER.imported("performer_pytorch.performer_pytorch")
    return module.causal_linear_attention_noncuda(_elu1(q), _elu1(k), v, eps=0.0)


def _elu1(x: Array) -> Array:
    from torch.nn.functional import elu

    return elu(x) + 1


@NYSTROM.peer("nystrom[landmarks=7,start=batch]", heads="equal")
def nystrom_attention(
    q: Array,
    k: Array,
    v: Array,
    landmarks: int,
    iterations: int,
    key_mask: Array | None = None,
) -> Array:
    import torch

    only_self_attention(q, k)
    b, t, h, d = q.shape
    if t % landmarks:
        raise ValueError("it pads tokens to a multiple of the landmarks: other segments than ours")
    if v.shape[-1] > d:
        raise ValueError("values are as wide as keys")
    layer = NYSTROM.imported("nystrom_attention").NystromAttention(
        h * d, d, h, landmarks, iterations, residual=False
    )
    layer.to_qkv = layer.to_out = torch.nn.Identity()
    rows = torch.cat([x.reshape(b, t, -1) for x in (q, k, widened(v, d))], -1)
    return layer(rows, key_mask).reshape(b, t, h, d)[..., : v.shape[-1]]


@SPARSE.peer("softmax", layout="bhtd")
def attend(q: Array, k: Array, v: Array, visible: Array, scale: float | None) -> Array:
    module = SPARSE.imported("native_sparse_attention_pytorch.native_sparse_attention")
    return module.attend(q, k, v, visible[:, None, ...], scale=scale)


# Attention of vision models: Swin's windows, and the cross-covariance attention of XCiT.

SWIN = on_github(
    "microsoft/Swin-Transformer@f82860bfb5225915aca09c3227159ee9e1df874d",
    "2024-07-15",
    "Swin Transformer",
    "swin",
)
XCIT = on_github(
    "facebookresearch/xcit@82f5291f412604970c39a912586e008ec009cdca", "2021-07-09", "XCiT"
)


def _with(layer: Foreign, rows: Array, **parameters: Array) -> Foreign:
    """A layer without projections, with the rows (b, t, 3 h d) as queries, keys and values."""
    import torch

    class Given(torch.nn.Module):  # type: ignore[misc]
        def forward(self, _: Array) -> Array:
            return rows

    layer.qkv, layer.proj = Given(), torch.nn.Identity()
    for name, value in parameters.items():  # A parameter must be a leaf; an attribute need not.
        del layer._parameters[name]
        setattr(layer, name, value.to(rows.dtype))
    return layer


@cache
def _swin() -> ModuleType:
    names = names_of("torch") | {"trunc_normal_": lambda *_, **__: None}
    functions = ("WindowAttention", "window_partition", "window_reverse")
    return SWIN.excerpt("models/swin_transformer.py", *functions, imported=names)


@SWIN.peer("windowed[size=4,grid=8/8,bias=true]", library="torch", heads="equal")
def window_attention(
    q: Array,
    k: Array,
    v: Array,
    bias_table: Array,
    size: tuple[int, ...],
    grid: tuple[int, ...],
    scale: float | None,
) -> Array:
    """Attention in square windows of an image, which are not shifted."""
    import torch

    (b, t, h, d), (side, *other), (rows, columns), module = q.shape, size, grid, _swin()
    if any(n != side for n in other):
        raise ValueError(f"it partitions an image in square windows; found {size}")
    image = torch.cat([x.flatten(2) for x in (q, k, v)], -1).unflatten(1, (rows, columns))
    windows = module.window_partition(image, side).flatten(1, 2)
    layer = module.WindowAttention(h * d, (side, side), h, qk_scale=scale)
    out = _with(layer, windows, relative_position_bias_table=bias_table)(windows[..., : h * d])
    image = module.window_reverse(out.unflatten(1, (side, side)), side, rows, columns)
    return image.reshape(b, t, h, d)


@XCIT.peer("cross_covariance[eps=0]", library="torch", heads="equal")
def xca(q: Array, k: Array, v: Array, logit_scale: Array) -> Array:
    import torch

    (b, t, h, d) = q.shape
    rows = torch.cat([x.flatten(2) for x in (q, k, v)], -1)
    layer = XCIT.defined("xcit.py", "XCA")(h * d, h)
    layer = _with(layer, rows, temperature=logit_scale[:, None, None])
    return layer(q.flatten(2)).reshape(b, t, h, d)
