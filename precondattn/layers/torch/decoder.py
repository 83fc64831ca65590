"""A small decoder: an embedding, blocks, a tied head, and `generate`."""

from __future__ import annotations

from typing import Never

import torch
from torch import Tensor, nn

from precondattn.arrays import Device
from precondattn.cache import Cache
from precondattn.given import Given
from precondattn.layers.checks import LayerOutput
from precondattn.layers.decoder import (
    Layer,
    Layers,
    arguments_of,
    check_generation,
    check_tokens,
    check_vocabulary,
    counted,
    embedding_weight,
)
from precondattn.layers.foreign_arguments import AnswersForeignNames, answering, refuse
from precondattn.layers.functions import linear
from precondattn.layers.torch.block import Block, Norm
from precondattn.layers.torch.module import Declared, register
from precondattn.layers.torch.sampling import chosen

Caches = tuple[Cache, ...]


class Decoder(AnswersForeignNames, Declared):
    """A language model: an embedding, blocks, a norm, and the embedding again as its head.

    Parameters
    ----------
    vocabulary : int
        The number of tokens.
    width : int
        The width of the hidden states.
    heads : int
        The number of query heads of every block.
    layers : list or int
        For each block its mechanism, or the arguments of its `Attention` as a dict:
        `["gated_delta"] * 3 + [{"mechanism": "lucid", "kv_heads": 2}]`. Or the number of blocks.
    mechanism : str, Mechanism or dict, optional
        That of every block, where `layers` is a number.
    hidden : int, optional
        The inner width of the MLPs.
    mlp : {"gated", "plain"}
        Gated MLPs, or plain ones of two layers, as in `Block`.
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
        layers: Layers | None = None,
        mechanism: Layer | None = None,
        hidden: int | None = None,
        mlp: str = "gated",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_vocabulary(vocabulary)
        self.vocabulary = vocabulary
        self.blocks = nn.ModuleList(
            Block(width, hidden=hidden, mlp=mlp, device=device, dtype=dtype, **arguments)
            for arguments in arguments_of(layers, heads, mechanism)
        )
        self.norm = Norm(width, device, dtype)
        self.earlier = {}
        self.declared = {"embedding": embedding_weight(vocabulary, width)}
        register(self, "embedding", self.declared["embedding"], device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew, for example after `to_empty` of a model made on `meta`."""
        for module in (*self.blocks, self.norm):
            module.reset_parameters()
        super().reset_parameters()

    def forward(
        self,
        tokens: Tensor,
        *,
        mask: Tensor | None = None,
        caches: Caches | None = None,
        segment_ids: Tensor | None = None,
        cu_seqlens: Given = None,
        attn_mask: Tensor | None = None,
        prefix: Given = None,
        donate: bool = False,
        keep: int = 0,
        states_every: int | None = None,
        **foreign: Never,
    ) -> LayerOutput:
        """The logits (b, t, vocabulary), or they and the longer caches if there are any.

        Parameters
        ----------
        tokens : integer tensor (b, t)
        mask : boolean tensor (b, t), optional
            False for padding, at any place.
        caches : tuple of Cache, optional
            From `init_caches` or an earlier call.
        segment_ids, cu_seqlens
            Packed sequences, as in `Attention`; without caches.
        attn_mask, prefix
            Masks of pairs of every block, as in `Attention`.
        donate : bool
            Write into the caches' own buffers.
        keep, states_every : int, optional
            States of earlier lengths that the longer caches keep for `crop`, as in
            `Mechanism.extend`; with caches.
        """
        if foreign:
            refuse("Decoder", self.forward, foreign)
        self._check_tokens(tokens, mask, caches)
        masks = {"segment_ids": segment_ids, "cu_seqlens": cu_seqlens}
        masks |= {"attn_mask": attn_mask, "prefix": prefix}
        options = {**masks, "keep": keep, "states_every": states_every}
        return self._logits(*self._states(tokens, mask, caches, donate, **options))

    def _states(
        self,
        tokens: Tensor,
        mask: Tensor | None,
        caches: Caches | None,
        donate: bool,
        **options: object,
    ) -> tuple[Tensor, Caches | None]:
        """The hidden states after the last block, and the caches."""
        x = self._embedded(tokens)
        if caches is None:
            for block in self.blocks:
                x = block(x, mask=mask, **options)
            return x, None
        longer = []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache = block(x, mask=mask, cache=cache, donate=donate, **options)
            longer.append(cache)
        return x, tuple(longer)

    def _embedded(self, tokens: Tensor) -> Tensor:
        divided = self.divided_weights
        if divided is None:
            return nn.functional.embedding(tokens, self.embedding)
        rows = divided.shares["embedding"].own
        # A token that the vocabulary has not is an error on every process.
        is_other = (tokens >= 0) & (tokens < self.vocabulary)
        is_other &= (tokens < rows.start) | (tokens >= rows.stop)
        table = divided.part("embedding", self.embedding)
        x = nn.functional.embedding((tokens - rows.start).masked_fill(is_other, 0), table)
        return divided.total(x.masked_fill(is_other[:, :, None], 0))

    def _logits(self, x: Tensor, caches: Caches | None) -> Tensor:
        x, divided = self.norm(x), self.divided_weights
        if divided is None:
            logits = linear(x, self.embedding.mT)
        else:
            table = divided.part("embedding", self.embedding)
            logits = divided.gathered(linear(divided.entering(x), table.mT))
        return logits if caches is None else (logits, caches)

    def _check_tokens(
        self, tokens: Tensor, mask: Tensor, caches: object = None, *, are_prompts: bool = False
    ) -> None:
        """Raise an error for tokens that do not fit, on all processes that divide the weights."""
        error = None
        try:
            blocks = len(self.blocks)
            check_tokens(tokens, "torch", mask, caches, blocks=blocks, are_prompts=are_prompts)
        except (TypeError, ValueError) as raised:
            error = raised
        if self.divided_weights is not None:
            self.divided_weights.check_same({"tokens": tokens, "mask": mask}, error)
        elif error is not None:
            raise error

    @answering("Decoder.init_caches")
    def init_caches(self, batch: int, capacity: int | None = None) -> Caches:
        """An empty cache for each block, as `Attention.init_cache`."""
        return tuple(block.attention.init_cache(batch, capacity) for block in self.blocks)

    @answering("Decoder.generate")
    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        count: int,
        *,
        mask: Tensor | None = None,
        prefix: Tensor | None = None,
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
        prefix : integer tensor (b,), optional
            The first tokens of each prompt that all others see, as in `Attention`.
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
        self._check_tokens(tokens, mask, are_prompts=True)
        check_generation(
            count, temperature, top_p, stop, self.vocabulary, int(tokens.max()), int(tokens.min())
        )
        if mask is not None and not mask.any(1).all():
            raise ValueError("mask: every prompt needs a valid token; found one without any")
        b, t = tokens.shape
        caches: Caches | None = self.init_caches(b, t + count)
        x, caches = self._states(tokens, mask, caches, True, prefix=prefix)
        last = torch.full((b,), t - 1, device=tokens.device)
        if mask is not None:
            last = t - 1 - mask.flip(1).int().argmax(1)
        x = x[torch.arange(b, device=tokens.device), last][:, None]
        drawn: list[Tensor] = []
        for i in counted(count, shown=progress):
            if i:
                x, caches = self._states(drawn[-1], None, caches, True)
            logits, _ = self._logits(x, caches)
            new = chosen(logits[:, -1], temperature, top_p, generator)[:, None]
            if self.divided_weights is not None:
                new = self.divided_weights.of_first(new)
            if stop is not None and drawn:
                new = torch.where(drawn[-1] == stop, stop, new)
            drawn.append(new)
        return torch.cat(drawn, 1)
