"""Models of Transformers whose linear layers are computed by this library, beside the same without.

`model_forward` is the logits of t tokens, `model_step` a forward and a backward pass, `model_token`
one token after t others, and `model_generate` greedy search with `generate` from t tokens on. The
models have four layers and random weights. Only the functions of the recurrence differ, so a ratio
is what `use_backend_for` changes.

The logits, and the gradient of the embedding, are compared with those of the model that it was. A
result that differs is not timed.
"""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING

import numpy as np

from precondattn.arrays import Arrays
from precondattn.backend import UnsupportedError
from precondattn.installed import is_installed
from precondattn_conformance.bench.beside import Beside, worst
from precondattn_conformance.bench.cases import MODELS, BenchCase
from precondattn_conformance.bench.computation import allowed, finished, no_gradient
from precondattn_conformance.bench.correct import KIND, Checked
from precondattn_conformance.bench.paired import Run, timed
from precondattn_conformance.bench.plain_pytorch import PlainFunctions
from precondattn_conformance.libraries import Library
from precondattn_conformance.tolerance import bound

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

WORKS = {
    "model_forward": "forward",
    "model_step": "forward_backward",
    "model_token": "decode",
    "model_generate": "decode",
}
"""The work of the mechanism, by the work of the model."""

BLOCKS, VOCABULARY = 4, 256


def measured(case: BenchCase, backend: str | None, library: Library) -> Beside:
    """Our run of a case and Transformers' own. Raises `WrongResultError`."""
    if not is_installed("transformers"):
        raise UnsupportedError("transformers is not installed")
    if case.model not in MODELS:
        raise UnsupportedError(f"a case {case.work} is of a model: {', '.join(MODELS)}")
    from precondattn.integrations.transformers import use_backend_for

    theirs = _model(case, library)
    changed = use_backend_for(copy.deepcopy(theirs), allowed(backend))
    ours, peer = _run(changed, case, library), _their_run(theirs, case, library)
    results: list[Arrays] = []
    ours.reset()
    first = timed(lambda: results.append(ours.call()))
    peer.reset()
    expected = peer.call()
    limit = bound(case.dtype, KIND)
    largest = worst(case.model, results[0], expected, library, limit)
    checked = Checked(largest, limit, f"{', '.join(expected)}, with Transformers' own functions")
    return Beside(ours, peer, "transformers", checked, None, first)


def _model(case: BenchCase, library: Library) -> PreTrainedModel:
    """A model with the sizes of the case. Its width is that of its heads, Mamba-2's half of it."""
    import torch
    import transformers

    sizes = case.layout
    is_mamba = case.mechanism == "ssd"
    width = sizes.h * sizes.e // (2 if is_mamba else 1)
    options: dict[str, object] = {"vocab_size": VOCABULARY, "hidden_size": width}
    options |= {"num_hidden_layers": BLOCKS, "pad_token_id": 0, "bos_token_id": 1}
    options |= {"eos_token_id": None}
    if case.model != "Mamba2":
        options |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        options |= {"intermediate_size": 2 * width}
    options |= {own: getattr(sizes, size) for own, size in _SIZES[case.model].items()}
    options |= _OPTIONS.get(case.model, {})
    if case.model == "Qwen3Next":
        options["head_dim"] = width // 4
    torch.manual_seed(0)
    config = getattr(transformers, f"{case.model}Config")(**options)
    like = library.array(np.zeros(1), case.dtype)
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _set_weights(name, parameter)
    return model.to(like.device, like.dtype)


def _set_weights(name: str, parameter: Tensor) -> None:
    """Weights with which an error in a linear layer is seen; those of a new model are too small.

    Outputs are as large as inputs, and states last for many tokens.
    """
    if name.endswith("dt_bias"):
        parameter.fill_(-3)
    elif parameter.ndim > 1:
        parameter.normal_(std=parameter[0].numel() ** -0.5)


_DELTA = {"linear_num_value_heads": "h", "linear_num_key_heads": "n"}
_DELTA |= {"linear_key_head_dim": "d", "linear_value_head_dim": "e"}
_SIZES = {
    "Qwen3Next": _DELTA,
    "OlmoHybrid": _DELTA,
    "KimiLinear": {"linear_num_heads": "h", "linear_head_dim": "d"},
    "Mamba2": {"num_heads": "h", "n_groups": "n", "state_size": "d", "head_dim": "e"},
    "Bamba": {
        "mamba_n_heads": "h",
        "mamba_n_groups": "n",
        "mamba_d_state": "d",
        "mamba_d_head": "e",
    },
}
"""What each model calls the sizes of its linear layers."""
_OPTIONS: dict[str, dict[str, object]] = {
    "Qwen3Next": {"num_experts": 0, "mlp_only_layers": []},
    "KimiLinear": {
        "layer_types": ["linear_attention"] * (BLOCKS - 1) + ["full_attention"],
        "mlp_layer_types": ["dense"] * BLOCKS,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
    },
    "Bamba": {"attn_layer_indices": [BLOCKS - 1]},
}


def _their_run(model: PreTrainedModel, case: BenchCase, library: Library) -> Run:
    """The run of a case by Transformers' own functions, on a CPU those in plain PyTorch."""
    if model.device.type != "cpu":
        return _run(model, case, library)
    plain = PlainFunctions(model)
    with plain:
        return plain.around(_run(model, case, library))


def _run(model: PreTrainedModel, case: BenchCase, library: Library) -> Run:
    """The work of a case by a model."""
    import torch

    sizes = case.layout
    draws = np.random.default_rng(1).integers(2, VOCABULARY, (sizes.b, sizes.t + case.calls))
    tokens = torch.tensor(draws, device=model.device)
    context, new = tokens[:, : sizes.t], tokens[:, sizes.t :]

    def forward() -> Arrays:
        with no_gradient(library):
            logits = model(context, use_cache=False).logits
        return finished(library, {"the logits": logits})

    def step() -> Arrays:
        model.zero_grad()
        outputs = model(context, labels=context, use_cache=False)
        outputs.loss.backward()
        gradient = model.get_input_embeddings().weight.grad
        logits = outputs.logits.detach()
        return finished(library, {"the logits": logits, "the gradient of the embedding": gradient})

    def generate() -> Arrays:
        found = model.generate(
            context,
            max_new_tokens=case.calls,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return finished(library, {"the logits": torch.stack(found.logits)})

    whole = {"model_forward": forward, "model_step": step, "model_generate": generate}
    if case.work in whole:
        return Run(whole[case.work])
    name = "past_key_values"
    if name not in inspect.signature(model.forward).parameters:
        name = "cache_params"
    with no_gradient(library):
        filled = model(context, use_cache=True)[name]
    now: dict[str, object] = {}

    def reset() -> None:
        now[name] = copy.deepcopy(filled)

    def decode() -> Arrays:
        with no_gradient(library):
            for i in range(case.calls):
                logits = model(new[:, i : i + 1], use_cache=True, **now).logits
        return finished(library, {"the logits": logits})

    return Run(decode, reset)
