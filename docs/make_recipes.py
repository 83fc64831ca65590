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

A recipe is the equation by which an [attention layer](layers.md) computes an input of its mechanism
from the hidden states x, with weights W. There is a table for each piece of a mechanism that reads
inputs. The tables apply to all compositions: an input has the recipe of the piece that reads it,
under the name that it has there. For example, k of `ccq(gated_delta)` has the same recipe as k of
`gated_delta`, because the piece `gated_delta` reads it as k in both mechanisms.

In the equations, σ is the sigmoid, SiLU(x) = x σ(x), L2(x) divides a row by its length, conv is a
causal convolution of each channel, and γ is a gain. A and B are low-rank factors. The row `out` is
the recipe for the output o of the mechanism, which is applied before the last projection; without
this row, o is not changed. Some rows are not inputs but intermediate results that other recipes
read, such as `x` and `dt` of `ssd`.

`docs/make_recipes.py` generates this page from the declarations of the recipes.
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
