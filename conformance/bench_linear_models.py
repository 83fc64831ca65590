"""Existing models with linear layers: Transformers' own functions, beside `use_backend_for`.

    OMP_NUM_THREADS=1 python conformance/bench_linear_models.py [MODEL …] [--rounds 10]

Each row has the time of ours / that of Transformers', measured in turns, as the median of the
rounds and its quartiles. `generate` is without the prompt's pass: 16 more tokens than 1. Results
that differ are not timed.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
import transformers

from precondattn.integrations.transformers import use_backend_for
from precondattn_conformance.bench.paired import Run, ratio, timed

TOKENS, NEW = 512, 16
SHARED: dict[str, Any] = {"vocab_size": 256, "hidden_size": 256, "num_hidden_layers": 4}
SHARED |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Next": {**ATTENTION, **DELTA, "head_dim": 64, "num_experts": 0, "mlp_only_layers": []},
    "OlmoHybrid": {**ATTENTION, **DELTA},
    "Mamba2": {"num_heads": 8, "head_dim": 64, "n_groups": 1, "state_size": 64},
    "Bamba": {**ATTENTION, **MAMBA, "attn_layer_indices": [3]},
}


def model_of(name: str) -> Any:
    """A model of four layers with random weights."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SHARED, **MODELS[name]})
    return transformers.AutoModelForCausalLM.from_config(config)


def works(model: Any) -> dict[str, Run]:
    """What is timed, by name."""
    torch.manual_seed(1)
    ids = torch.randint(2, 256, (1, TOKENS))

    @torch.no_grad()
    def forward() -> torch.Tensor:
        return model.eval()(ids, use_cache=False).logits

    def step() -> torch.Tensor:
        loss = model.train()(ids, labels=ids, use_cache=False).loss
        model.zero_grad()
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def filled() -> Any:
        return model.eval()(ids, use_cache=True, logits_to_keep=1)

    cache: dict[str, Any] = {}

    def reset() -> None:
        outputs = filled()
        cache["now"] = outputs.get("past_key_values", outputs.get("cache_params"))

    @torch.no_grad()
    def tokens() -> torch.Tensor:
        name = "cache_params" if type(model).__name__.startswith("Mamba") else "past_key_values"
        for i in range(NEW):
            logits = model(ids[:, i : i + 1], use_cache=True, **{name: cache["now"]}).logits
        return logits

    return {
        f"forward, {TOKENS} tokens": Run(forward),
        f"training step, {TOKENS} tokens": Run(step),
        f"{NEW} tokens of generation": Run(tokens, reset),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], metavar="MODEL")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    transformers.logging.set_verbosity_error()
    for name in arguments.models or MODELS:
        theirs = model_of(name)
        ours = use_backend_for(copy.deepcopy(theirs))
        for (what, own), peer in zip(works(ours).items(), works(theirs).values(), strict=True):
            own.reset()
            peer.reset()
            torch.testing.assert_close(own.call(), peer.call(), rtol=1e-3, atol=1e-4)
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(rounds):
                for run, into in zip((own, peer), times, strict=True):
                    run.reset()
                    into.append(timed(run.call))
            found = ratio(*times)
            print(
                f"{name:12} {what:28} {found.median:.2f} ({found.q1:.2f} to {found.q3:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
