"""Attention of vision models: Swin's windows, and the cross-covariance attention of XCiT."""

from __future__ import annotations

from functools import cache
from types import ModuleType

from precondattn.arrays import Array
from precondattn_conformance.peers import given
from precondattn_conformance.peers.arrays import Foreign
from precondattn_conformance.peers.project import on_github

SWIN = on_github(
    "microsoft/Swin-Transformer@f82860bfb5225915aca09c3227159ee9e1df874d",
    "2024-07-15",
    "Swin Transformer",
    "swin",
)
XCIT = on_github(
    "facebookresearch/xcit@82f5291f412604970c39a912586e008ec009cdca", "2021-07-09", "XCiT"
)
ALL = (SWIN, XCIT)


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
    names = given.of_pytorch() | {"trunc_normal_": lambda *_, **__: None}
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


@cache
def _xcit() -> ModuleType:
    return XCIT.excerpt("xcit.py", "XCA", imported=given.of_pytorch())


@XCIT.peer("cross_covariance[eps=0]", library="torch", heads="equal")
def xca(q: Array, k: Array, v: Array, logit_scale: Array) -> Array:
    import torch

    (b, t, h, d) = q.shape
    rows = torch.cat([x.flatten(2) for x in (q, k, v)], -1)
    layer = _xcit().XCA(h * d, h)
    layer = _with(layer, rows, temperature=logit_scale[:, None, None])
    return layer(q.flatten(2)).reshape(b, t, h, d)
