"""Queries, keys, values and other rows of tokens: linear maps of x, and what follows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from precondattn.arrays import Array, cast, namespace
from precondattn.layers.functions import (
    linear,
    rms_norm,
    rotated,
    sigmoid,
    silu,
    unit_rows,
    upcast,
)
from precondattn.layers.parameters import (
    Constant,
    Parameter,
    UniformFanIn,
    linear_map,
    low_rank_maps,
)
from precondattn.layers.recipe import Recipe, RecipeTokens
from precondattn.preconditioners.qk_norm import NORMS


@dataclass(frozen=True)
class Projection(Recipe):
    """W x + b

    Source: Transformer (arXiv 1706.03762), 3.2.2.
    """

    bias: bool = False

    def parameters(self) -> dict[str, Parameter]:
        return linear_map("x …", bias=self.bias)

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        return linear(tokens.x, p["weight"], bias=p.get("bias"))


@dataclass(frozen=True)
class Rotary(Projection):
    """RoPE(W x + b), with θ = `theta`, on `fraction` of the channels

    Positions are those of the call, so that a caller can interpolate them.

    Source: RoFormer (arXiv 2104.09864), Eq. 34; channels paired as in Llama.
    """

    theta: float = 10_000.0
    fraction: float = 1.0

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        x = self.projected(tokens, p)
        return rotated(x, *tokens.rotation(round(x.shape[-1] * self.fraction), self.theta))

    def projected(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        """What is rotated."""
        return super().make(tokens, p)


@dataclass(frozen=True)
class NormedRotary(Rotary):
    """RoPE(γ N(W x + b)), N the `norm` norm by head, θ = `theta`, on `fraction` of the channels

    `norm` is "rms", "layer" or "l2", as in `qk_norm`.

    Source: Qwen3 (arXiv 2505.09388), 2; Transformers, models/qwen3/modeling_qwen3.py.
    """

    eps: float = 1e-6
    norm: str = "rms"

    def __post_init__(self) -> None:
        if self.norm not in NORMS:
            raise ValueError(
                f"NormedRotary: norm must be 'rms', 'layer' or 'l2'; found {self.norm!r}"
            )

    def parameters(self) -> dict[str, Parameter]:
        return {**super().parameters(), "gain": Parameter("d", Constant(1))}

    def projected(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        rows = super().projected(tokens, p)
        if self.norm == "rms" and self.eps:
            return rms_norm(rows, self.eps, p["gain"])
        return cast(p["gain"] * NORMS[self.norm](self.eps).normalized(upcast(rows)), rows.dtype)


@dataclass(frozen=True)
class Activation(Projection):
    """SiLU(W x + b)

    Source: GSA (arXiv 2409.07146); flash-linear-attention, fla/layers/gsa.py.
    """

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        return silu(super().make(tokens, p))


@dataclass(frozen=True)
class Convolution(Recipe):
    """SiLU(conv(W x) + b), conv causal and depthwise over `size` tokens

    Source: Gated DeltaNet (arXiv 2412.06464), 3.4; Mamba-2 (arXiv 2405.21060), 7, with b.
    """

    size: int = 4
    bias: bool = False

    def parameters(self) -> dict[str, Parameter]:
        weights = {
            **linear_map("x …"),
            "convolution": Parameter(f"{self.size} …", UniformFanIn()),
        }
        return {**weights, "bias": Parameter("…", Constant(0))} if self.bias else weights

    def history(self) -> int:
        return self.size - 1

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        rows = linear(tokens.x, p["weight"])
        return silu(tokens.convolved(rows, p["convolution"], p.get("bias")))


@dataclass(frozen=True)
class UnitConvolution(Convolution):
    """L2(SiLU(conv(W x) + b)), conv causal and depthwise over `size` tokens

    Source: Gated DeltaNet (arXiv 2412.06464), 3.4; flash-linear-attention, fla/layers/delta_net.py.
    """

    eps: float = 1e-6

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        return unit_rows(super().make(tokens, p), self.eps)


@dataclass(frozen=True)
class Direction(Recipe):
    """L2(SiLU(conv(B A x))), A x of rank `rank`, conv over `size` tokens

    Source: PaTH (arXiv 2505.16381); flash-linear-attention, fla/layers/path_attn.py, which has
    `UnitConvolution(size=3)`, a full map, where queries share keys.
    """

    rank: int = 32
    size: int = 3
    eps: float = 1e-6

    def parameters(self) -> dict[str, Parameter]:
        return {
            **low_rank_maps(str(self.rank)),
            "convolution": Parameter(f"{self.size} …", UniformFanIn()),
        }

    def history(self) -> int:
        return self.size - 1

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        w = linear(linear(tokens.x, p["down"]), p["up"])
        return unit_rows(silu(tokens.convolved(w, p["convolution"], None)), self.eps)


@dataclass(frozen=True)
class Stepped(Recipe):
    """Δ x', where x' and the step size Δ have recipes of their own

    Source: Mamba-2 (arXiv 2405.21060), 7.
    """

    reads: ClassVar[tuple[str, ...]] = ("x", "dt")

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        rows = tokens.values["x"]
        return cast(tokens.values["dt"][..., None] * upcast(rows), rows.dtype)


@dataclass(frozen=True)
class Weighted(Projection):
    """β W x + b, with β the weight of the key in Mesa's matrix

    Source: MesaNet (arXiv 2506.05233), Eq. 8; flash-linear-attention, fla/layers/mesa_net.py.
    """

    reads: ClassVar[tuple[str, ...]] = ("beta_mesa",)

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        rows = super().make(tokens, p)
        return cast(tokens.values["beta_mesa"][..., None] * upcast(rows), rows.dtype)


@dataclass(frozen=True)
class Contraction(Recipe):
    """σ(w·q̄ + b) for each head, q̄ = L2(q), with b = log(0.1/0.9) at the start

    Source: CCQ (arXiv 2606.01294), Eq. 9 and Algorithm 1; the first b of Appendix D.
    """

    eps: float = 1e-6
    reads: ClassVar[tuple[str, ...]] = ("q",)

    def parameters(self) -> dict[str, Parameter]:
        return {
            "weight": Parameter("… d", Constant(0)),
            "bias": Parameter("…", Constant(-2.1972245773362196)),
        }

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        unit = unit_rows(upcast(tokens.values["q"]), self.eps)
        score = namespace(unit).sum(unit * upcast(p["weight"]), axis=-1)
        return sigmoid(score + upcast(p["bias"]))
