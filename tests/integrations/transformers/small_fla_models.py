"""Random models of flash-linear-attention, and their prompts.

As a script, in Triton's interpreter, it saves the logits of their own kernels:

    TRITON_INTERPRET=1 python small_fla_models.py logits.pt
"""

import sys

import torch

VOCABULARY = 61
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
SIZES |= {"intermediate_size": 32, "bos_token_id": 1, "eos_token_id": None}
MODELS = {
    "GLA": {"expand_k": 0.5, "expand_v": 1.0, "num_kv_heads": 1, "use_short_conv": True},
    "HGRN2": {"expand_ratio": 16},
    "GatedDeltaNet": {"head_dim": 8, "expand_v": 2, "num_v_heads": 4, "allow_neg_eigval": True},
    "KDA": {"head_dim": 16, "expand_v": 2, "num_v_heads": 4, "allow_neg_eigval": True},
    "KDA, bounded": {"head_dim": 16, "safe_gate": True, "lower_bound": -3.0},
    "DeltaNet": {"use_gate": True},
    "RetNet": {},
    "GSA": {"num_slots": 8},
    "LinearAttention": {},
}
"""The options of each model's configuration."""


def made(name):
    """A model whose linear layers matter: with larger weights."""
    import fla.models

    torch.manual_seed(0)
    options = {**SIZES, "num_heads": 2, **MODELS[name]}
    family = name.partition(",")[0]
    config = getattr(fla.models, f"{family}Config")(**options)
    model = getattr(fla.models, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in parameter_name:
                parameter.mul_(4)
    return model


def prompts():
    """Token ids (2, 21) and their mask; the first prompt has four tokens of padding."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, VOCABULARY, (2, 21), generator=generator)
    ids[0, :4] = 0
    return ids, ids.ne(0).long()


def logits_of(model):
    ids, mask = prompts()
    with torch.no_grad():
        return model(ids, attention_mask=mask, use_cache=False).logits


def main(path):
    from triton.runtime.autotuner import Autotuner

    # Configurations are not timed.
    Autotuner.do_bench = property(lambda self: lambda call, quantiles: (0.0, 0.0, 0.0))
    torch.save({name: logits_of(made(name)) for name in MODELS}, path)


if __name__ == "__main__":
    main(sys.argv[1])
