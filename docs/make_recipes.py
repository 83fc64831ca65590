"""Write `recipes.md`: how a layer makes each input of each mechanism.

python docs/make_recipes.py
"""

from __future__ import annotations

from pathlib import Path

from precondattn.layers.recipe import Recipe
from precondattn.layers.recipes.published import PUBLISHED

PAGE = Path(__file__).with_name("recipes.md")

HEAD = """\
# Recipes

How an [attention layer](layers.md) makes each input of its mechanism from the hidden states x, with
weights W. A recipe is found by what an input means: by the piece that reads it, and that piece's
name of it. So these tables serve all compositions: k of `ccq(gated_delta)` and of `gated_delta` are
made in the same way, because both reach the delta rule as k.

σ is the sigmoid, SiLU(x) = x σ(x), L2(x) a row of length 1, conv a causal convolution of each
channel, γ a gain, W with other names (A, B) low-rank factors. `out` is what happens to the output o
of the mechanism before the last projection; without one, nothing. Names that are no inputs, `x` and
`dt` of `ssd`, are helpers that other recipes read.

This page is generated from the declarations by `docs/make_recipes.py`.
"""


def page() -> str:
    """The page, as Markdown."""
    parts = [HEAD]
    for leaf, recipes in PUBLISHED.items():
        lines = [f"## `{leaf}`", "", "| input | recipe | equation | source |", "|---|---|---|---|"]
        for name, recipe in recipes.items():
            own, _, like = name.partition("/")
            shown = f"`{own}`" + (f", shaped as `{like}`" if like else "")
            cells = (shown, f"`{recipe!r}`", _in_table(recipe.equation), _source(recipe))
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _source(recipe: Recipe) -> str:
    return _in_table(recipe.source) or "–"


def _in_table(text: str) -> str:
    return text.replace("|", "\\|").replace("_", "\\_").replace("^", "\\^").replace("*", "\\*")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
