"""Write `paper_models.md`: the models of the papers, and their numbers of parameters.

python docs/make_paper_models.py
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

from paper_models import PAPERS, PaperModel, laser

from precondattn.layers.recipes import CCQ_SIZES
from precondattn.layers.torch import Decoder, VisionTransformer

PAGE = Path(__file__).with_name("paper_models.md")
UNITS = {"M": 10**6, "B": 10**9}

HEAD = """\
# Models of the papers

This page shows how to build the models of the papers' experiments from our [layers](layers.md),
and whether their numbers of parameters agree with those in the papers. Nothing was trained for
this page; for experiments, see the [papers' claims](claims/index.md). Parameters are counted on
the device `meta`, without allocating memory:

```python
>>> from precondattn.layers.torch import Decoder
>>> model = Decoder(
...     32_000, 1024, heads=8, layers=["laser"] * 32, hidden=2048, mlp="plain", device="meta"
... )
>>> f"{sum(p.numel() for p in model.parameters()):,}"
'301,270,016'
```

Our `Decoder` has RMS norms and no biases, and its output layer shares the weights of the
embedding. A paper may use other norms or biases, or not state them, which changes the number by
less than a percent. An output layer that shares no weights adds as many parameters as the
embedding. A number *fits* if ours equals the paper's when it is rounded to as many digits.

The script `docs/make_paper_models.py` generates this page from `docs/paper_models.py`.
"""


@cache
def count(arguments: str) -> int:
    """The number of parameters of the model that such a call makes."""
    made = {
        "Decoder": partial(Decoder, device="meta"),
        "VisionTransformer": partial(VisionTransformer, device="meta"),
        "CCQ_SIZES": CCQ_SIZES,
    }
    model = eval(arguments, made)
    return sum(parameter.numel() for parameter in model.parameters())


def fits(counted: int, stated: str) -> bool:
    """Whether a number of parameters is the stated one, `301M`, when it is rounded like that."""
    number, unit = stated[:-1], UNITS[stated[-1]]
    decimals = len(number.partition(".")[2]) or len(number.rstrip("0")) - len(number)
    return round(counted / unit, decimals) == float(number)


def page() -> str:
    """The page, as Markdown."""
    gated = {
        "gated_small": short(count(laser(32, 1024, 8, 128, 2048, "gated"))),
        "gated_middle": short(count(laser(32, 2048, 8, 512, 8192, "gated"))),
        "gated_large": short(count(laser(32, 3440, 16, 720, 11584, "gated"))),
    }
    parts = [HEAD]
    for paper in PAPERS:
        head = "| model | arguments | parameters | stated |\n|---|---|---:|---|"
        rows = [_row(model) for model in paper.models]
        after = paper.after
        for name, number in gated.items():
            after = after.replace(f"{{{name}}}", number)
        parts.append(f"## {paper.title}\n\n{paper.before}\n" + "\n".join([head, *rows]))
        parts.append(after)
    return "\n\n".join(part.strip() for part in parts) + "\n"


def short(counted: int) -> str:
    """`301M`, `2.21B`."""
    return f"{counted / 1e9:.2f}B" if counted >= 10**9 else f"{counted / 1e6:.0f}M"


def _row(model: PaperModel) -> str:
    counted = count(model.arguments)
    stated = "–"
    if model.stated:
        stated = model.stated + (", fits" if fits(counted, model.stated) else ", **does not fit**")
    return f"| {model.name} | `{model.arguments}` | {counted:,} | {stated} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
