"""A small decoder: an embedding, blocks, a head with tied weights, and `generate`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from precondattn.arrays import Device
from precondattn.cache import Cache
from precondattn.given import Given, at_least
from precondattn.layers import decoder
from precondattn.layers.checks import LayerOutput
from precondattn.layers.functions import linear
from precondattn.layers.keywords import ChecksKeywords
from precondattn.layers.torch.block import Block, Norm
from precondattn.layers.torch.module import Declared, register

Caches = tuple[Cache, ...]


class Decoder(ChecksKeywords, Declared):
    """A language model: an embedding, blocks, a norm, and the embedding as the output matrix.

    Parameters
    ----------
    vocabulary : int
        The number of different tokens.
    width : int
        The width of the hidden states.
    heads : int
        The number of query heads of every block.
    layers : list or int
        The mechanism of each block, or the arguments of its `Attention` as a dict:
        `["gated_delta"] * 3 + [{"mechanism": "lucid", "kv_heads": 2}]`. Or the number of blocks.
    mechanism : str, Mechanism or dict, optional
        The mechanism of every block, if `layers` is a number.
    hidden : int, optional
        The inner width of the MLPs.
    mlp : {"gated", "plain"}
        The kind of MLP, as in `Block`.
    device, dtype
        The device and dtype of all parameters.

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
        layers: decoder.Layers,
        mechanism: decoder.Layer | None = None,
        hidden: int | None = None,
        mlp: str = "gated",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.vocabulary = vocabulary = at_least(1, "vocabulary", vocabulary)
        self.blocks = nn.ModuleList(
            Block(width, hidden=hidden, mlp=mlp, device=device, dtype=dtype, **arguments)
            for arguments in decoder.arguments_of(layers, heads, mechanism)
        )
        width = self.blocks[0].attention.plan.width
        self.norm = Norm(width, device, dtype)
        self.declared = {"embedding": decoder.embedding_weight(vocabulary, width)}
        register(self, "embedding", self.declared["embedding"], device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights again, for example after `to_empty` of a model on `meta`."""
        for module in (*self.blocks, self.norm):
            module.reset_parameters()
        super().reset_parameters()

    def forward(
        self,
        tokens: Tensor,
        *,
        mask: Tensor | None = None,
        caches: Caches | None = None,
        **options: Given,
    ) -> LayerOutput:
        """The logits (b, t, vocabulary), and the extended caches if caches are given.

        Parameters
        ----------
        tokens : integer tensor (b, t)
            Tokens from 0 to vocabulary − 1.
        mask : boolean tensor (b, t), optional
            False for padding, which may be anywhere.
        caches : tuple of Cache, optional
            Caches from `init_caches` or an earlier call.
        **options
            `segment_ids`, `cu_seqlens`, `attn_mask`, `prefix`, `donate`, `keep` and `states_every`
            for the `Attention` of every block.
        """
        self._check_tokens(tokens, mask, caches)
        return self._logits(*self._states(tokens, caches, mask=mask, **options))

    def _states(
        self, tokens: Tensor, caches: Caches | None, **options: Given
    ) -> tuple[Tensor, Caches | None]:
        """The hidden states after the last block, and the extended caches."""
        return decoder.states_after(self.blocks, self._embedded(tokens), caches, **options)

    def _embedded(self, tokens: Tensor) -> Tensor:
        divided = self.divided_weights
        if divided is None:
            return nn.functional.embedding(tokens, self.embedding)
        rows = divided.shares["embedding"].indices
        # A token outside the vocabulary is an error on every process.
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
        """Raise an error for invalid tokens, on all processes that divide the weights."""
        error = None
        try:
            blocks = len(self.blocks)
            decoder.check_tokens(
                tokens, "torch", mask, caches, blocks=blocks, are_prompts=are_prompts
            )
        except (TypeError, ValueError) as raised:
            error = raised
        if self.divided_weights is not None:
            self.divided_weights.check_same({"tokens": tokens, "mask": mask}, error)
        elif error is not None:
            raise error

    def init_caches(self, batch: int, capacity: int | None = None) -> Caches:
        """A tuple with an empty cache for each block, as in `Attention.init_cache`."""
        return tuple(block.attention.init_cache(batch, capacity) for block in self.blocks)

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
        """The `count` tokens (b, count) that continue the prompts.

        Parameters
        ----------
        tokens : integer tensor (b, t)
            The prompts.
        count : int
            The number of new tokens.
        mask : boolean tensor (b, t), optional
            False for padding of prompts with different lengths, which may be anywhere. Every prompt
            needs a valid token.
        prefix : integer tensor (b,), optional
            The number of first tokens of each prompt that all tokens see, as in `Attention`.
        temperature : float
            0 selects the most probable token. Otherwise logits are divided by it, and tokens are
            drawn.
        top_p : float
            Tokens are drawn from the smallest set whose probabilities sum to at least this.
        stop : int, optional
            A token after which a sequence ends: it repeats this token.
        generator : torch.Generator, optional
            The generator for drawing tokens.
        progress : bool
            Whether to show a progress bar on the standard error.
        """
        self._check_tokens(tokens, mask, are_prompts=True)
        count, stop = decoder.check_generation(
            count, temperature, top_p, stop, self.vocabulary, tokens, mask
        )
        b, t = tokens.shape
        caches: Caches | None = self.init_caches(b, t + count)
        x, caches = self._states(tokens, caches, mask=mask, prefix=prefix, donate=True)
        last = torch.full((b,), t - 1, device=tokens.device)
        if mask is not None:
            last = t - 1 - mask.flip(1).int().argmax(1)
        x = x[torch.arange(b, device=tokens.device), last][:, None]
        drawn: list[Tensor] = []
        for i in decoder.counted(count, shown=progress):
            if i:
                x, caches = self._states(drawn[-1], caches, donate=True)
            logits, _ = self._logits(x, caches)
            new = chosen(logits[:, -1], temperature, top_p, generator)[:, None]
            if self.divided_weights is not None:
                new = self.divided_weights.of_first(new)
            if stop is not None and drawn:
                new = torch.where(drawn[-1] == stop, stop, new)
            drawn.append(new)
        return torch.cat(drawn, 1)


def chosen(
    logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None
) -> Tensor:
    """One token (b,) for each row of logits (b, vocabulary)."""
    if temperature == 0:
        return logits.argmax(-1)
    p, order = torch.sort((logits.float() / temperature).softmax(-1), descending=True)
    before = p.cumsum(-1) - p
    p = p.masked_fill(before >= top_p, 0)
    return order.gather(-1, torch.multinomial(p, 1, generator=generator))[:, 0]
