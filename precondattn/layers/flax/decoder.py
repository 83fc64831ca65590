"""A small decoder: an embedding, blocks, a head with tied weights, and `generate`."""

from __future__ import annotations

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from flax import nnx

from precondattn.arrays import DType, Tree
from precondattn.cache import Cache
from precondattn.given import Given, at_least
from precondattn.layers import decoder
from precondattn.layers.checks import LayerOutput
from precondattn.layers.flax.block import Block, Norm
from precondattn.layers.flax.module import parameter
from precondattn.layers.functions import linear
from precondattn.layers.keywords import ChecksKeywords

Caches = tuple[Cache, ...]


class Decoder(ChecksKeywords, nnx.Module):
    """A language model: an embedding, blocks, a norm, and the embedding as the output matrix.

    Parameters
    ----------
    vocabulary, width, heads, layers, mechanism, hidden, mlp
        As in `precondattn.layers.torch.Decoder`.
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
        layers: decoder.Layers,
        mechanism: decoder.Layer | None = None,
        hidden: int | None = None,
        mlp: str = "gated",
        dtype: DType = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.vocabulary = vocabulary = at_least(1, "vocabulary", vocabulary)
        self.blocks = nnx.List(
            [
                Block(width, hidden=hidden, mlp=mlp, dtype=dtype, rngs=rngs, **arguments)
                for arguments in decoder.arguments_of(layers, heads, mechanism)
            ]
        )
        width = self.blocks[0].attention.plan.width
        self.norm = Norm(width, dtype, rngs)
        self.embedding = parameter(decoder.embedding_weight(vocabulary, width), dtype, rngs)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        mask: jax.Array | None = None,
        caches: Caches | None = None,
        **options: Given,
    ) -> LayerOutput:
        """The logits (b, t, vocabulary), and the extended caches if caches are given.

        Parameters
        ----------
        tokens : integer array (b, t)
            Tokens from 0 to vocabulary − 1. The output of any other token is NaN.
        mask, caches, options
            As in `precondattn.layers.torch.Decoder.forward`, except `donate`.
        """
        decoder.check_tokens(tokens, "jax", mask, caches, blocks=len(self.blocks))
        x, longer = self._states(tokens, caches, mask=mask, **options)
        return self._logits(x) if caches is None else (self._logits(x), longer)

    def _states(
        self, tokens: jax.Array, caches: Caches | None, **options: Given
    ) -> tuple[jax.Array, Caches | None]:
        """The hidden states after the last block, and the extended caches."""
        return decoder.states_after(
            self.blocks, embedded(self.embedding[...], tokens), caches, **options
        )

    def _logits(self, x: jax.Array) -> jax.Array:
        return linear(self.norm(x), self.embedding[...].T)

    def init_caches(self, batch: int, capacity: int | None = None) -> Caches:
        """A tuple with an empty cache for each block, as in `Attention.init_cache`."""
        return tuple(block.attention.init_cache(batch, capacity) for block in self.blocks)

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
        """The `count` tokens (b, count) that continue the prompts. It can not be called in `jit`.

        Parameters
        ----------
        tokens : integer array (b, t)
            The prompts.
        count, mask, prefix, temperature, top_p, stop, progress
            As in `precondattn.layers.torch.Decoder.generate`.
        key : PRNG key, optional
            The key for drawing tokens; required unless the temperature is 0.
        """
        decoder.check_tokens(tokens, "jax", mask, are_prompts=True)
        count, stop = decoder.check_generation(
            count, temperature, top_p, stop, self.vocabulary, tokens, mask
        )
        if key is None and temperature:
            raise TypeError("key: a PRNG key is needed to draw tokens; found None")
        b, t = tokens.shape
        graph, state = nnx.split(self)
        after = _next_token(graph)
        last = jnp.full((b,), t - 1) if mask is None else t - 1 - mask[:, ::-1].argmax(axis=1)
        is_drawn = temperature > 0 and key is not None
        keys = [*jax.random.split(key, count)] if is_drawn else [None] * count
        caches: tuple[Cache, ...] = self.init_caches(b, t + count)
        new = tokens
        drawn: list[jax.Array] = []
        for i in decoder.counted(count, shown=progress):
            if i:
                mask, prefix, last = None, None, jnp.zeros((b,), last.dtype)
            new, caches = after(state, caches, new, mask, prefix, last, keys[i], temperature, top_p)
            if stop is not None and drawn:
                new = jnp.where(drawn[-1] == stop, stop, new)
            drawn.append(new)
        return jnp.concatenate(drawn, axis=1)


def embedded(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows (b, t, width) of the table (vocabulary, width); NaN for tokens outside of it."""
    kinds = jax.typeof(table).sharding, jax.typeof(tokens).sharding
    spec = None
    if any(kind.mesh.explicit_axes for kind in kinds):
        # JAX's explicit mode requires the sharding of the result.
        of_table, of_tokens = (kind.spec for kind in kinds)
        spec = jax.sharding.PartitionSpec(*of_tokens, *of_table[1:])
    return table.at[tokens].get(mode="fill", fill_value=jnp.nan, out_sharding=spec)


@lru_cache(maxsize=16)
def _next_token(graph: nnx.GraphDef) -> Tree:
    """The compiled decoding step, which all models of one structure share.

    JAX compiles it once for each shape, and not again in the next `generate`. It is looked up once
    per `generate`, because hashing a large graph takes longer than a small step.
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
        x, longer = model._states(tokens, caches, mask=mask, prefix=prefix)
        logits = model._logits(x[jnp.arange(len(x)), last][:, None])[:, -1]
        new = chosen(logits, key, temperature, top_p)
        return new.astype(tokens.dtype)[:, None], longer

    return after


def chosen(
    logits: jax.Array, key: jax.Array | None, temperature: jax.Array, top_p: jax.Array
) -> jax.Array:
    """One token (b,) for each row of logits (b, vocabulary); the most probable without a key."""
    if key is None:
        return jnp.argmax(logits, axis=-1)
    p = jax.nn.softmax(logits.astype(jnp.float32) / temperature, axis=-1)
    order = jnp.argsort(-p, axis=-1)
    p = jnp.take_along_axis(p, order, axis=-1)
    p = jnp.where(jnp.cumsum(p, axis=-1) - p < top_p, p, 0)
    rank = jax.random.categorical(key, jnp.log(p), axis=-1)
    return jnp.take_along_axis(order, rank[:, None], axis=-1)[:, 0]
