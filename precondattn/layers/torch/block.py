"""A pre-norm block of `Attention` and an MLP, and the norm that decoders use too."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from precondattn.arrays import Device, DType
from precondattn.given import Given
from precondattn.layers import decoder
from precondattn.layers.checks import LayerOutput
from precondattn.layers.functions import LinearMap, rms_norm
from precondattn.layers.keywords import ChecksKeywords
from precondattn.layers.parameters import FanIn
from precondattn.layers.torch.attention import Attention
from precondattn.layers.torch.module import Declared, register


class Norm(Declared):
    """The RMS norm with a gain, γ RMSNorm(x)."""

    def __init__(self, width: int, device: Device, dtype: DType) -> None:
        super().__init__()
        self.declared = {"gain": decoder.gain_weight(width)}
        register(self, "gain", self.declared["gain"], device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        divided, gain = self.divided_weights, self.gain
        if divided is not None:  # All processes compute the whole norm.
            gain = divided.part("gain", gain, is_term=False)
        return rms_norm(x, decoder.EPS, gain)


class BlockMLP(Declared):
    """The gated MLP W₃ (SiLU(W₁ y) ∘ W₂ y), or the plain MLP W₂ GELU(W₁ y)."""

    def __init__(self, width: int, hidden: int, mlp: str, device: Device, dtype: DType) -> None:
        super().__init__()
        self.declared, self.maps = {}, decoder.mlp_maps(width, hidden, mlp)
        for of_map in self.maps:
            self.add_map(of_map, {"weight": FanIn()}, device, dtype)

    def forward(self, y: Tensor) -> Tensor:
        divided, modules = self.divided_weights, self._modules
        if divided is None:
            maps = [LinearMap(of_map, modules[of_map.name]) for of_map in self.maps]
            return decoder.mlp_output(y, *maps)
        parts = [divided.part_of_map(of_map, modules[of_map.name]) for of_map in self.maps]
        return divided.total(decoder.mlp_output(divided.entering(y), *parts))


class Block(ChecksKeywords, nn.Module):
    """A pre-norm block: z = x + attention(norm(x)), and the result z + MLP(norm(z)).

    Parameters
    ----------
    width : int
        The width of x.
    hidden : int, optional
        The inner width of the MLP; by default 8/3 of the width, or 4 times the width in a plain
        MLP.
    mlp : {"gated", "plain"}
        The MLP: W₃ (SiLU(W₁ y) ∘ W₂ y), or W₂ GELU(W₁ y).
    device, dtype
        The device and dtype of all parameters.
    **attention
        The arguments of `Attention`.

    Examples
    --------
    >>> import torch
    >>> from precondattn.layers.torch import Block
    >>> Block(32, heads=4, mechanism="gla")(torch.randn(2, 6, 32)).shape
    torch.Size([2, 6, 32])
    """

    def __init__(
        self,
        width: int,
        *,
        hidden: int | None = None,
        mlp: str = "gated",
        device: Device = None,
        dtype: torch.dtype | None = None,
        **attention: Given,
    ) -> None:
        super().__init__()
        decoder.check_mlp(mlp)
        self.attention = Attention(width, device=device, dtype=dtype, **attention)
        width = self.attention.plan.width
        self.attention_norm = Norm(width, device, dtype)
        self.mlp_norm = Norm(width, device, dtype)
        self.mlp = BlockMLP(width, decoder.hidden_width(width, hidden, mlp), mlp, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights again."""
        for module in self.children():
            module.reset_parameters()

    def forward(self, x: Tensor, **options: Given) -> LayerOutput:
        """The new x, and the extended cache if one is given; options as in `Attention`."""
        return decoder.block_output(self, x, **options)
