"""Attention layers of PyTorch against the same computation written by hand, as ratios of times.

A training step of a layer against the mechanism's own call and projections, and a token decoded by
a `Decoder` against the mechanism's own `extend`. Both sides alternate in one process, and the
smallest of their times counts. A side whose output is not that of the other is refused a time.

    python conformance/bench_layers.py [--rounds 30]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, embedding, linear, normalize, rms_norm, silu, softplus

import precondattn as pa
from precondattn.layers.torch import Attention, Decoder

WIDTH, HEADS, HEAD_DIM = 256, 8, 32
BATCH, TIME = 8, 256
BLOCKS, PROMPT, CAPACITY = 4, 128, 1024


class ByHand:
    """A layer's computation on its weights, as matrices of the usual layout (out, in)."""

    def __init__(self, attn: Attention) -> None:
        self.mechanism = attn.mechanism
        self.is_delta = "beta" in attn.inputs
        named = {name: p.detach() for name, p in attn.inputs.named_parameters()}
        self.weights = {
            name: weight.reshape(WIDTH, -1).t().contiguous().requires_grad_()
            for name, weight in named.items()
            if name.endswith(("weight", "gate"))
        }
        self.out = named["out.projection"].reshape(-1, WIDTH).t().contiguous().requires_grad_()
        self.others = {name: p.clone().requires_grad_() for name, p in named.items()}
        self.frequency = 10_000 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        self.filters = {
            name: filters.flatten(1).t()[:, None].contiguous().detach().requires_grad_()
            for name, filters in self.others.items()
            if name.endswith("convolution")
        }

    def linear(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.weights[name])

    def heads(self, name: str, x: Tensor) -> Tensor:
        return self.linear(name, x).unflatten(-1, (HEADS, HEAD_DIM))

    def rotated(self, x: Tensor, start: int) -> Tensor:
        angle = (torch.arange(start, start + x.shape[1])[:, None] * self.frequency)[:, None]
        cos, sin = angle.cos(), angle.sin()
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def convolved(self, name: str, x: Tensor) -> Tensor:
        y = self.linear(f"{name}.weight", x).mT
        y = conv1d(y, self.filters[f"{name}.convolution"], padding=3, groups=y.shape[1])
        return silu(y[..., : x.shape[1]]).mT.unflatten(-1, (HEADS, HEAD_DIM))

    def one_convolved(self, name: str, x: Tensor, rows: dict[str, Tensor]) -> Tensor:
        longer = torch.cat([rows[name], self.heads(f"{name}.weight", x)], 1)
        rows[name] = longer[:, 1:]
        return silu((longer * self.others[f"{name}.convolution"]).sum(1, keepdim=True))

    def gates(self, x: Tensor) -> dict[str, Tensor]:
        step = softplus(self.linear("g.weight", x) + self.others["g.dt_bias"])
        return {
            "g": -self.others["g.A_log"].exp() * step,
            "beta": self.linear("beta.weight", x).sigmoid(),
        }

    def projected(self, o: Tensor, x: Tensor) -> Tensor:
        if self.is_delta:
            o = rms_norm(o, (HEAD_DIM,), self.others["out.gain"], 1e-5)
            o = o * silu(self.heads("out.gate", x))
        return linear(o.flatten(2), self.out)

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_delta:
            q, k = (normalize(self.convolved(name, x), dim=-1) for name in "qk")
            o = self.mechanism(q, k, self.convolved("v", x), **self.gates(x))
        else:
            q, k, v = (self.heads(f"{name}.weight", x) for name in "qkv")
            o = self.mechanism(self.rotated(q, 0), self.rotated(k, 0), v)
        return self.projected(o, x)

    def step(self, x: Tensor, cache: pa.Cache, rows: dict[str, Tensor], t: int) -> Any:
        """One token at position t, after a cache of the mechanism and rows of convolutions."""
        if self.is_delta:
            q, k, v = (self.one_convolved(name, x, rows) for name in "qkv")
            q, k = normalize(q, dim=-1), normalize(k, dim=-1)
            o, cache = self.mechanism.extend(cache, q, k, v, **self.gates(x), donate=True)
        else:
            q, k, v = (self.heads(f"{name}.weight", x) for name in "qkv")
            q, k = self.rotated(q, t), self.rotated(k, t)
            o, cache = self.mechanism.extend(cache, q, k, v, donate=True)
        return self.projected(o, x), cache


class DecoderByHand:
    """Tokens of a `Decoder`, after its caches for a prompt."""

    def __init__(self, model: Decoder, caches: tuple[pa.Cache, ...]) -> None:
        self.model, self.t = model, PROMPT
        self.layers = [ByHand(block.attention) for block in model.blocks]
        self.mlps = [
            [weight.detach().t().contiguous() for weight in (b.mlp.gate, b.mlp.up, b.mlp.down)]
            for b in model.blocks
        ]
        mark = "convolution of "
        self.rows = [
            {n.removeprefix(mark): a for n, a in cache.store.items() if n.startswith(mark)}
            for cache in caches
        ]
        self.caches = [
            cache._replace(
                store={n: a for n, a in cache.store.items() if not n.startswith(mark)},
                kinds={n: a for n, a in cache.kinds.items() if not n.startswith(mark)},
            )
            for cache in caches
        ]

    def __call__(self, token: Tensor) -> Tensor:
        x = embedding(token, self.model.embedding)
        for i, block in enumerate(self.model.blocks):
            y = rms_norm(x, (WIDTH,), block.attention_norm.gain, 1e-6)
            y, self.caches[i] = self.layers[i].step(y, self.caches[i], self.rows[i], self.t)
            x = x + y
            y = rms_norm(x, (WIDTH,), block.mlp_norm.gain, 1e-6)
            gate, up, down = self.mlps[i]
            x = x + linear(silu(linear(y, gate)) * linear(y, up), down)
        self.t += 1
        return linear(rms_norm(x, (WIDTH,), self.model.norm.gain, 1e-6), self.model.embedding)


def ratio(name: str, sides: list[Callable[[], Tensor]], rounds: int) -> None:
    """Print the smallest times of both sides."""
    ours, hand = (side() for side in sides)
    error = float((ours - hand).detach().abs().max() / hand.detach().abs().max())
    if error > 1e-4:
        raise SystemExit(f"{name}: the outputs differ by {error:.1e}; no time is taken")
    best = [float("inf"), float("inf")]
    for _ in range(rounds):
        for i, side in enumerate(sides):
            start = time.perf_counter()
            side()
            best[i] = min(best[i], time.perf_counter() - start)
    times = " / ".join(f"{1e3 * seconds:.3f} ms" for seconds in best)
    print(f"{name:32s} {times}   {best[0] / best[1]:.2f}", flush=True)


def training_step(mechanism: str, rounds: int) -> None:
    attn = Attention(WIDTH, heads=HEADS, mechanism=mechanism)
    x = torch.randn(BATCH, TIME, WIDTH, requires_grad=True)

    def step(layer: Callable[[Tensor], Tensor]) -> Tensor:
        y = layer(x)
        y.sum().backward()
        return y

    by_hand = ByHand(attn)
    ratio(f"train {mechanism}", [lambda: step(attn), lambda: step(by_hand)], rounds)


@torch.no_grad()
def decoded_token(mechanism: str, rounds: int) -> None:
    model = Decoder(256, WIDTH, heads=HEADS, layers=[mechanism] * BLOCKS)
    prompt = torch.randint(256, (1, PROMPT))
    held = [model(prompt, caches=model.init_caches(1, CAPACITY))[1] for _ in range(2)]
    token, by_hand = torch.zeros(1, 1, dtype=torch.int64), DecoderByHand(model, held[1])

    def ours() -> Tensor:
        logits, held[0] = model(token, caches=held[0], donate=True)
        return logits

    ratio(f"decode {mechanism}", [ours, lambda: by_hand(token)], min(10 * rounds, 800))


def main() -> None:
    parser = argparse.ArgumentParser(description="Layers against the same by hand.")
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(f"{'':32s} layer / by hand   ratio")
    for mechanism in ("softmax", "gated_delta"):
        training_step(mechanism, rounds)
        decoded_token(mechanism, rounds)


if __name__ == "__main__":
    main()
