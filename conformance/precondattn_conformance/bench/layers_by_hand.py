"""Attention layers and their decoder in plain PyTorch, with only the mechanism's own calls from us.

They are what the `layer_*` cases compare with: what a user would write around a mechanism. Weights
are those of one of our layers, as matrices of PyTorch's usual layout (out, in). Nothing is checked.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import (
    conv1d,
    embedding,
    linear,
    logsigmoid,
    normalize,
    rms_norm,
    silu,
    softplus,
)

import precondattn as pa
from precondattn.layers.torch import Attention, Decoder

Rows = dict[str, Tensor]
Angles = tuple[Tensor, Tensor]


class LayerByHand:
    """y = W_o o, with o = mechanism(W_q x, W_k x, W_v x), q and k rotated."""

    def __init__(self, attn: Attention) -> None:
        self.mechanism = attn.mechanism
        self.h, self.d = attn.plan.maps[0].outer
        named = {name: p.detach().clone() for name, p in attn.named_parameters()}
        self.out = named.pop("o_proj.weight")
        self.maps: dict[str, Tensor] = {}
        self.others: dict[str, Tensor] = {}
        for name, weight in named.items():
            if name.endswith("_proj.weight"):
                self.maps[name.removesuffix("_proj.weight")] = weight
            else:
                self.others[name.removeprefix("inputs.")] = weight
        self.parameters = [self.out, *self.maps.values(), *self.others.values()]
        for parameter in self.parameters:
            parameter.requires_grad_()

    def heads(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.maps[name]).unflatten(-1, (self.h, self.d))

    def angles(self, start: int, count: int) -> Angles:
        """The cosines and sines of the positions from `start` on."""
        kind = {"dtype": self.out.dtype, "device": self.out.device}
        frequency = 10_000 ** (-torch.arange(0, self.d, 2, **kind) / self.d)
        angle = (torch.arange(start, start + count, **kind)[:, None] * frequency)[:, None]
        return angle.cos(), angle.sin()

    @staticmethod
    def rotated(x: Tensor, angles: Angles) -> Tensor:
        cos, sin = angles
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def inputs(self, x: Tensor, angles: Angles, rows: Rows | None) -> dict[str, Tensor]:
        """The inputs of the mechanism; `rows` are those before a single token x."""
        q, k, v = (self.heads(name, x) for name in "qkv")
        return {"q": self.rotated(q, angles), "k": self.rotated(k, angles), "v": v}

    def gated(self, o: Tensor, x: Tensor) -> Tensor:
        """What happens to o before the last projection."""
        return o

    def __call__(self, x: Tensor) -> Tensor:
        o = self.mechanism(**self.inputs(x, self.angles(0, x.shape[1]), None))
        return linear(self.gated(o, x).flatten(2), self.out)

    def step(
        self, x: Tensor, cache: pa.Cache, rows: Rows, angles: Angles
    ) -> tuple[Tensor, pa.Cache]:
        """One token after a cache of the mechanism and rows of convolutions."""
        o, cache = self.mechanism.extend(cache, **self.inputs(x, angles, rows), donate=True)
        return linear(self.gated(o, x).flatten(2), self.out), cache


class GatedByHand(LayerByHand):
    """o is normed head by head and gated."""

    def gated(self, o: Tensor, x: Tensor) -> Tensor:
        o = rms_norm(o, (self.d,), self.others["out.gain"], 1e-5)
        return o * silu(self.heads("o_gate", x))


class GLAByHand(GatedByHand):
    """g = log σ(B A x + b) / 16."""

    def inputs(self, x: Tensor, angles: Angles, rows: Rows | None) -> dict[str, Tensor]:
        q, k, v = (self.heads(name, x) for name in "qkv")
        score = linear(
            linear(x, self.maps["g_down"]), self.maps["g_up"], self.others["g_up_proj.bias"]
        )
        g = logsigmoid(score.unflatten(-1, (self.h, self.d))) / 16
        return {"q": q, "k": k, "v": v, "g": g}


class GatedDeltaByHand(GatedByHand):
    """q, k, v = SiLU(conv(W x)), q and k of length 1; g = −e^A softplus(W x + b), β = σ(W x)."""

    def __init__(self, attn: Attention) -> None:
        super().__init__(attn)
        self.filters = {
            name: self.others[f"{name}.convolution"].detach().flatten(1).t()[:, None].contiguous()
            for name in "qkv"
        }
        for name, filters in self.filters.items():
            filters.requires_grad_()
            mine = self.others[f"{name}.convolution"]
            self.parameters = [filters if p is mine else p for p in self.parameters]

    def convolved(self, name: str, x: Tensor, rows: Rows | None) -> Tensor:
        if rows is not None:
            longer = torch.cat([rows[name], self.heads(name, x)], 1)
            rows[name] = longer[:, 1:]
            return silu((longer * self.others[f"{name}.convolution"]).sum(1, keepdim=True))
        y = linear(x, self.maps[name]).mT
        y = conv1d(y, self.filters[name], padding=3, groups=y.shape[1])
        return silu(y[..., : x.shape[1]]).mT.unflatten(-1, (self.h, self.d))

    def inputs(self, x: Tensor, angles: Angles, rows: Rows | None) -> dict[str, Tensor]:
        q, k, v = (self.convolved(name, x, rows) for name in "qkv")
        step = softplus(linear(x, self.maps["g"]) + self.others["g.dt_bias"])
        return {
            "q": normalize(q, dim=-1),
            "k": normalize(k, dim=-1),
            "v": v,
            "g": -self.others["g.A_log"].exp() * step,
            "beta": linear(x, self.maps["beta"]).sigmoid(),
        }


class ContractedByHand(GatedDeltaByHand):
    """λ = σ(w · q̄ + b)."""

    def inputs(self, x: Tensor, angles: Angles, rows: Rows | None) -> dict[str, Tensor]:
        inputs = super().inputs(x, angles, rows)
        weight, bias = (self.others[f"contraction.{name}"] for name in ("weight", "bias"))
        score = (normalize(inputs["q"], dim=-1) * weight).sum(-1)
        return {**inputs, "contraction": (score + bias).sigmoid()}


LAYERS: dict[str, type[LayerByHand]] = {
    "softmax": LayerByHand,
    "lucid": LayerByHand,
    "laser": LayerByHand,
    "gla": GLAByHand,
    "gated_delta": GatedDeltaByHand,
    "ccq(gated_delta)": ContractedByHand,
}


class NextTokens:
    """The next tokens of one of our decoders, after its caches of `context` tokens."""

    def __init__(self, model: Decoder, caches: tuple[pa.Cache, ...], context: int) -> None:
        self.model, self.context = model, context
        self.layers = [
            LAYERS[str(block.attention.mechanism)](block.attention) for block in model.blocks
        ]
        self.mlps = [
            [m.weight.detach() for m in (b.mlp.gate_proj, b.mlp.up_proj, b.mlp.down_proj)]
            for b in model.blocks
        ]
        mark = "convolution of "
        self.rows = [
            {name.removeprefix(mark): array for name, array in c.store.items() if mark in name}
            for c in caches
        ]
        self.caches = [
            pa.Cache(
                c.length,
                {name: array for name, array in c.store.items() if mark not in name},
                {name: kind for name, kind in c.kinds.items() if mark not in name},
            )
            for c in caches
        ]
        self.filled = [cache.length for cache in self.caches]

    def reset(self) -> None:
        """The length of the context again. A state stays that of the tokens since."""
        pairs = zip(self.caches, self.filled, strict=True)
        self.caches = [cache._replace(length=length) for cache, length in pairs]

    def __call__(self, token: Tensor) -> Tensor:
        model, width = self.model, self.model.embedding.shape[1:]
        x = embedding(token, model.embedding)
        angles = self.layers[0].angles(self.context, 1)
        for i, block in enumerate(model.blocks):
            y = rms_norm(x, width, block.attention_norm.gain, 1e-6)
            y, self.caches[i] = self.layers[i].step(y, self.caches[i], self.rows[i], angles)
            x = x + y
            y = rms_norm(x, width, block.mlp_norm.gain, 1e-6)
            gate, up, down = self.mlps[i]
            x = x + linear(silu(linear(y, gate)) * linear(y, up), down)
        return linear(rms_norm(x, width, model.norm.gain, 1e-6), model.embedding)
