"""Convert MiniLM, a trained encoder, to other mechanisms, train it further, and show what changes.

python docs/make_encoders.py           convert, train, save, draw, and update the page
python docs/make_encoders.py --draw    draw what was saved, and update the page

The model is that of `conformance/make_minilm.py`, whose packages this needs. The sentences that are
compared are those of its passage. Converted models are trained on sentences of this documentation,
to reproduce the embeddings of the original model.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from textwrap import fill
from typing import Any

from recorded import captioned, falls, load, save, with_measured

DOCS = Path(__file__).parent
PAGE = DOCS / "transformers_encoders.md"
RECORD = DOCS / "measurements" / "conversion" / "encoders.json"
FIGURE = DOCS / "figures" / "conversion_encoders.svg"

MECHANISMS = ("softmax", "temperature[per=head]", "lucid", "laser", "row_normalized", "qk_norm")
UNCHANGED = MECHANISMS[:2]
"""The mechanisms that need no training: outputs are those of the original model."""
FURTHER, BATCH, EVERY = 200, 8, 20
"""Steps, sentences of a step, and steps between two measurements."""
RATE = 1e-4
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
    with torch.no_grad():
        before, states = embeddings(model, tokens)
        batches = list(batches_for_training(model, tokenizer))
    runs = {}
    for mechanism in MECHANISMS:
        converted = replace_attention(deepcopy(model), mechanism)
        with torch.no_grad():
            after, changed = embeddings(converted, tokens)
        difference = (changed - states)[mask.bool()].abs().max() / states[mask.bool()].abs().max()
        runs[mechanism] = {
            "largest_change": float(f"{difference.item():.2e}"),
            **compared(before, after),
        }
        if mechanism not in UNCHANGED:
            losses = train(converted, batches, tokens, before)
            with torch.no_grad():
                after, _ = embeddings(converted, tokens)
            runs[mechanism]["trained"] = {**compared(before, after), "losses": losses}
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


def compared(before: Any, after: Any) -> dict[str, float]:
    """Embeddings of a converted model with those before."""
    cosines = (before * after).sum(-1)
    return {
        "mean_cosine": round(cosines.mean().item(), 4),
        "lowest_cosine": round(cosines.min().item(), 4),
        "rank_correlation": round(correlation(similarities(before), similarities(after)), 4),
    }


def batches_for_training(model: Any, tokenizer: Any) -> Iterator[tuple[Any, Any]]:
    """Sentences of the documentation's prose, and the embeddings that the model gives them."""
    import torch

    text = " ".join(
        paragraph
        for page in sorted(DOCS.glob("*.md"))
        for paragraph in page.read_text(encoding="utf-8").split("\n\n")
        if re.match(r"[A-Z]", paragraph) and not re.search(r"[|`$]{2}|^#", paragraph)
    )
    found = [s for s in re.split(r"(?<=\.) ", " ".join(text.split())) if 5 <= len(s.split()) <= 30]
    order = torch.Generator().manual_seed(0)
    for _ in range(FURTHER):
        chosen = torch.randint(len(found), (BATCH,), generator=order)
        tokens = tokenizer([found[i] for i in chosen], return_tensors="pt", padding="longest")
        yield tokens, embeddings(model, tokens)[0]


def train(model: Any, batches: list[Any], tokens: Any, wanted: Any) -> dict[str, list[float]]:
    """The losses of other sentences every few steps: 1 − the mean cosine with the targets."""
    import torch
    from rich.progress import track

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    steps, losses = [], []
    for step, (given, target) in enumerate(track([*batches, (None, None)], "Training")):
        if step % EVERY == 0:
            with torch.no_grad():
                found = embeddings(model, tokens)[0]
            steps.append(step)
            losses.append(round(1 - (found * wanted).sum(-1).mean().item(), 5))
        if given is None:
            break
        loss = 1 - (embeddings(model, given)[0] * target).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"steps": steps, "held_out": losses}


def embeddings(model: Any, tokens: Any) -> tuple[Any, Any]:
    """The means of the hidden states of each sentence, of length 1, and the hidden states."""
    import torch

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
    """The part of the page that describes the saved run."""
    about = (
        f"MiniLM (all-MiniLM-L6-v2: six layers, twelve heads of width 32) was converted, and then "
        f"trained for {FURTHER} more steps. The table compares {saved['sentences']} sentences, in "
        f"one batch with {saved['tokens']} tokens and {saved['padding']} padding tokens. The "
        f"embedding of a sentence is the mean of its hidden states, normalised to length 1. The "
        f"change of hidden states is relative to the largest hidden state. The rank correlation is "
        f"Spearman's, between the similarities of all pairs of sentences before and after the "
        f"conversion. `temperature` begins at 1, so at first it changes nothing. Further training "
        f"teaches the converted model to reproduce the original embeddings. Each step has {BATCH} "
        f"sentences of this documentation, and the optimizer is AdamW with learning rate {RATE:g}. "
        f"The loss is 1 minus the mean cosine with the original embeddings. The figure shows the "
        f"loss on the compared sentences, which are not used for training. One training run is not "
        f"enough to rank mechanisms. The whole run took {saved['seconds_of_one_core']:.0f} s of "
        f"CPU time; `python docs/make_encoders.py` repeats it."
    )
    lines = [
        fill(about, LINE, break_long_words=False),
        "",
        "| mechanism | largest change of a hidden state | cosine with the original embedding, mean "
        "(lowest) | rank correlation of similarities | cosine after training, mean (lowest) | rank "
        "correlation after training |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for mechanism, run in saved["runs"].items():
        trained = shown(run["trained"]) if "trained" in run else "– | –"
        change = f"{run['largest_change']:.2g}"
        lines.append(f"| `{mechanism}` | {change} | {shown(run)} | {trained} |")
    losses = {
        mechanism: run["trained"]["losses"]["held_out"]
        for mechanism, run in saved["runs"].items()
        if "trained" in run
    }
    drawn = captioned(
        "figures/conversion_encoders.svg",
        f"Further training brings the embeddings of other sentences nearer to the original ones: 1 "
        f"minus their cosine falls from {falls(losses)}, most of it in the first 20 steps.",
    )
    return "\n".join([*lines, "", drawn])


def shown(run: dict[str, Any]) -> str:
    """Two cells of the table."""
    return f"{run['mean_cosine']:.2f} ({run['lowest_cosine']:.2f}) | {run['rank_correlation']:.2f}"


def draw(saved: dict[str, Any]) -> None:
    """The losses of every converted model."""
    import matplotlib as mpl
    from make_figures import BLUE, GREEN, INK, ORANGE, STYLE, panels

    with mpl.rc_context(STYLE):
        figure, (ax,) = panels(1, height=2.8)
        colours = iter((BLUE, GREEN, ORANGE, INK))
        for mechanism, run in saved["runs"].items():
            if "trained" in run:
                losses = run["trained"]["losses"]
                ax.plot(losses["steps"], losses["held_out"], color=next(colours), label=mechanism)
        ax.set(xlabel="steps after the conversion", ylabel="1 − cosine, other sentences", ylim=0)
        ax.legend()
        figure.savefig(FIGURE, metadata={"Date": None})


def page(saved: dict[str, Any]) -> str:
    """The page, with the saved run."""
    return with_measured(PAGE, measured(saved))


if __name__ == "__main__":
    if "--draw" not in sys.argv:
        save(RECORD, record())
    draw(load(RECORD))
    PAGE.write_text(page(load(RECORD)), encoding="utf-8")
