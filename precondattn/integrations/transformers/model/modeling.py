"""`PrecondattnModel` and `PrecondattnForCausalLM`: layers of this library as Transformers' models.

logits = norm(block(… block(E[tokens]))) Hᵀ,    H = E where they are tied
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from precondattn.arrays import Tree
from precondattn.cache import Cache
from precondattn.given import Given, at_least
from precondattn.integrations.transformers.model import inputs
from precondattn.integrations.transformers.model.cache import PrecondattnCache
from precondattn.integrations.transformers.model.configuration import PrecondattnConfig
from precondattn.integrations.transformers.model.layer_arguments import layer_arguments
from precondattn.layers.torch import Block
from precondattn.layers.torch.block import Norm


class PrecondattnBlock(GradientCheckpointingLayer, Block):
    """A `Block` whose cache is a layer of a `PrecondattnCache`."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        past_key_values: PrecondattnCache | None = None,
        attn_mask: Tensor | None = None,
        prefix: Tensor | None = None,
    ) -> Tree:
        """The new x (b, t, width)."""
        if next(self.attention.parameters()).is_meta is not x.is_meta:
            raise RuntimeError(
                "device_map: weights of this model can not be offloaded; give each layer a device "
                "that computes"
            )
        if past_key_values is None:
            return super().forward(
                x, mask=mask, positions=positions, attn_mask=attn_mask, prefix=prefix
            )
        layer = past_key_values.layers[self.index]
        batch, count = x.shape[:2]
        before = layer.room_for(self.attention, batch, count)

        def extended(cache: Cache, count: int, x: Tensor = x) -> Cache:
            """The cache with the first tokens of this call. Such a cache has no masks of pairs."""
            of_tokens = {"mask": mask, "positions": positions}
            options = {n: None if x is None else x[:, :count] for n, x in of_tokens.items()}
            y = self.attention_norm(x[:, :count])
            longer: Cache = self.attention(y, **options, cache=cache)[1]
            return longer

        is_kept = layer.keep(before, extended)
        drafts = layer.drafts(before, min(past_key_values.drafts, count))
        x, cache = super().forward(
            x,
            mask=mask,
            positions=positions,
            cache=before,
            donate=not torch.is_grad_enabled() and not is_kept,
            keep=drafts,
            attn_mask=attn_mask,
            prefix=prefix,
        )
        layer.hold(cache, count, drafts)
        return x


class PrecondattnPreTrainedModel(PreTrainedModel):
    """What both models are for Transformers."""

    config_class = PrecondattnConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["PrecondattnBlock"]  # noqa: RUF012  Transformers' own names.
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": PrecondattnBlock}  # noqa: RUF012

    @classmethod
    def is_custom_code(cls) -> bool:
        """False: `_init_weights` below keeps loaded weights, as Transformers' own models do."""
        return False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """The first values of the weights that were not loaded."""
        if isinstance(module, nn.Linear) and isinstance(self, PrecondattnModel):
            return  # Its block draws the weights.
        if not isinstance(module, Block | Norm):
            super()._init_weights(module)
            return
        loaded = [
            (parameter, parameter.clone())
            for parameter in module.parameters()
            if getattr(parameter, "_is_hf_initialized", False)
        ]
        if len(loaded) < len([*module.parameters()]):
            module.reset_parameters()
            for parameter, value in loaded:
                parameter.copy_(value)


class PrecondattnModel(PrecondattnPreTrainedModel):
    """An embedding, blocks and a norm: the hidden states of `PrecondattnForCausalLM`."""

    def __init__(self, config: PrecondattnConfig) -> None:
        super().__init__(config)
        arguments = layer_arguments(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            PrecondattnBlock(
                config.hidden_size, hidden=config.intermediate_size, mlp=config.mlp, **of_layer
            )
            for of_layer in arguments
        )
        for index, block in enumerate(self.layers):
            block.index = index
        self.norm = Norm(config.hidden_size, None, None)
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: PrecondattnCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        prefix: Tensor | None = None,
        **kwargs: Given,
    ) -> Tree:
        """The hidden states (b, t, width); arguments as of `PrecondattnForCausalLM`."""
        inputs.check_arguments(kwargs, ())
        inputs.check_cache(past_key_values, len(self.layers))
        if use_cache is None:
            use_cache = self.config.use_cache and not torch.is_grad_enabled()
        if self.gradient_checkpointing and self.training and (use_cache or past_key_values):
            raise ValueError("use_cache: gradient checkpointing would fill a cache twice")
        if (input_ids is None) is (inputs_embeds is None):
            raise ValueError("pass input_ids or inputs_embeds, and not both")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = PrecondattnCache(self.config)
        inputs.check_positions(position_ids, attention_mask, past_key_values)
        new = x.shape[0], x.shape[1], past_key_values
        pairs = inputs.pairs_of_new(attention_mask, *new, self.layers)
        with nullcontext() if past_key_values is None else past_key_values.undone_if_failed():
            mask = inputs.mask_of_new(attention_mask if pairs is None else None, *new)
            for block in self.layers:
                x = block(
                    x,
                    mask=mask,
                    positions=position_ids,
                    past_key_values=past_key_values,
                    attn_mask=pairs,
                    prefix=prefix,
                )
            x = self.norm(x)
        return BaseModelOutputWithPast(last_hidden_state=x, past_key_values=past_key_values)


class PrecondattnForCausalLM(PrecondattnPreTrainedModel, GenerationMixin):
    """A language model of attention layers that works with Transformers' tools, such as `generate`.

    Parameters
    ----------
    config : PrecondattnConfig

    Examples
    --------
    >>> import torch
    >>> from precondattn.integrations.transformers import (
    ...     PrecondattnConfig, PrecondattnForCausalLM
    ... )
    >>> config = PrecondattnConfig(
    ...     vocab_size=50, hidden_size=16, num_attention_heads=2, layer_types=["gla", "lucid"]
    ... )
    >>> model = PrecondattnForCausalLM(config)
    >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False).shape
    torch.Size([1, 7])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: PrecondattnConfig) -> None:
        super().__init__(config)
        self.model = PrecondattnModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: PrecondattnCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        prefix: Tensor | None = None,
        **kwargs: Given,
    ) -> Tree:
        """The logits, and the loss if there are labels.

        Parameters
        ----------
        input_ids : integer tensor (b, t)
        attention_mask : tensor (b, cached + t) of 0 and 1 in any dtype, optional
            0 for padding, which may be anywhere. Or a boolean mask of pairs (b or 1, heads or 1, t,
            cached + t), True where a token may attend to another, for softmax and mechanisms around
            it. It restricts causality and windows, and does not replace them.
        position_ids : integer tensor (b, t) or (1, t), optional
            The positions for rotary embeddings; by default valid tokens are counted.
        past_key_values : PrecondattnCache, optional
            The cache from an earlier call, which is updated in place.
        inputs_embeds : tensor (b, t, width), optional
            Embeddings in place of `input_ids`.
        labels : integer tensor (b, t), optional
            The tokens themselves, with −100 for tokens without a loss.
        use_cache : bool, optional
            Whether a cache is created. By default as in the configuration, but only without
            gradients.
        logits_to_keep : int or tensor
            The number of last tokens, or the indices of the tokens, that get logits; 0 for all.
        prefix : integer tensor (b,), optional
            The number of first valid tokens that all tokens of a sequence see, as in `Attention`.
        """
        inputs.check_arguments(kwargs, () if labels is None else inputs.LOSS)
        is_index = isinstance(logits_to_keep, Tensor)
        if not is_index:
            logits_to_keep = at_least(0, "logits_to_keep", logits_to_keep)
        if isinstance(past_key_values, PrecondattnCache):
            # Assisted decoding asks for the logits of its drafts, and of the token before them.
            past_key_values.drafts = 0 if is_index else max(logits_to_keep - 1, 0)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            prefix=prefix,
            **{name: kwargs.pop(name) for name in inputs.RECORDED if name in kwargs},
        )
        kept = logits_to_keep if is_index else slice(-logits_to_keep, None)
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            options = {name: kwargs[name] for name in inputs.LOSS if name in kwargs}
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **options)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )

    def _prepare_cache_for_generation(
        self,
        generation_config: Given,
        model_kwargs: dict[str, Given],
        generation_mode: Given,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """The cache of `generate`: of our own class, growing or of the length that is needed."""
        early = generation_config.assistant_early_exit
        if early is not None:
            raise ValueError(f"assistant_early_exit: this model runs all layers; found {early!r}")
        cache = model_kwargs.get("past_key_values")
        inputs.check_cache(cache, len(self.model.layers))
        kind = generation_config.cache_implementation
        if cache is not None or generation_config.use_cache is False:
            super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        elif kind in (None, "dynamic"):
            model_kwargs["past_key_values"] = PrecondattnCache(self.config)
        elif kind == "static":
            length = max(max_cache_length, generation_config.max_cache_len or 0)
            model_kwargs["past_key_values"] = PrecondattnCache(self.config, length)
        else:
            raise ValueError(
                f"cache_implementation must be 'dynamic' or 'static' for this model; found {kind!r}"
            )
        if generation_config.is_assistant and "past_key_values" in model_kwargs:
            model_kwargs["past_key_values"].activate_past_recording()
