"""XCiT's block: cross-covariance attention, then a convolution of neighbouring patches.

Attention between channels moves information between tokens only through a d × d matrix that all
tokens share. The local patch interaction moves it between neighbouring patches of the grid:

    x ← x + γ₁ ∘ attention(LN(x))
    x ← x + γ₃ ∘ conv(BN(GELU(conv(LN(x)))))       both depthwise, 3 × 3
    x ← x + γ₂ ∘ W₂ GELU(W₁ LN(x))

Source: XCiT (arXiv 2106.09681), 3.3 and Figure 1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from precondattn.algebra.mechanism import Mechanism
from precondattn.arrays import Device
from precondattn.given import Arguments, whole_number
from precondattn.layers.sizes import count
from precondattn.layers.torch.vision_attention import VisionAttention


class LocalPatchInteraction(nn.Module):
    """XCiT's local patch interaction: conv(BN(GELU(conv(x)))) with depthwise convolutions.

    The parameters have the names and shapes of the published `LPI`.

    Parameters
    ----------
    width : int
        The width of x.
    size : int
        The kernel size of the convolutions, an odd number.
    device, dtype
        The device and dtype of all parameters.

    Examples
    --------
    >>> import torch
    >>> from precondattn.layers.torch import LocalPatchInteraction
    >>> LocalPatchInteraction(16)(torch.randn(2, 35, 16), grid=(5, 7)).shape
    torch.Size([2, 35, 16])
    """

    def __init__(
        self, width: int, size: int = 3, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        number = whole_number(size)
        if number is None or number < 1 or number % 2 == 0:
            raise ValueError(f"size must be an odd whole number, 1 or above; found {size!r}")
        width, size = count("width", width), number
        options: Arguments = {"padding": size // 2, "groups": width}
        options |= {"device": device, "dtype": dtype}
        self.conv1 = nn.Conv2d(width, width, size, **options)
        self.bn = nn.BatchNorm2d(width, device=device, dtype=dtype)
        self.conv2 = nn.Conv2d(width, width, size, **options)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """The output (b, t, width) for tokens x that fill a `grid` (rows, columns), row by row."""
        rows, columns = (count("grid", number) for number in grid)
        if x.ndim != 3 or x.shape[2] != self.conv1.in_channels:
            raise ValueError(
                f"x must have the shape (b, t, {self.conv1.in_channels}); found {tuple(x.shape)}"
            )
        if rows * columns != x.shape[1]:
            raise ValueError(
                f"grid: {rows} rows and {columns} columns have {rows * columns} tokens; "
                f"found t = {x.shape[1]}"
            )
        image = x.transpose(1, 2).unflatten(2, (rows, columns))
        image = self.conv2(self.bn(nn.functional.gelu(self.conv1(image))))
        y: Tensor = image.flatten(2).transpose(1, 2)
        return y


class XCABlock(nn.Module):
    """XCiT's block: attention between channels, local patch interaction, and an MLP.

    Parameters
    ----------
    width : int
        The width of x.
    heads : int
        The number of heads.
    mechanism : str or Mechanism
        The mechanism or its expression, such as `"row_normalized(cross_covariance)"`. Published
        weights, which `from_timm` converts, need `"cross_covariance[eps=1e-24]"`.
    hidden : int, optional
        The inner width of the MLP; 4 times the width by default.
    start : float
        The initial value of γ₁, γ₂ and γ₃.
    eps : float
        The ε of the layer norms.
    device, dtype
        The device and dtype of all parameters.

    Examples
    --------
    >>> import torch
    >>> from precondattn.layers.torch import XCABlock
    >>> block = XCABlock(16, heads=4)
    >>> block(torch.randn(2, 35, 16), grid=(5, 7)).shape
    torch.Size([2, 35, 16])
    """

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        mechanism: Mechanism | str = "cross_covariance",
        hidden: int | None = None,
        start: float = 1.0,
        eps: float = 1e-6,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        made: Arguments = {"device": device, "dtype": dtype}
        width = count("width", width)
        hidden = 4 * width if hidden is None else count("hidden", hidden)
        self.attn = VisionAttention(width, heads=heads, mechanism=mechanism, **made)
        self.local_mp = LocalPatchInteraction(width, **made)
        self.mlp = nn.ModuleDict(
            {"fc1": nn.Linear(width, hidden, **made), "fc2": nn.Linear(hidden, width, **made)}
        )
        for i in (1, 2, 3):
            self.register_module(f"norm{i}", nn.LayerNorm(width, eps=eps, **made))
            gamma = torch.full((width,), start, **made)
            self.register_parameter(f"gamma{i}", nn.Parameter(gamma))

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """The new x (b, t, width), for tokens that fill a `grid` (rows, columns), row by row."""
        x = x + self.gamma1 * self.attn(self.norm1(x))
        x = x + self.gamma3 * self.local_mp(self.norm3(x), grid)
        hidden = nn.functional.gelu(self.mlp["fc1"](self.norm2(x)))
        y: Tensor = x + self.gamma2 * self.mlp["fc2"](hidden)
        return y
