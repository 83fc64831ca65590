"""`Attention`: any mechanism as a module of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from precondattn.algebra.mechanism import Mechanism
from precondattn.arrays import Device
from precondattn.cache import Cache
from precondattn.frameworks.torch.autocast import target
from precondattn.given import Given, at_least
from precondattn.layers.apply import apply
from precondattn.layers.checks import LayerCall, LayerOutput, checked
from precondattn.layers.functions import LinearMap
from precondattn.layers.histories import empty_cache
from precondattn.layers.keywords import ChecksKeywords
from precondattn.layers.plan import OUT, PROJECTION, LayerPlan, plan_for
from precondattn.layers.recipe import Recipe
from precondattn.layers.recipes.outputs import AFTER_PROJECTION
from precondattn.layers.sizes import LayerSizes
from precondattn.layers.torch.module import Declared, parameters_of, register

if TYPE_CHECKING:
    from precondattn.layers.torch.divided import DividedTokens

LAST = "o_proj"


class Attention(ChecksKeywords, Declared):
    """Multi-head attention with any mechanism: y = W_o output(mechanism(q, k, v, …)).

    Every input of the mechanism is computed from x by a recipe with its own weights. The defaults
    are the published recipes; `print` shows them.

    Parameters
    ----------
    width : int
        The width of x and y.
    heads : int
        The number h of query heads, or of pairs of heads in differential attention.
    mechanism : str or Mechanism
        The mechanism or its expression, such as `"ccq(gated_delta)"`.
    kv_heads : int, optional
        The number of key/value heads, a divisor of `heads`, if the mechanism allows a separate one;
        `heads` by default.
    value_heads : int, optional
        The number of value heads, a multiple of `heads`, for the delta rule and `ssd`.
    head_dim, value_dim : int, optional
        The widths of keys and of values; width / heads by default, and half of it for the keys of
        differential attention.
    slots : int, optional
        The number of slots of `gsa`, or of weights per head in the skip connection of `nystrom`;
        `head_dim` by default.
    depth : int
        The index of the layer in its model, from 0, on which λ of differential attention depends.
    recipes : dict, optional
        Recipes in place of the published ones, by the name of an input, of a helper that `print`
        shows, or `"out"`.
    device, dtype
        The device and dtype of all parameters. x has the same dtype, unless autocast is on.

    Raises
    ------
    TypeError, ValueError
        for an unknown mechanism, sizes that do not fit it, and recipes for inputs that do not
        exist.

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
        self.depth = at_least(0, "depth", depth)
        sizes = LayerSizes(width, heads, kv_heads, value_heads, head_dim, value_dim, slots)
        self.plan = plan_for(mechanism, sizes, recipes)
        self.inputs = nn.ModuleDict()
        """The weights other than linear maps, by input; `out` has those of the output."""
        self.declared = {}
        self._add_weights(device, dtype)
        self.divided: DividedTokens | None = None
        """The division of tokens among processes; `divide_tokens` sets it."""
        self.reset_parameters()

    def _add_weights(self, device: Device, dtype: torch.dtype | None) -> None:
        """Add the linear maps as modules, and the other weights in `inputs`."""
        for name, maps, others in self.plan.modules():
            for of_map, starts in maps:
                self.add_map(of_map, starts, device, dtype)
            module = nn.Module()
            for key, weight in others.items():
                register(module, key, weight, device, dtype)
                self.declared[f"inputs.{name}.{key}"] = weight
            if others:
                self.inputs[name] = module
        self._names = {name: tuple(module._parameters) for name, module in self.inputs.items()}
        """The names of the weights in `inputs`; parametrizations move the weights."""

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism that the layer calls."""
        return self.plan.mechanism

    @property
    def _like(self) -> Tensor:
        """A tensor with the dtype and device of inputs and caches.

        It is the weight of the last map if that is floating-point, and otherwise a tensor with
        PyTorch's default dtype.
        """
        weight = getattr(self._modules[LAST], "weight", None)
        if isinstance(weight, Tensor) and weight.is_floating_point():
            return weight
        return torch.empty(0, device=weight.device if isinstance(weight, Tensor) else None)

    @property
    def _own_plan(self) -> LayerPlan:
        """The plan of this process's part of the layer."""
        of_weights = self.divided_weights
        if of_weights is None:
            return self.plan
        assert of_weights.plan is not None  # Every layer has one.
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
    ) -> LayerOutput:
        """The output y (b, t, width), and the extended cache if a cache is given.

        Parameters
        ----------
        x : tensor (b, t, width)
            The hidden states.
        mask : boolean tensor (b, t), optional
            False for padding, which may be anywhere. The outputs of a sequence are those of its
            valid tokens alone; the output of padding is 0.
        positions : tensor (t,) or (b, t), optional
            The positions for rotary embeddings. By default valid tokens are counted from the length
            of the cache on.
        cache : Cache, optional
            A cache from `init_cache` or an earlier call. However a sequence is split, the outputs
            are those of the full call.
        segment_ids : integer tensor (b, t), optional
            The ids of packed sequences: each run of equal ids is a separate sequence for positions,
            convolutions and the mechanism. It can not be combined with `mask` or `cache`.
        cu_seqlens : integer tensor (n + 1,), optional
            The borders of n packed sequences, for b = 1; the first is 0. Tokens after the last
            border are padding with any contents; their output is 0.
        attn_mask : boolean tensor (b or 1, heads or 1, t, s), optional
            True where a token may attend to another. It restricts causality and other masks
            further, and is for softmax and mechanisms around it. Without a cache, s = t, and
            columns are the tokens of x, also with `mask`. With a cache, column j is the token at
            position j of its sequence, cached or new, and `mask` can not be given.
        prefix : integer tensor (b,), optional
            The number of first valid tokens of a sequence that all its tokens see, as in a prefix
            language model. The whole prefix must be in the first call with a cache; later calls do
            not need the argument. With `segment_ids` it is the prefix of each segment, and with
            `cu_seqlens` the shape is (n,).
        donate : bool
            Write into the cache's own buffers. The old cache must not be used again.
        keep, states_every : int, optional
            Which states at earlier lengths the extended cache keeps for `crop`, as in
            `Mechanism.extend`. They need a cache.
        """
        call = LayerCall(
            *(x, mask, positions, cache, segment_ids, cu_seqlens, attn_mask, prefix),
            *(donate, keep, states_every),
        )
        plan, of_weights, like = self._own_plan, self.divided_weights, self._like
        # The input dtype of a quantized map is unknown.
        segments, keeping = checked(plan, like, call, lambda x: not like.numel() or is_autocast(x))
        divided = mechanism = summed = None
        if self.divided is not None:
            mechanism, divided = self.divided.mechanism, self.divided.tokens_of_process(call)
        if of_weights is not None:
            if attn_mask is not None and attn_mask.shape[1] != 1:
                raise ValueError(
                    f"{self.mechanism}: heads are divided among processes, and so attn_mask is one "
                    f"for all of them, (b or 1, 1, t, s); found {tuple(attn_mask.shape)}"
                )
            call, summed = call._replace(x=of_weights.entering(x)), of_weights.total
        return apply(
            plan,
            self._weights(),
            call,
            depth=self.depth,
            segments=segments,
            keeping=keeping,
            divided=divided,
            mechanism=mechanism,
            summed=summed,
        )

    def _weights(self) -> dict[str, dict[str, Tensor]]:
        """The parameters and linear maps of each entry, or this process's parts of them."""
        divided, modules = self.divided_weights, self._modules  # Attributes are slow to read.
        weights: dict[str, dict[str, Tensor]] = {name: {} for name, _ in self.plan.weights}
        for name, module in self.inputs._modules.items():
            weights[name] = parameters = parameters_of(module, self._names[name])
            if divided is not None:
                for key, parameter in parameters.items():
                    parameters[key] = divided.part(f"inputs.{name}.{key}", parameter)
        for of_map in self._own_plan.maps:
            linear, name = modules[of_map.name], of_map.weight
            if divided is None:
                weights[of_map.entry][name] = LinearMap(of_map, linear)
                continue
            is_last = (of_map.entry, name) == (OUT, PROJECTION)
            weights[of_map.entry][name] = divided.part_of_map(of_map, linear, with_bias=not is_last)
            if is_last and of_map.bias:  # All processes add the whole bias, after the sum.
                bias = divided.part(f"{of_map.name}.bias", linear.bias, is_term=False)
                weights[OUT][AFTER_PROJECTION] = bias
        return weights

    def init_cache(self, batch: int, capacity: int | None = None) -> Cache:
        """An empty cache for `batch` sequences of at most `capacity` tokens.

        It has the device and the dtype of the weights, or autocast's dtype under autocast. A
        mechanism whose cache consists of states needs no capacity.
        """
        weight = self._like
        like = torch.empty(0, dtype=weight.dtype, device=weight.device)
        return empty_cache(self._own_plan, like, batch, capacity, target(weight) or weight.dtype)

    def __repr__(self) -> str:
        return self.plan.table("Attention")


def is_autocast(x: Tensor) -> bool:
    """Whether autocast chooses the dtype of computations with x."""
    return target(x) is not None
