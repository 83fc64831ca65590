"""Freeze what public peers compute, to hold our mechanisms to them where no peer is installed.

`path_fla.npz`: flash-linear-attention's naive PaTH attention and its gradients, for three cases
(the prefix of the entries): `gqa`, four chunks and two query heads for each key head; `odd`, a
length that the chunk does not divide; `gate`, with a forget gate. float32, because the peer
computes in it whatever it is given.

    q, out, cotangent       (batch, time, query heads, dim)
    k, v, w                 (batch, time, heads, dim), w of unit norm
    beta                    (batch, time, heads), in (0, 2)
    g                       (batch, time, query heads), log of the gate; 0 but in `gate`
    scale, chunk_size       scalars
    grad_q … grad_g         gradients of sum(out * cotangent), shaped as what they are of

`differential_diffllama.npz`: the differential attention of Transformers' DiffLlama, under a causal
mask, without rotation. float64, but the peer computes its softmax and exp(λ) in float32.

    q                       (batch, time, heads=8, dim=8), what q_proj gives; unscaled
    k, v                    (batch, time, key/value heads=4, dim=8), likewise
    scale                   scalar, of the logits
    lam, lambda_init        scalars: λ = exp(λq1·λk1) − exp(λq2·λk2) + lambda_init, its last term
    difference              (batch, time, pairs of heads=4, 2 dim=16), what its group norm is given
    before_o_proj           (batch, time, 64), what o_proj is given: (1 − lambda_init) times the
                            group norm of `difference`, the pairs side by side

Both have `versions`, a string. To run it, in an environment of its own:

    python -m pip install -e '.[peers]' && python tests/peers/make_fixtures.py
"""

import importlib.metadata
import importlib.util
from pathlib import Path

import numpy as np

# torch and transformers are imported where they are used: pytest imports this file to collect it.

HERE = Path(__file__).resolve().parent
MAX_BYTES = 200_000
PATH_CASES = {
    "gqa": {"batch": 1, "time": 64, "query_heads": 4, "heads": 2, "chunk_size": 16, "gate": False},
    "odd": {"batch": 2, "time": 33, "query_heads": 2, "heads": 1, "chunk_size": 16, "gate": False},
    "gate": {"batch": 2, "time": 24, "query_heads": 4, "heads": 2, "chunk_size": 8, "gate": True},
}


def clustered(rng, shape, clusters=4, spread=0.4):
    """Return normal vectors (batch, time, ...) around a few centres, which the times share."""
    centres = rng.normal(size=(clusters, *shape[2:]))
    return centres[rng.integers(clusters, size=shape[:2])] + spread * rng.normal(size=shape)


def path_inputs(rng, batch, time, query_heads, heads, gate, dim=16):
    """Return {name: float32 array} for one case of PaTH."""
    q, cotangent = rng.normal(size=(2, batch, time, query_heads, dim))
    k = clustered(rng, (batch, time, heads, dim))
    v = rng.normal(size=k.shape)
    w = k + 0.5 * rng.normal(size=k.shape)  # near its key, so that H_t changes the logits a lot
    w /= np.linalg.norm(w, axis=-1, keepdims=True)
    beta = rng.uniform(0.05, 1.95, size=k.shape[:3])
    g = np.log(rng.uniform(0.9, 1.0, size=q.shape[:3])) if gate else np.zeros(q.shape[:3])
    # few digits, because they compress
    q, k, v, cotangent = (np.round(16 * x) / 16 for x in (q, k, v, cotangent))
    inputs = {"q": q, "k": k, "v": v, "w": w, "beta": beta, "g": g, "cotangent": cotangent}
    return {name: x.astype(np.float32) for name, x in inputs.items()}


def load_naive_path_attn():
    """Return the peer's reference of PaTH."""
    # By its file, which is plain PyTorch: `import fla.ops` needs triton, which a CPU may not have.
    source = importlib.metadata.distribution("fla-core").locate_file("fla/ops/path_attn/naive.py")
    spec = importlib.util.spec_from_file_location("fla_path_attn_naive", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.naive_path_attn


def path_entries():
    """Return the entries of path_fla.npz, without `versions`."""
    import torch

    naive_path_attn = load_naive_path_attn()
    rng = np.random.default_rng(20260)
    entries = {}
    for case, how in PATH_CASES.items():
        chunk_size = how["chunk_size"]
        arrays = path_inputs(rng, **{n: value for n, value in how.items() if n != "chunk_size"})
        scale = arrays["q"].shape[-1] ** -0.5
        leaves = {
            name: torch.tensor(x, requires_grad=True)
            for name, x in arrays.items()
            if name != "cotangent"
        }
        out = naive_path_attn(**leaves, scale=scale, chunk_size=chunk_size)
        assert out.dtype == torch.float32
        (out * torch.tensor(arrays["cotangent"])).sum().backward()
        arrays["out"] = out.detach().numpy()
        arrays |= {f"grad_{name}": leaf.grad.numpy() for name, leaf in leaves.items()}
        arrays |= {"scale": np.float64(scale), "chunk_size": np.int64(chunk_size)}
        entries |= {f"{case}_{name}": x for name, x in arrays.items()}
    return entries


def differential_entries():
    """Return the entries of differential_diffllama.npz, without `versions`."""
    import torch
    from transformers import DiffLlamaConfig
    from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention

    batch, time = 2, 17
    config = DiffLlamaConfig(
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
        attn_implementation="eager",
    )
    module = DiffLlamaAttention(config, layer_idx=1).double().eval()
    rng = np.random.default_rng(20261)
    hidden = torch.tensor(clustered(rng, (batch, time, config.hidden_size)))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            # logits of a few units, and λ far from lambda_init
            size = 0.5 if name.startswith("lambda") else 1.3 * config.hidden_size**-0.5
            parameter.copy_(torch.tensor(size * rng.normal(size=parameter.shape)))

    # The peer pairs query head h with h + 4. With two query heads for each key head, h reads the
    # key of h // 2 and h + 4 that of h // 2 + 2; both read the values of h // 2 and h // 2 + 2,
    # side by side along the width. Heads are axis 2 of `difference`: pair h is difference[:, :, h].
    given = {}
    for name in ("groupnorm", "o_proj"):
        getattr(module, name).register_forward_pre_hook(
            lambda _module, args, name=name: given.update({name: args[0].numpy().copy()})
        )
    mask = torch.full((1, 1, time, time), -torch.inf, dtype=torch.float64).triu(1)
    ones = torch.ones(batch, time, config.head_dim, dtype=torch.float64)
    with torch.no_grad():
        module(hidden, position_embeddings=(ones, 0 * ones), attention_mask=mask)
        projections = {
            name: getattr(module, f"{name}_proj")(hidden).unflatten(-1, (-1, config.head_dim))
            for name in "qkv"
        }
        exponents = [
            (module.lambda_q1 * module.lambda_k1).sum(dtype=torch.float32),
            (module.lambda_q2 * module.lambda_k2).sum(dtype=torch.float32),
        ]
        lambda_1, lambda_2 = (x.exp().double().item() for x in exponents)
    assert given["groupnorm"].shape == (batch, time, 4, 16)
    return {name: x.numpy() for name, x in projections.items()} | {
        "scale": np.float64(module.scaling),
        "lam": np.float64(lambda_1 - lambda_2 + module.lambda_init),
        "lambda_init": np.float64(module.lambda_init),
        "difference": given["groupnorm"],
        "before_o_proj": given["o_proj"],
    }


def save(name, peer, entries):
    """Write the entries beside this script, with the versions, and print what was written."""
    used = (peer, "torch", "numpy")
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in used)
    assert all(np.isfinite(x).all() for x in entries.values()), f"{name}: not finite"
    path = HERE / name
    np.savez_compressed(path, **entries, versions=np.array(versions))
    size = path.stat().st_size
    print(f"{name}: {size} bytes, {versions}")
    for entry, x in entries.items():
        print(f"    {entry:16} {x.dtype!s:8} {x.shape}")
    assert size < MAX_BYTES, "file too large"


def main():
    """Write both files."""
    save("path_fla.npz", "fla-core", path_entries())
    save("differential_diffllama.npz", "transformers", differential_entries())


if __name__ == "__main__":
    main()
