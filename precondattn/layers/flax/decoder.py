"""A small decoder: an embedding, blocks, a tied head, and `generate`."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Never

import jax
import jax.numpy as jnp
from flax import nnx

from precondattn.arrays import DType, Tree
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
from precondattn.layers.flax.block import Block, Norm
from precondattn.layers.flax.module import parameter
from precondattn.layers.flax.sampling import chosen
from precondattn.layers.foreign_arguments import AnswersForeignNames, answering, refuse
from precondattn.layers.functions import linear

Caches = tuple[Cache, ...]


class Decoder(AnswersForeignNames, nnx.Module):
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
    dtype, rngs
        As in `Attention`.

    Examples
    --------
    >>> import jax
    >>> from flax import nnx
    >>> from precondattn.layers.flax import Decoder
    >>> model = Decoder(100, 32, heads=4, layers=["gla", "lucid"], rngs=nnx.Rngs(0))
    >>> prompt = jax.numpy.asarray([[1, 2, 3]])
    >>> model(prompt).shape, model.generate(prompt, 5).shape
    ((1, 3, 100), (1, 5))
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
        dtype: DType = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        check_vocabulary(vocabulary)
        self.vocabulary = vocabulary
        self.blocks = nnx.List(
            [
                Block(width, hidden=hidden, mlp=mlp, dtype=dtype, rngs=rngs, **arguments)
                for arguments in arguments_of(layers, heads, mechanism)
            ]
        )
        self.norm = Norm(width, dtype, rngs)
        self.embedding = parameter(embedding_weight(vocabulary, width), dtype, rngs)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        mask: jax.Array | None = None,
        caches: Caches | None = None,
        segment_ids: jax.Array | None = None,
        cu_seqlens: Given = None,
        attn_mask: jax.Array | None = None,
        prefix: Given = None,
        keep: int = 0,
        states_every: int | None = None,
        **foreign: Never,
    ) -> LayerOutput:
        """The logits (b, t, vocabulary), or they and the longer caches if there are any.

        Parameters
        ----------
        tokens : integer array (b, t)
            A token that the vocabulary has not gives NaN.
        mask : boolean array (b, t), optional
            False for padding, at any place.
        caches : tuple of Cache, optional
            From `init_caches` or an earlier call.
        segment_ids, cu_seqlens
            Packed sequences, as in `Attention`; without caches.
        attn_mask, prefix
            Masks of pairs of every block, as in `Attention`.
        keep, states_every : int, optional
            States of earlier lengths that the longer caches keep for `crop`, as in
            `Mechanism.extend`; with caches.
        """
        if foreign:
            refuse("Decoder", self.__call__, foreign)
        check_tokens(tokens, "jax", mask, caches, blocks=len(self.blocks))
        masks = {"segment_ids": segment_ids, "cu_seqlens": cu_seqlens}
        masks |= {"attn_mask": attn_mask, "prefix": prefix}
        options = {**masks, "keep": keep, "states_every": states_every}
        x, longer = self._states(tokens, mask, caches, **options)
        return self._logits(x) if caches is None else (self._logits(x), longer)

    def _states(
        self,
        tokens: jax.Array,
        mask: jax.Array | None,
        caches: Caches | None,
        **options: object,
    ) -> tuple[jax.Array, Caches | None]:
        """The hidden states after the last block, and the caches."""
        x = embedded(self.embedding[...], tokens)
        if caches is None:
            for block in self.blocks:
                x = block(x, mask=mask, **options)
            return x, None
        longer = []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache = block(x, mask=mask, cache=cache, **options)
            longer.append(cache)
        return x, tuple(longer)

    def _logits(self, x: jax.Array) -> jax.Array:
        logits: jax.Array = linear(self.norm(x), self.embedding[...].T)
        return logits

    @answering("Decoder.init_caches")
    def init_caches(self, batch: int, capacity: int | None = None) -> Caches:
        """An empty cache for each block, as `Attention.init_cache`."""
        return tuple(block.attention.init_cache(batch, capacity) for block in self.blocks)

    @answering("Decoder.generate")
    def generate(
        self,
        tokens: jax.Array,
        count: int,
        *,
        mask: jax.Array | None = None,
        prefix: jax.Array | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: int | None = None,
        key: jax.Array | None = None,
        progress: bool = False,
    ) -> jax.Array:
        """`count` tokens (b, count) that continue the prompts. Not for use inside `jit`.

        Parameters
        ----------
        tokens : integer array (b, t)
            The prompts.
        count : int
            The number of new tokens.
        mask : boolean array (b, t), optional
            False for padding of prompts of different lengths, at any place. Every prompt needs a
            valid token.
        prefix : integer array (b,), optional
            The first tokens of each prompt that all others see, as in `Attention`.
        temperature : float
            0 for the most probable token; otherwise logits are divided by it, and tokens drawn.
        top_p : float
            Draw from the fewest tokens whose probabilities sum to this.
        stop : int, optional
            A token after which a sequence only repeats it.
        key : PRNG key, optional
            Of the draws; needed where the temperature is not 0.
        progress : bool
            Show a bar on the standard error.
        """
        check_tokens(tokens, "jax", mask, are_prompts=True)
        check_generation(
            count, temperature, top_p, stop, self.vocabulary, int(tokens.max()), int(tokens.min())
        )
        if key is None and temperature:
            raise TypeError("key: a PRNG key is needed to draw tokens; found None")
        if mask is not None and not bool(mask.any(axis=1).all()):
            raise ValueError("mask: every prompt needs a valid token; found one without any")
        b, t = tokens.shape
        graph, state = nnx.split(self)
        after = _next_token(graph)
        last = jnp.full((b,), t - 1) if mask is None else t - 1 - mask[:, ::-1].argmax(axis=1)
        is_drawn = temperature > 0 and key is not None
        keys = [*jax.random.split(key, count)] if is_drawn else [None] * count
        caches: tuple[Cache, ...] = self.init_caches(b, t + count)
        new = tokens
        drawn: list[jax.Array] = []
        for i in counted(count, shown=progress):
            if i:
                mask, prefix, last = None, None, jnp.zeros((b,), last.dtype)
            new, caches = after(state, caches, new, mask, prefix, last, keys[i], temperature, top_p)
            if stop is not None and drawn:
                new = jnp.where(drawn[-1] == stop, stop, new)
            drawn.append(new)
        return jnp.concatenate(drawn, axis=1)


def embedded(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows (b, t, width) of the table (vocabulary, width); NaN for tokens that it has not."""
    kinds = jax.typeof(table).sharding, jax.typeof(tokens).sharding
    spec = None
    if any(kind.mesh.explicit_axes for kind in kinds):
        # In the explicit mode the sharding of the result has to be given.
        of_table, of_tokens = (kind.spec for kind in kinds)
        spec = jax.sharding.PartitionSpec(*of_tokens, *of_table[1:])
    return table.at[tokens].get(mode="fill", fill_value=jnp.nan, out_sharding=spec)


@lru_cache(maxsize=16)
def _next_token(graph: nnx.GraphDef) -> Tree:
    """The compiled step of all models of one structure: new tokens and caches.

    JAX compiles it once for each shape, and not again in the next `generate`. It is looked up once
    for all tokens, since the hash of a large graph takes longer than a small step.
    """

    @partial(jax.jit, donate_argnums=1)
    def after(
        state: Tree,
        caches: Caches,
        tokens: jax.Array,
        mask: jax.Array | None,
        prefix: jax.Array | None,
        last: jax.Array,
        key: jax.Array | None,
        temperature: jax.Array,
        top_p: jax.Array,
    ) -> tuple[jax.Array, Tree]:
        model = nnx.merge(graph, state)
        x, longer = model._states(tokens, mask, caches, prefix=prefix)
        logits = model._logits(x[jnp.arange(len(x)), last][:, None])[:, -1]
        new = chosen(logits, key, temperature, top_p)
        return new.astype(tokens.dtype)[:, None], longer

    return after
