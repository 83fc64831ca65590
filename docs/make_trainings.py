"""Train the models of three pages, save their losses, draw them, and update the pages' tables.

python docs/make_trainings.py tutorial      train six mechanisms in a language model
python docs/make_trainings.py conversion    convert a trained language model, and train it further
python docs/make_trainings.py encoders      the same for MiniLM, an encoder
python docs/make_trainings.py               only draw what was saved, and update the pages

The text and its batches are those of `train_a_language_model.md`. MiniLM is that of
`conformance/make_minilm.py`, whose packages it needs; converted encoders learn the embeddings that
the original model gives to sentences of this documentation.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from functools import cache
from multiprocessing import get_context
from typing import NamedTuple

import drawing
import numpy as np
from drawing import BLUE, GREEN, INK, ORANGE
from recorded import DOCS, load, save, table, with_measured

TUTORIAL = ("softmax", "lucid", "laser", "gated_delta", "ccq(gated_delta)", "gla")
CONVERTED = ("softmax", "lucid", "laser", "lucid(laser)")
ENCODERS = ("softmax", "temperature[per=head]", "lucid", "laser", "row_normalized", "qk_norm")
UNCHANGED = ENCODERS[:2]
"""The mechanisms that need no training: outputs are those of the original model."""
WIDTH, STEPS, SMOOTH = 64, 448, 8
"""Of the tutorial; a point of its curves is the mean of `SMOOTH` steps."""
BEFORE, FURTHER, BATCH, EVERY = 800, 200, 8, 20
"""Steps before and after a conversion, sentences of a step, and steps between measurements."""


@cache
def tutorial() -> dict:
    """The definitions of `train_a_language_model.md`, before its first training."""
    text = (DOCS / "train_a_language_model.md").read_text(encoding="utf-8")
    names: dict = {}
    for block in re.findall(
        r"^```python\n(.*?)^```", text.partition("\nOnly the mechanism changes")[0], re.S | re.M
    ):
        exec(block, names)
    return names


def commit() -> str:
    """The commit of the text, which has to be that of the files."""
    git = ["git", "-C", str(DOCS)]
    changed = subprocess.check_output([*git, "status", "--porcelain", "../precondattn"], text=True)
    if changed:
        raise SystemExit(f"the text differs from the commit:\n{changed}")
    return subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()


def with_mechanism(mechanism: str) -> dict:
    """Losses, seconds of one core, and a sample, of one mechanism of the tutorial."""
    import torch

    torch.set_num_threads(1)
    page = tutorial()
    model = page["make"](mechanism, WIDTH)
    start = time.process_time()
    losses = page["train"](model, STEPS)
    seconds = time.process_time() - start
    prompt = torch.tensor([[page["number"][c] for c in "def "]])
    generator = torch.Generator().manual_seed(0)
    drawn = model.generate(prompt, 160, temperature=0.8, top_p=0.9, generator=generator)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds_of_one_core": round(seconds, 1),
        "held_out": round(page["test"](model), 3),
        "losses": [round(value, 4) for value in losses],
        "sample": "def " + "".join(page["alphabet"][i] for i in drawn[0].tolist()),
    }


def record_tutorial() -> dict:
    """All mechanisms, two at a time."""
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        runs = dict(zip(TUTORIAL, pool.map(with_mechanism, TUTORIAL), strict=True))
    about = {"cores": os.cpu_count(), "characters": len(tutorial()["text"])}
    return {**about, "width": WIDTH, "steps": STEPS, "runs": runs}


def parts_of_tutorial(saved: dict) -> tuple[str, str]:
    """The table, and what one of the models wrote."""
    rows = [
        (
            f"`{mechanism}`",
            f"{run['parameters']:,}",
            f"{run['held_out']:.2f}",
            f"{run['seconds_of_one_core']:.0f}",
        )
        for mechanism, run in saved["runs"].items()
    ]
    lines = (line.rstrip() for line in saved["runs"]["lucid"]["sample"].split("\n"))
    head = ("mechanism", "parameters", "held-out loss (nats)", "seconds of one core")
    return table(head, rows), "\n".join(["```text", *lines, "```"])


def draw_tutorial(saved: dict, ax) -> None:
    for mechanism, run in saved["runs"].items():
        means = np.reshape(run["losses"], (-1, SMOOTH)).mean(1)
        steps = SMOOTH * (np.arange(len(means)) + 0.5)
        ax.plot(steps, means, label=mechanism, linewidth=1.2)
    ax.set(xlabel="step", ylabel="training loss (nats)")


def record_conversion() -> dict:
    """One model trained with its own softmax; copies of it, converted and trained further."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from precondattn.integrations.transformers import replace_attention

    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=len(tutorial()["alphabet"]),
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    start = time.process_time()
    losses, runs = train_further(model, BEFORE, seed=1), {}
    for mechanism in CONVERTED:
        # The first is a control: the unconverted model, trained for as many further steps.
        copy = replace_attention(deepcopy(model), mechanism)
        runs[mechanism] = train_further(copy, FURTHER, seed=3)
    return {
        "characters": len(tutorial()["text"]),
        "parameters": sum(p.numel() for p in model.parameters()),
        "width": WIDTH,
        "steps": BEFORE,
        "every": EVERY,
        "seconds_of_one_core": round(time.process_time() - start),
        "softmax_at_first": losses,
        "runs": runs,
    }


def train_further(model, steps: int, seed: int) -> list[float]:
    """The held-out loss before the first step, and every so many steps."""
    import torch

    page = tutorial()

    def logits(tokens):
        return model(tokens, use_cache=False).logits

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    losses = [page["test"](logits)]
    for step in range(1, steps + 1):
        value = page["loss"](logits, *page["batch"](page["training"], generator))
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % EVERY == 0:
            losses.append(page["test"](logits))
    return [round(value, 4) for value in losses]


def parts_of_conversion(saved: dict) -> tuple[str]:
    first = f"{saved['softmax_at_first'][-1]:.2f}"
    runs = saved["runs"].items()
    rows = [(f"`{name}`", first, f"{of[0]:.2f}", f"{of[-1]:.2f}") for name, of in runs]
    return (table(("mechanism", "before", "converted", f"after {FURTHER} steps"), rows),)


def draw_conversion(saved: dict, ax) -> None:
    first, every = saved["softmax_at_first"], saved["every"]
    shown = len(first) // 2  # The fast descent before it would hide the rest.
    ax.plot(every * np.arange(len(first))[shown:], first[shown:], color=INK, lw=1.2, label="before")
    for mechanism, losses in saved["runs"].items():
        steps = saved["steps"] + every * np.arange(len(losses))
        style = "--" if "laser" in mechanism else "-"  # They lie on the lines without it.
        ax.plot(steps, losses, style, label=mechanism, linewidth=1.2)
    ax.axvline(saved["steps"], color=INK, linewidth=0.6)
    ax.set(xlabel="step", ylabel="held-out loss (nats)")


def record_encoders() -> dict:
    """The embeddings of sentences by MiniLM, and by copies of it with other mechanisms."""
    import torch
    import transformers
    from make_minilm import TEXT, get_model_path

    from precondattn.integrations.transformers import replace_attention

    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(get_model_path(), local_files_only=True)
    model = transformers.AutoModel.from_pretrained(get_model_path(), local_files_only=True).eval()
    sentences = re.split(r"(?<=\.) ", " ".join(TEXT.split()))
    tokens = tokenizer(sentences, return_tensors="pt", padding="longest")
    mask = tokens["attention_mask"]
    start, runs = time.process_time(), {}
    with torch.no_grad():
        before, states = embeddings(model, tokens)
        batches = list(batches_of_sentences(model, tokenizer))
    for mechanism in ENCODERS:
        converted = replace_attention(deepcopy(model), mechanism)
        with torch.no_grad():
            after, changed = embeddings(converted, tokens)
        difference = (changed - states)[mask.bool()].abs().max() / states[mask.bool()].abs().max()
        change = float(f"{difference.item():.2e}")
        runs[mechanism] = {"largest_change": change, **compared(before, after)}
        if mechanism not in UNCHANGED:
            losses = train_encoder(converted, batches, tokens, before)
            with torch.no_grad():
                after, _ = embeddings(converted, tokens)
            runs[mechanism]["trained"] = {**compared(before, after), "losses": losses}
    return {
        "transformers": transformers.__version__,
        "sentences": len(sentences),
        "tokens": int(mask.sum()),
        "padding": int((mask == 0).sum()),
        "seconds_of_one_core": round(time.process_time() - start, 1),
        "runs": runs,
    }


def embeddings(model, tokens):
    """The means of the hidden states of each sentence, of length 1, and the hidden states."""
    import torch

    states = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * mask).sum(1), dim=-1), states


def compared(before, after) -> dict[str, float]:
    """Embeddings of a converted model with those before; Spearman's rank correlation of cosines."""
    import torch

    cosines = (before * after).sum(-1)
    first, second = torch.triu_indices(len(before), len(before), 1)
    similar = [(x[first] * x[second]).sum(-1) for x in (before, after)]
    ranks = torch.stack([x.argsort().argsort() for x in similar]).double()
    return {
        "mean_cosine": round(cosines.mean().item(), 4),
        "lowest_cosine": round(cosines.min().item(), 4),
        "rank_correlation": round(float(torch.corrcoef(ranks)[0, 1]), 4),
    }


def batches_of_sentences(model, tokenizer):
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


def train_encoder(model, batches, tokens, wanted) -> dict[str, list]:
    """The losses of other sentences every few steps: 1 − the mean cosine with the targets."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    steps, losses = [], []
    for step, (given, target) in enumerate([*batches, (None, None)]):
        if step % EVERY == 0:
            with torch.no_grad():
                found = embeddings(model, tokens)[0]
            steps.append(step)
            losses.append(round(1 - (found * wanted).sum(-1).mean().item(), 5))
        if given is not None:
            loss = 1 - (embeddings(model, given)[0] * target).sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return {"steps": steps, "held_out": losses}


def parts_of_encoders(saved: dict) -> tuple[str]:
    def cells(run):
        cosine = f"{run['mean_cosine']:.2f} ({run['lowest_cosine']:.2f})"
        return cosine, f"{run['rank_correlation']:.2f}"

    rows = [
        (
            f"`{mechanism}`",
            f"{run['largest_change']:.2g}",
            *cells(run),
            *(cells(run["trained"]) if "trained" in run else ("–", "–")),
        )
        for mechanism, run in saved["runs"].items()
    ]
    head = ("mechanism", "largest change of a hidden state", "cosine, mean (lowest)")
    after = ("cosine after training", "rank correlation after training")
    return (table((*head, "rank correlation", *after), rows),)


def draw_encoders(saved: dict, ax) -> None:
    colours = iter((BLUE, GREEN, ORANGE, INK))
    for mechanism, run in saved["runs"].items():
        if "trained" in run:
            losses = run["trained"]["losses"]
            ax.plot(losses["steps"], losses["held_out"], color=next(colours), label=mechanism)
    ax.set(xlabel="steps after the conversion", ylabel="1 − cosine, other sentences", ylim=0)


class Training(NamedTuple):
    """What is trained for a page; `parts` are those between its marks."""

    page: str
    file: str
    figure: str
    mechanisms: tuple[str, ...]
    record: Callable[[], dict]
    parts: Callable[[dict], tuple[str, ...]]
    draw: Callable[[dict, object], None]

    def saved(self) -> dict:
        return load(DOCS / "measurements" / self.file)

    def text(self) -> str:
        return with_measured(DOCS / self.page, *self.parts(self.saved()))

    def drawn(self):
        figure, (ax,) = drawing.panels(1, height=2.8)
        self.draw(self.saved(), ax)
        ax.legend()
        return figure


TRAININGS = {
    "tutorial": Training(
        "train_a_language_model.md", "tutorial/losses.json", "tutorial", TUTORIAL,
        record_tutorial, parts_of_tutorial, draw_tutorial,
    ),
    "conversion": Training(
        "transformers.md", "conversion/losses.json", "conversion", CONVERTED,
        record_conversion, parts_of_conversion, draw_conversion,
    ),
    "encoders": Training(
        "transformers_encoders.md", "conversion/encoders.json", "conversion_encoders", ENCODERS,
        record_encoders, parts_of_encoders, draw_encoders,
    ),
}  # fmt: skip


if __name__ == "__main__":
    import torch

    for name in sys.argv[1:]:
        about = {"torch": torch.__version__, "commit": commit()}
        file = DOCS / "measurements" / TRAININGS[name].file
        save(file, {**about, **TRAININGS[name].record()})
    for each in TRAININGS.values():
        drawing.save(each.figure, each.drawn)
        (DOCS / each.page).write_text(each.text(), encoding="utf-8")
