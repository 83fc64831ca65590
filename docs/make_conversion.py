"""Convert a trained model to other mechanisms, train it further, save the losses, and draw them.

python docs/make_conversion.py           train, convert, save, draw, and update the page
python docs/make_conversion.py --draw    draw what was saved, and update the page

The text and its batches are those of `train_a_language_model.md`.
"""

from __future__ import annotations

import time
from copy import deepcopy
from pathlib import Path
from textwrap import fill
from typing import Any

from recorded import captioned, falls, shown, with_measured

DOCS = Path(__file__).parent
PAGE = DOCS / "transformers.md"
RECORD = DOCS / "measurements" / "conversion" / "losses.json"
FIGURE = DOCS / "figures" / "conversion.svg"

MECHANISMS = ("softmax", "lucid", "laser", "lucid(laser)")
WIDTH, STEPS, FURTHER = 64, 800, 200
EVERY = 20
"""Steps between two measurements of the held-out loss."""
RATE = 1e-3
LINE = 110


def record() -> dict[str, Any]:
    """One model trained with its own softmax; copies of it, converted and trained further."""
    import torch
    from make_tutorial import commit, functions
    from transformers import LlamaConfig, LlamaForCausalLM

    from precondattn.integrations.transformers import replace_attention

    torch.set_num_threads(1)
    page = functions()
    config = LlamaConfig(
        vocab_size=len(page["alphabet"]),
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    start = time.process_time()
    losses = train(page, model, STEPS, seed=1)
    runs = {}
    for mechanism in MECHANISMS:
        # The first is a control: the unconverted model, trained for as many further steps.
        copy = replace_attention(deepcopy(model), mechanism)
        runs[mechanism] = train(page, copy, FURTHER, seed=3)
    return {
        "torch": torch.__version__,
        "commit": commit(),
        "characters": len(page["text"]),
        "parameters": sum(p.numel() for p in model.parameters()),
        "width": WIDTH,
        "steps": STEPS,
        "every": EVERY,
        "seconds_of_one_core": round(time.process_time() - start),
        "softmax_at_first": losses,
        "runs": runs,
    }


def train(page: dict[str, Any], model: Any, steps: int, seed: int) -> list[float]:
    """The held-out loss before the first step, and every so many steps."""
    import torch

    def logits(tokens: Any) -> Any:
        return model(tokens, use_cache=False).logits

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
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


def measured(saved: dict[str, Any]) -> str:
    """The part of the page that describes the saved run."""
    about = (
        f"A Llama of four layers and {saved['parameters']:,} parameters was trained for "
        f"{saved['steps']} steps with softmax attention, on the text of the [tutorial]"
        f"(train_a_language_model.md). Copies of the model were converted and trained for "
        f"{FURTHER} more steps; the copy with `softmax` is the control. LUCID raises the loss at "
        f"first, and further training removes most of the difference; LASER changes it little. "
        f"Losses are measured on held-out text, in nats per character. One seed and one small "
        f"model are not enough to rank mechanisms. The whole run took "
        f"{saved['seconds_of_one_core']} s of CPU time; `python docs/make_conversion.py` "
        f"repeats it."
    )
    before = saved["softmax_at_first"][-1]
    finding = (
        f"The held-out loss is {before:.2f} before the conversion. With further training it falls "
        f"from {falls(saved['runs'])}."
    )
    lines = [
        captioned("figures/conversion.svg", finding),
        "",
        fill(about, LINE, break_long_words=False),
        "",
        f"| mechanism | before | converted | after {FURTHER} steps |",
        "|---|---:|---:|---:|",
    ]
    for mechanism, losses in saved["runs"].items():
        lines.append(f"| `{mechanism}` | {before:.2f} | {losses[0]:.2f} | {losses[-1]:.2f} |")
    return "\n".join(lines)


def page(saved: dict[str, Any]) -> str:
    """The page, with the saved run."""
    return with_measured(PAGE, measured(saved))


def draw(saved: dict[str, Any]) -> None:
    """The loss of the model, and one curve for each conversion."""
    import matplotlib as mpl
    import numpy as np
    from make_figures import INK, STYLE, panels

    first, every = saved["softmax_at_first"], saved["every"]
    with mpl.rc_context(STYLE):
        figure, (ax,) = panels(1, height=2.8)
        shown = len(first) // 2  # The fast descent before it would hide the rest.
        steps = every * np.arange(len(first))
        ax.plot(steps[shown:], first[shown:], color=INK, linewidth=1.2, label="before")
        colours = mpl.color_sequences["tab10"]
        for colour, (mechanism, losses) in zip(colours, saved["runs"].items(), strict=False):
            steps = saved["steps"] + every * np.arange(len(losses))
            style = "--" if "laser" in mechanism else "-"  # They lie on the lines without it.
            ax.plot(steps, losses, style, label=mechanism, color=colour, linewidth=1.2)
        ax.axvline(saved["steps"], color=INK, linewidth=0.6)
        ax.set(xlabel="step", ylabel="held-out loss (nats)")
        ax.legend()
        figure.savefig(FIGURE, metadata={"Date": None})


if __name__ == "__main__":
    shown(RECORD, record, draw, PAGE, page)
