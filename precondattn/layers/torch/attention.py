"""`Attention`: any mechanism as a module of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Never

import torch
from torch import Tensor, nn
from torch.nn import Module

from precondattn.algebra.mechanism import Mechanism
from precondattn.arrays import Device
from precondattn.cache import Cache
from precondattn.execution.torch.autocast import target
from precondattn.given import Given
from precondattn.layers.apply import apply
from precondattn.layers.checks import (
    LayerOutput,
    check_attn_mask,
    check_batch,
    check_call,
    check_depth,
    keeping_of,
)
from precondattn.layers.foreign_arguments import AnswersForeignNames, answering, refuse
from precondattn.layers.histories import with_rows
from precondattn.layers.plan import OUT, PROJECTION, LayerPlan, plan_for
from precondattn.layers.recipe import Recipe
from precondattn.layers.recipes.outputs import AFTER_PROJECTION
from precondattn.layers.segments import segments_of
from precondattn.layers.torch.divided import DividedTokens
from precondattn.layers.torch.divided_weights import DividedWeights
from precondattn.layers.torch.module import Declared, ModuleMap, parameters_of, register

LAST = "o_proj"


class Attention(AnswersForeignNames, Declared):
    """Multi-head attention by any mechanism: y = W_o output(mechanism(q, k, v, …)).

    Every input of the mechanism is made from x by a recipe, with weights of its own. The published
    recipes are the defaults; `print` shows them.

    Parameters
    ----------
    width : int
        The width of x and y.
    heads : int
        The number h of query heads; of pairs of heads in differential attention.
    mechanism : str or Mechanism
        Such as `"ccq(gated_delta)"`.
    kv_heads : int, optional
        The number of key/value heads, a divisor of `heads`, where the mechanism has one of its own;
        `heads` by default.
    value_heads : int, optional
        The number of value heads, a multiple of `heads`, for the delta rule and `ssd`.
    head_dim, value_dim : int, optional
        The widths of keys and of values; width / heads by default. In differential attention the
        keys' is half of it.
    slots : int, optional
        The number of slots of `gsa`, or of weights of the skip of `nystrom` for each head;
        `head_dim` by default.
    depth : int
        The index of the layer in its model, from 0, on which λ of differential attention depends.
    recipes : dict, optional
        Other recipes, by the name of an input, of a helper that `print` shows, or `"out"`.
    device, dtype
        Of all parameters. x has the same dtype, unless autocast is on.

    Raises
    ------
    TypeError, ValueError
        for an unknown mechanism, sizes that do not fit it, and recipes for other inputs.

    Examples
    --------
    >>> import torch
    >>> from precondattn.layers.torch import Attention
    >>> attn = Attention(32, heads=4, mechanism="ccq(gated_delta)")
    >>> x = torch.randn(2, 6, 32)
    >>> attn(x).shape
    torch.Size([2, 6, 32])
    >>> first, cache = attn(x[:, :4], cache=attn.init_cache(2))
    >>> last, cache = attn(x[:, 4:], cache=cache)
    >>> torch.allclose(torch.cat([first, last], 1), attn(x), atol=1e-5)
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
        depth: int = 0,
        recipes: Mapping[str, Recipe] | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_depth(depth)
        self.depth = depth
        self.plan = plan_for(
            width,
            heads,
            mechanism,
            kv_heads=kv_heads,
            value_heads=value_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            slots=slots,
            recipes=recipes,
        )
        self.inputs = nn.ModuleDict()
        """The weights that are no linear maps, by input, and those of the output as `out`."""
        self.declared, self.earlier = {}, {}
        self._add_weights(device, dtype)
        self.divided: DividedTokens | None = None
        """How tokens are divided among processes; `divide_tokens` sets it."""
        self.reset_parameters()

    def _add_weights(self, device: Device, dtype: torch.dtype | None) -> None:
        """The linear maps as modules of their own, and the other weights in `inputs`."""
        of_weight = {(m.entry, m.weight): (m, "weight") for m in self.plan.maps}
        of_bias = {(m.entry, m.bias): (m, "bias") for m in self.plan.maps if m.bias}
        for of_map in self.plan.maps:
            self.register_map(of_map, device, dtype)
        for name, weights in self.plan.weights:
            module = nn.Module()
            for own, weight in weights:
                found = of_weight.get((name, own)) or of_bias.get((name, own))
                if found is not None:
                    of_map, kind = found
                    self.declare_stored(kind, of_map, weight.start, f"inputs.{name}.{own}")
                else:
                    register(module, own, weight, device, dtype)
                    self.declared[f"inputs.{name}.{own}"] = weight
            if module._parameters:
                self.inputs[name] = module
        self._names = {name: tuple(module._parameters) for name, module in self.inputs.items()}
        """The names of the weights in `inputs`, which a parametrization moves."""

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism that the layer calls."""
        return self.plan.mechanism

    @property
    def _like(self) -> Tensor:
        """A tensor with the dtype and device of inputs and caches: the last map's weight, if it has
        one in floating point, and else one of PyTorch's default dtype."""
        weight = getattr(self._modules[LAST], "weight", None)
        if isinstance(weight, Tensor) and weight.is_floating_point():
            return weight
        return torch.empty(0, device=weight.device if isinstance(weight, Tensor) else None)

    @property
    def _own_plan(self) -> LayerPlan:
        """The plan of what this process computes."""
        of_weights = self.divided_weights
        if of_weights is None:
            return self.plan
        assert of_weights.plan is not None  # Every layer has got one.
        return of_weights.plan

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        segment_ids: Tensor | None = None,
        cu_seqlens: Given = None,
        attn_mask: Tensor | None = None,
        prefix: Given = None,
        donate: bool = False,
        keep: int = 0,
        states_every: int | None = None,
        **foreign: Never,
    ) -> LayerOutput:
        """y, or y and the longer cache if there is one.

        Parameters
        ----------
        x : tensor (b, t, width)
        mask : boolean tensor (b, t), optional
            False for padding, at any place. Each sequence then gives what its valid tokens give
            alone; the output of padding is 0.
        positions : tensor (t,) or (b, t), optional
            For rotations; by default the valid tokens are counted, from the cache's length on.
        cache : Cache, optional
            From `init_cache` or an earlier call. Any split of a sequence gives the full call.
        segment_ids : integer tensor (b, t), optional
            Packed sequences: each run of equal ids is a sequence of its own, for positions,
            convolutions and the mechanism. Not with `mask` or `cache`.
        cu_seqlens : integer tensor (n + 1,), optional
            The same for b = 1: the bounds of n sequences, from 0 on. Tokens after the last bound
            are padding, of any contents; their output is 0.
        attn_mask : boolean tensor (b or 1, heads or 1, t, s), optional
            True where a token may attend to another, beside causality and all else, for softmax and
            what is around it. Without a cache s = t, and columns are the tokens of x, with `mask`
            too. With a cache column j is the token at position j of its sequence, cached or new;
            then not with `mask`.
        prefix : integer tensor (b,), optional
            Every token sees the first `prefix` valid tokens of its sequence: a prefix language
            model. The whole prefix is among the first tokens of a cache; steps need not name it.
            With `segment_ids` it is of each segment, with `cu_seqlens` (n,).
        donate : bool
            Write into the cache's own buffers; the old cache can then not be used again.
        keep, states_every : int, optional
            States of earlier lengths that the longer cache keeps for `crop`, as in
            `Mechanism.extend`; with a cache.
        """
        if foreign:
            refuse("Attention", self.forward, foreign)
        plan, divided_weights, like = self._own_plan, self.divided_weights, self._like
        check_call(
            plan,
            like,
            x,
            mask,
            positions,
            cache,
            # A quantized map does not say which dtype it reads.
            is_autocast if like.numel() else is_any,
            is_packed=segment_ids is not None or cu_seqlens is not None,
        )
        check_attn_mask(plan, x, attn_mask, mask, cache)
        if self.divided is not None:
            given = {"mask": mask, "cache": cache}
            given |= {"segment_ids": segment_ids, "cu_seqlens": cu_seqlens}
            given |= {"attn_mask": attn_mask, "prefix": prefix}
            self.divided.refuse([name for name, value in given.items() if value is not None])
        segments = segments_of(str(self.mechanism), segment_ids, cu_seqlens, x)
        summed = None
        if divided_weights is None:
            weights = self._weights()
        else:
            if attn_mask is not None and attn_mask.shape[1] != 1:
                raise ValueError(
                    f"{self.mechanism}: heads are divided among processes, and so attn_mask is one "
                    f"for all of them, (b or 1, 1, t, s); found {tuple(attn_mask.shape)}"
                )
            x, weights = divided_weights.entering(x), self._parts(divided_weights)
            summed = divided_weights.total
        y, after = apply(
            plan,
            weights,
            x,
            depth=self.depth,
            mask=mask,
            positions=positions,
            cache=cache,
            segments=segments,
            pair_masks={"attn_mask": attn_mask, "prefix": prefix},
            donate=donate,
            keeping=keeping_of(cache, keep, states_every),
            divided=None if self.divided is None else self.divided.tokens_of_process(x),
            mechanism=None if self.divided is None else self.divided.mechanism,
            summed=summed,
        )
        return y if cache is None else (y, after)

    def _weights(self) -> dict[str, dict[str, Tensor]]:
        """The weights of each entry: linear maps, and parameters."""
        weights: dict[str, dict[str, Tensor]] = {name: {} for name, _ in self.plan.weights}
        for name, module in self.inputs._modules.items():
            weights[name] = parameters_of(module, self._names[name])
        modules = self._modules  # Attributes of modules are slow to read.
        for of_map in self.plan.maps:
            weights[of_map.entry][of_map.weight] = ModuleMap(of_map, modules[of_map.name])
        return weights

    def _parts(self, divided: DividedWeights) -> dict[str, dict[str, Module]]:
        """What this process computes with of the weights."""
        weights: dict[str, dict[str, Tensor]] = {name: {} for name, _ in self.plan.weights}
        for name, module in self.inputs._modules.items():
            for own, parameter in parameters_of(module, self._names[name]).items():
                weights[name][own] = divided.part(f"inputs.{name}.{own}", parameter)
        for of_map in self._own_plan.maps:
            linear: Module = self._modules[of_map.name]
            is_last = (of_map.entry, of_map.weight) == (OUT, PROJECTION)
            part = divided.part_of_map(of_map, linear, with_bias=not is_last)
            weights[of_map.entry][of_map.weight] = part
            if is_last and of_map.bias:  # All processes add the same, to the sum of their outputs.
                bias = divided.part(f"{of_map.name}.bias", linear.bias, is_term=False)
                weights[OUT][AFTER_PROJECTION] = bias
        return weights

    @answering("Attention.init_cache")
    def init_cache(self, batch: int, capacity: int | None = None) -> Cache:
        """An empty cache for `batch` sequences of at most `capacity` tokens.

        It has the device and the dtype of the weights, or autocast's dtype under autocast. A
        mechanism whose cache is a state needs no capacity.
        """
        check_batch(batch)
        weight, plan = self._like, self._own_plan
        like = {
            name: torch.empty(shape, dtype=weight.dtype, device=weight.device)
            for name, shape in plan.input_shapes(batch).items()
        }
        cache = self.mechanism.init_cache(**like, capacity=capacity)
        return with_rows(cache, plan, target(weight) or weight.dtype)

    def __repr__(self) -> str:
        return self.plan.table("Attention")


def is_any(x: Tensor) -> bool:
    return True


def is_autocast(x: Tensor) -> bool:
    """Whether autocast chooses the dtype of what is computed with x."""
    return target(x) is not None
