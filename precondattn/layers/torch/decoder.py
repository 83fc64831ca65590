"""A small decoder around `Attention`: blocks, an embedding, a tied head, and `generate`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from precondattn.cache import Cache
from precondattn.layers.decoder import (
    EPS,
    Layers,
    arguments_of,
    check_generation,
    check_tokens,
    check_vocabulary,
    counted,
    embedding_weight,
    gain_weight,
    gated_mlp,
    hidden_width,
    mlp_weights,
)
from precondattn.layers.functions import linear, rms_norm
from precondattn.layers.torch.attention import Attention
from precondattn.layers.torch.module import fill, register

Caches = tuple[Cache, ...]


class _Norm(nn.Module):
    """γ RMSNorm(x)."""

    def __init__(self, width: int, device: Any, dtype: Any) -> None:
        super().__init__()
        self.weight = gain_weight(width)
        register(self, "gain", self.weight, device, dtype)

    def reset_parameters(self) -> None:
        fill(self.gain, self.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = rms_norm(x, EPS, self.gain)
        return y


class _GatedMLP(nn.Module):
    """W₃ (SiLU(W₁ y) ∘ W₂ y)."""

    def __init__(self, width: int, hidden: int, device: Any, dtype: Any) -> None:
        super().__init__()
        self.weights = mlp_weights(width, hidden)
        for name, weight in self.weights.items():
            register(self, name, weight, device, dtype)

    def reset_parameters(self) -> None:
        for name, weight in self.weights.items():
            fill(self.get_parameter(name), weight)

    def forward(self, y: Tensor) -> Tensor:
        out: Tensor = gated_mlp(y, self.gate, self.up, self.down)
        return out


class Block(nn.Module):
    """x + attention(norm(x)), and to this its gated MLP, after a norm.

    Parameters
    ----------
    width : int
        The width of x.
    hidden : int, optional
        The inner width of the MLP; 8/3 of the width by default.
    device, dtype
        Of all parameters.
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
        device: Any = None,
        dtype: torch.dtype | None = None,
        **attention: Any,
    ) -> None:
        super().__init__()
        self.attention = Attention(width, device=device, dtype=dtype, **attention)
        self.attention_norm = _Norm(width, device, dtype)
        self.mlp_norm = _Norm(width, device, dtype)
        self.mlp = _GatedMLP(width, hidden_width(width, hidden), device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        for module in self.children():
            module.reset_parameters()

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        donate: bool = False,
    ) -> Any:
        """The new x, or it and the longer cache if there is one; arguments as of `Attention`."""
        y = self.attention(
            self.attention_norm(x), mask=mask, positions=positions, cache=cache, donate=donate
        )
        y, after = (y, None) if cache is None else y
        x = x + y
        x = x + self.mlp(self.mlp_norm(x))
        return x if cache is None else (x, after)


class Decoder(nn.Module):
    """A language model: an embedding, blocks, a norm, and the embedding again as its head.

    Parameters
    ----------
    vocabulary : int
        The number of tokens.
    width : int
        The width of the hidden states.
    heads : int
        The number of query heads of every block.
    layers : list
        For each block its mechanism, or the arguments of its `Attention` as a dict:
        `["gated_delta"] * 3 + [{"mechanism": "lucid", "kv_heads": 2}]`.
    hidden : int, optional
        The inner width of the MLPs.
    device, dtype
        Of all parameters.

    Examples
    --------
    >>> import torch
    >>> from precondattn.layers.torch import Decoder
    >>> model = Decoder(100, 32, heads=4, layers=["gated_delta", "lucid"])
    >>> prompt = torch.tensor([[1, 2, 3]])
    >>> model(prompt).shape, model.generate(prompt, 5).shape
    (torch.Size([1, 3, 100]), torch.Size([1, 5]))
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        *,
        heads: int,
        layers: Layers,
        hidden: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_vocabulary(vocabulary)
        self.vocabulary = vocabulary
        self.blocks = nn.ModuleList(
            Block(width, hidden=hidden, device=device, dtype=dtype, **arguments)
            for arguments in arguments_of(layers, heads)
        )
        self.norm = _Norm(width, device, dtype)
        self._embedding = embedding_weight(vocabulary, width)
        register(self, "embedding", self._embedding, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew, for example after `to_empty` of a model made on `meta`."""
        for module in (*self.blocks, self.norm):
            module.reset_parameters()
        fill(self.embedding, self._embedding)

    def forward(
        self,
        tokens: Tensor,
        *,
        mask: Tensor | None = None,
        caches: Caches | None = None,
        donate: bool = False,
    ) -> Any:
        """The logits (b, t, vocabulary), or they and the longer caches if there are any.

        Parameters
        ----------
        tokens : integer tensor (b, t)
        mask : boolean tensor (b, t), optional
            False for padding, at any place.
        caches : tuple of Cache, optional
            From `init_caches` or an earlier call.
        donate : bool
            Write into the caches' own buffers.
        """
        check_tokens(tokens, "torch", mask, caches)
        return self._logits(*self._states(tokens, mask, caches, donate))

    def _states(
        self, tokens: Tensor, mask: Tensor | None, caches: Caches | None, donate: bool
    ) -> tuple[Tensor, Caches | None]:
        """The hidden states after the last block, and the caches."""
        x = nn.functional.embedding(tokens, self.embedding)
        if caches is None:
            for block in self.blocks:
                x = block(x, mask=mask)
            return x, None
        longer = []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache = block(x, mask=mask, cache=cache, donate=donate)
            longer.append(cache)
        return x, tuple(longer)

    def _logits(self, x: Tensor, caches: Caches | None) -> Any:
        logits = linear(self.norm(x), self.embedding.mT)
        return logits if caches is None else (logits, caches)

    def init_caches(self, batch: int, capacity: int | None = None) -> Caches:
        """An empty cache for each block, as `Attention.init_cache`."""
        return tuple(block.attention.init_cache(batch, capacity) for block in self.blocks)

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        count: int,
        *,
        mask: Tensor | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: int | None = None,
        generator: torch.Generator | None = None,
        progress: bool = False,
    ) -> Tensor:
        """`count` tokens (b, count) that continue the prompts.

        Parameters
        ----------
        tokens : integer tensor (b, t)
            The prompts.
        count : int
            The number of new tokens.
        mask : boolean tensor (b, t), optional
            False for padding of prompts of different lengths, at any place. Every prompt needs a
            valid token.
        temperature : float
            0 for the most probable token; otherwise logits are divided by it, and tokens drawn.
        top_p : float
            Draw from the fewest tokens whose probabilities sum to this.
        stop : int, optional
            A token after which a sequence only repeats it.
        generator : torch.Generator, optional
            Of the draws.
        progress : bool
            Show a bar on the standard error.
        """
        check_tokens(tokens, "torch", mask)
        check_generation(
            count, temperature, top_p, stop, self.vocabulary, int(tokens.max()), int(tokens.min())
        )
        if mask is not None and not mask.any(1).all():
            raise ValueError("mask: every prompt needs a valid token; found one without any")
        b, t = tokens.shape
        caches: Caches | None = self.init_caches(b, t + count)
        x, caches = self._states(tokens, mask, caches, True)
        last = torch.full((b,), t - 1, device=tokens.device)
        if mask is not None:
            last = t - 1 - mask.flip(1).int().argmax(1)
        x = x[torch.arange(b, device=tokens.device), last][:, None]
        drawn: list[Tensor] = []
        for i in counted(count, shown=progress):
            if i:
                x, caches = self._states(drawn[-1], None, caches, True)
            logits, _ = self._logits(x, caches)
            new = _chosen(logits[:, -1], temperature, top_p, generator)[:, None]
            if stop is not None and drawn:
                new = torch.where(drawn[-1] == stop, stop, new)
            drawn.append(new)
        return torch.cat(drawn, 1)


def _chosen(
    logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None
) -> Tensor:
    """A token (b,) for each row of logits (b, vocabulary)."""
    if temperature == 0:
        return logits.argmax(-1)
    p, order = torch.sort((logits.float() / temperature).softmax(-1), descending=True)
    before = p.cumsum(-1) - p
    p = p.masked_fill(before >= top_p, 0)
    return order.gather(-1, torch.multinomial(p, 1, generator=generator))[:, 0]
