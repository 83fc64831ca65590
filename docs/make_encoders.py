"""Convert MiniLM, a trained encoder, to other mechanisms, and put what changes on the page.

python docs/make_encoders.py           convert, save, and update the page
python docs/make_encoders.py --draw    update the page from what was saved

The model is that of `conformance/make_minilm.py`, whose packages this needs, and the sentences are
those of its passage.
"""

from __future__ import annotations

import re
import sys
import time
from copy import deepcopy
from pathlib import Path
from textwrap import fill
from typing import Any

from recorded import load, save, with_measured

DOCS = Path(__file__).parent
PAGE = DOCS / "transformers_encoders.md"
RECORD = DOCS / "measurements" / "conversion" / "encoders.json"

MECHANISMS = ("softmax", "temperature[per=head]", "lucid", "laser", "row_normalized", "qk_norm")
LINE = 110


def record() -> dict[str, Any]:
    """The embeddings of sentences by MiniLM, and by copies of it with other mechanisms."""
    import torch
    import transformers
    from make_minilm import TEXT, get_model_path
    from make_tutorial import commit

    from precondattn.integrations.transformers import replace_attention

    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(get_model_path(), local_files_only=True)
    model = transformers.AutoModel.from_pretrained(get_model_path(), local_files_only=True).eval()
    sentences = re.split(r"(?<=\.) ", " ".join(TEXT.split()))
    tokens = tokenizer(sentences, return_tensors="pt", padding="longest")
    mask = tokens["attention_mask"]
    start = time.process_time()
    before, states = embeddings(model, tokens)
    runs = {}
    for mechanism in MECHANISMS:
        after, changed = embeddings(replace_attention(deepcopy(model), mechanism), tokens)
        difference = (changed - states)[mask.bool()].abs().max() / states[mask.bool()].abs().max()
        cosines = (before * after).sum(-1)
        runs[mechanism] = {
            "largest_change": float(f"{difference.item():.2e}"),
            "mean_cosine": round(cosines.mean().item(), 4),
            "lowest_cosine": round(cosines.min().item(), 4),
            "rank_correlation": round(correlation(similarities(before), similarities(after)), 4),
        }
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit(),
        "sentences": len(sentences),
        "tokens": int(mask.sum()),
        "padding": int((mask == 0).sum()),
        "seconds_of_one_core": round(time.process_time() - start, 1),
        "runs": runs,
    }


def embeddings(model: Any, tokens: Any) -> tuple[Any, Any]:
    """The means of the hidden states of each sentence, of length 1, and the hidden states."""
    import torch

    with torch.no_grad():
        states = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * mask).sum(1), dim=-1), states


def similarities(rows: Any) -> Any:
    """The cosines of all pairs of sentences."""
    import torch

    first, second = torch.triu_indices(len(rows), len(rows), 1)
    return (rows[first] * rows[second]).sum(-1)


def correlation(x: Any, y: Any) -> float:
    """Spearman's rank correlation."""
    import torch

    ranks = torch.stack([x.argsort().argsort(), y.argsort().argsort()]).double()
    return float(torch.corrcoef(ranks)[0, 1])


def measured(saved: dict[str, Any]) -> str:
    """What the page says about the saved run."""
    about = (
        f"MiniLM (all-MiniLM-L6-v2: six layers, twelve heads of width 32) was converted without "
        f"any training. {saved['sentences']} sentences are one batch with "
        f"{saved['tokens']} tokens and {saved['padding']} of padding. The embedding of a sentence "
        f"is the mean of its hidden states, of length 1. The change of hidden states is "
        f"relative to the largest one. The last column is Spearman's correlation between the "
        f"similarities of all pairs of sentences, before and after. A temperature begins at 1, and "
        f"so changes nothing. The figures say how much a model has to be trained again, and rank "
        f"nothing. `python docs/make_encoders.py` repeats them."
    )
    lines = [
        fill(about, LINE, break_long_words=False),
        "",
        "| mechanism | largest change of a hidden state | cosine of an embedding with the one "
        "before, mean (lowest) | rank correlation of similarities |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| `{mechanism}` | {run['largest_change']:.2g} | {run['mean_cosine']:.2f} "
        f"({run['lowest_cosine']:.2f}) | {run['rank_correlation']:.2f} |"
        for mechanism, run in saved["runs"].items()
    ]
    return "\n".join(lines)


def page(saved: dict[str, Any]) -> str:
    """The page, with the saved run."""
    return with_measured(PAGE, measured(saved))


if __name__ == "__main__":
    if "--draw" not in sys.argv:
        save(RECORD, record())
    PAGE.write_text(page(load(RECORD)), encoding="utf-8")
