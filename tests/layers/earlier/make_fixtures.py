"""Save weights with layers whose linear maps are no modules yet; this needs the code at that time.

    git worktree add /tmp/before 8867c99
    cd /tmp/before && python THIS_FILE

`torch.npz` is a decoder of PyTorch in float64 that was trained for two steps: `first.*` and
`weight.*` are its weights before and after them, `state.I.*` the entries of its optimizer, and
`losses` those of the next steps. `flax.npz` is a decoder of Flax, and `transformers/` a folder of
`save_pretrained`. Each has the logits of the tokens in `tests/layers/test_earlier_weights.py`.
"""

from pathlib import Path

import numpy as np
import torch

from precondattn.layers.torch import Decoder

# Tests import these, and not all have the libraries of `main`.
SIZES = {"vocabulary": 11, "width": 8, "heads": 2, "hidden": 12}
LAYERS = ["gated_delta", {"mechanism": "path[forget=unscaled]", "kv_heads": 1}, "delta_product"]
OF_FLAX = ["gla", {"mechanism": "softmax", "kv_heads": 1}]
TOKENS = np.arange(14).reshape(2, 7) * 5 % 11
HERE = Path(__file__).resolve().parent


def decoder(seed=0):
    torch.manual_seed(seed)
    return Decoder(**SIZES, layers=LAYERS, dtype=torch.float64)


def steps(model, optimizer, count):
    """The losses of some steps of training."""
    tokens, losses = torch.tensor(TOKENS), []
    for _ in range(count):
        logits = model(tokens[:, :-1]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    import jax
    from flax import nnx

    from precondattn.integrations.transformers import PrecondattnConfig, PrecondattnForCausalLM
    from precondattn.layers import flax

    model = decoder()
    arrays = {f"first.{name}": weight.numpy().copy() for name, weight in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    steps(model, optimizer, 2)
    arrays |= {
        f"weight.{name}": weight.numpy().copy() for name, weight in model.state_dict().items()
    }
    for i, entries in optimizer.state_dict()["state"].items():
        arrays |= {f"state.{i}.{key}": value.numpy().copy() for key, value in entries.items()}
    losses = steps(model, optimizer, 3)
    np.savez_compressed(HERE / "torch.npz", **arrays, losses=losses)

    in_flax = flax.Decoder(**SIZES, layers=OF_FLAX, rngs=nnx.Rngs(0))
    state = nnx.to_flat_state(nnx.state(in_flax, nnx.Param))
    arrays = {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in state}
    logits = in_flax(jax.numpy.asarray(TOKENS))
    np.savez_compressed(HERE / "flax.npz", **arrays, logits=logits)

    torch.manual_seed(0)
    config = PrecondattnConfig(
        vocab_size=11,
        hidden_size=8,
        num_attention_heads=2,
        intermediate_size=12,
        layer_types=["gated_delta", "delta_product"],
    )
    of_hub = PrecondattnForCausalLM(config)
    of_hub.save_pretrained(HERE / "transformers")
    logits = of_hub(torch.tensor(TOKENS)).logits.detach().numpy()
    np.save(HERE / "transformers" / "logits.npy", logits)


if __name__ == "__main__":
    main()
