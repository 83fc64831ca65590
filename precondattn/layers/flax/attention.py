"""`Attention`: any mechanism as a module of Flax NNX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from precondattn.algebra.mechanism import Mechanism
from precondattn.arrays import Arrays, DType
from precondattn.cache import Cache
from precondattn.given import Given
from precondattn.layers.apply import apply
from precondattn.layers.checks import LayerCall, LayerOutput, checked
from precondattn.layers.flax.module import (
    Depth,
    ModuleMap,
    depth_of,
    kernel_of,
    linear_of,
    parameter,
)
from precondattn.layers.histories import empty_cache
from precondattn.layers.keywords import ChecksKeywords
from precondattn.layers.plan import plan_for
from precondattn.layers.recipe import Recipe
from precondattn.layers.sizes import LayerSizes

if TYPE_CHECKING:
    from precondattn.parallel.jax import ContextParallel


class Attention(ChecksKeywords, nnx.Module):
    """Multi-head attention with any mechanism: y = W_o output(mechanism(q, k, v, …)).

    The layer is the same as in `precondattn.layers.torch`: the same recipes, and weights with the
    same names and shapes, which `to_flax` and `to_torch` convert. The axes of every parameter have
    names, in the metadata `out_sharding`: `embed`, `heads`, `kv_heads`, `head_dim` and `slots`.

    Parameters
    ----------
    width, heads : int
        The width of x and y, and the number of query heads.
    mechanism : str or Mechanism
        The mechanism or its expression, such as `"ccq(gated_delta)"`.
    kv_heads, value_heads, head_dim, value_dim, slots, recipes
        As in `precondattn.layers.torch.Attention`.
    depth : int or integer array ()
        The index of the layer in its model, from 0, on which λ of differential attention depends.
        Layers that `nnx.vmap` creates for `nnx.scan` need an array, so that each has its own depth;
        it is then a variable of the layer that is not trained.
    dtype
        The dtype of all parameters, and of x. float32 by default.
    rngs : nnx.Rngs
        The random streams; `params` draws the initial values.

    Raises
    ------
    TypeError, ValueError
        for an unknown mechanism, sizes that do not fit it, and recipes for inputs that do not
        exist.

    Examples
    --------
    >>> import jax
    >>> from flax import nnx
    >>> from precondattn.layers.flax import Attention
    >>> attn = Attention(32, heads=4, mechanism="ccq(gated_delta)", rngs=nnx.Rngs(0))
    >>> x = jax.random.normal(jax.random.key(1), (2, 6, 32), "float32")
    >>> y = attn(x)
    >>> first, cache = attn(x[:, :4], cache=attn.init_cache(2))
    >>> last, cache = attn(x[:, 4:], cache=cache)
    >>> bool(jax.numpy.allclose(last, y[:, 4:], atol=1e-5))
    True
    """

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        mechanism: str | Mechanism = "softmax",
        kv_heads: int | None = None,
        value_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        slots: int | None = None,
        depth: int | jax.Array = 0,
        recipes: Mapping[str, Recipe] | None = None,
        dtype: DType = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.depth, self.dtype = depth_of(depth), dtype
        sizes = LayerSizes(width, heads, kv_heads, value_heads, head_dim, value_dim, slots)
        self.plan = plan_for(mechanism, sizes, recipes)
        self.inputs = nnx.Dict()
        """The weights other than linear maps, by input; `out` has those of the output."""
        for name, maps, others in self.plan.modules():
            for of_map, starts in maps:
                setattr(self, of_map.name, linear_of(of_map, starts, dtype, rngs))
            if others:
                made = {key: parameter(weight, dtype, rngs) for key, weight in others.items()}
                self.inputs[name] = nnx.Dict(made)
        self.divided: ContextParallel | None = None
        """The mechanism for tokens that are divided among devices; `divide_tokens` sets it."""

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism that the layer calls."""
        return self.plan.mechanism

    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: Cache | None = None,
        segment_ids: jax.Array | None = None,
        cu_seqlens: Given = None,
        attn_mask: jax.Array | None = None,
        prefix: Given = None,
        keep: int = 0,
        states_every: int | None = None,
    ) -> LayerOutput:
        """The output y (b, t, width), and the extended cache if a cache is given.

        Parameters
        ----------
        x : array (b, t, width)
            The hidden states.
        mask : boolean array (b, t), optional
            False for padding, which may be anywhere; its output is 0.
        positions : array (t,) or (b, t), optional
            The positions for rotary embeddings, by default those of the valid tokens.
        cache : Cache, optional
            A cache from `init_cache` or an earlier call.
        segment_ids : integer array (b, t), optional
            The ids of packed sequences.
        cu_seqlens : integer array (n + 1,), optional
            The borders of n packed sequences, for b = 1.
        attn_mask : boolean array (b or 1, heads or 1, t, s), optional
            True where a token may attend to another.
        prefix : integer array (b,), optional
            The number of first tokens that all tokens see; (n,) with `cu_seqlens`.
        keep, states_every : int, optional
            Which states the cache keeps for `crop`. `precondattn.layers.torch.Attention.forward`
            says how these arguments go together.
        """
        call = LayerCall(
            *(x, mask, positions, cache, segment_ids, cu_seqlens, attn_mask, prefix),
            *(False, keep, states_every),
        )
        if self.divided is not None:
            call.refuse(self.divided.owner, "cache", "cu_seqlens", "attn_mask", "prefix")
        like = self._like()
        # The input dtype of a quantized map is unknown.
        segments, keeping = checked(self.plan, like, call, lambda x: not like.size)
        weights: dict[str, Arrays] = {name: {} for name, _ in self.plan.weights}
        for name, parameters in self.inputs.items():
            if isinstance(parameters, nnx.Dict):  # Qwix adds its own metadata to a module.
                weights[name] = {
                    key: array[...]
                    for key, array in parameters.items()
                    if isinstance(array, nnx.Variable)
                }
        for of_map in self.plan.maps:
            module = getattr(self, of_map.name)
            weights[of_map.entry][of_map.weight] = ModuleMap(of_map, module)
        depth = self.depth[...] if isinstance(self.depth, Depth) else self.depth
        return apply(
            self.plan,
            weights,
            call,
            depth=depth,
            segments=segments,
            keeping=keeping,
            mechanism=self.divided,
        )

    def init_cache(self, batch: int, capacity: int | None = None) -> Cache:
        """An empty cache for `batch` sequences of at most `capacity` tokens.

        It has the dtype of the weights. A mechanism whose cache consists of states needs no
        capacity.
        """
        like = self._like()
        return empty_cache(self.plan, like, batch, capacity, like.dtype)

    def _like(self) -> jax.Array:
        """An array with the dtype of inputs and caches.

        It is the weight of the last map if that is floating-point, and otherwise an empty array
        with the dtype that the layer was constructed with.
        """
        weight = kernel_of(self.o_proj)
        return jnp.zeros(0, self.dtype) if weight is None else weight

    def __repr__(self) -> str:
        return self.plan.table("Attention")

    __str__ = __repr__
