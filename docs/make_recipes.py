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
from the hidden states x, with weights W. `docs/make_recipes.py` generates this page from the
declarations of the recipes.

## Inputs

There is a row for each piece of a mechanism that reads inputs. The rows apply to all compositions:
an input has the recipe of the piece that reads it, under the name that it has there. For example, k
of `ccq(gated_delta)` has the same recipe as k of `gated_delta`, because the piece `gated_delta`
reads it as k in both mechanisms.

`out` is the recipe for the output o of the mechanism, which is applied before the last projection;
without it, o is not changed. Some names are not inputs but intermediate results that other recipes
read, such as `x` and `dt` of `ssd`.

"""

EQUATIONS = """
## Equations

σ is the sigmoid, SiLU(x) = x σ(x), L2(x) divides a row by its length, conv is a causal convolution
of each channel, and γ is a gain. A and B are low-rank factors.

"""


def page() -> str:
    """The page, as Markdown."""
    inputs = ["| mechanism | recipes of its inputs |", "|---|---|"]
    recipes: dict[str, Recipe] = {}
    for leaf, of_leaf in PUBLISHED.items():
        names: dict[str, list[str]] = {}
        for name, recipe in of_leaf.items():
            alone, _, like = name.partition("/")
            shown = f"`{alone}`" + (f" (shaped as `{like}`)" if like else "")
            names.setdefault(repr(recipe), []).append(shown)
            recipes[repr(recipe)] = recipe
        texts = [f"{', '.join(shown)}: `{text}`" for text, shown in names.items()]
        inputs.append(f"| `{leaf}` | {'; '.join(texts)} |")
    equations = ["| recipe | equation | source |", "|---|---|---|"]
    for text, recipe in sorted(recipes.items()):
        equations.append(f"| `{text}` | {_in_table(recipe.equation)} | {_source(recipe)} |")
    return HEAD + "\n".join(inputs) + "\n" + EQUATIONS + "\n".join(equations) + "\n"


def _source(recipe: Recipe) -> str:
    return _in_table(recipe.source) or "–"


def _in_table(text: str) -> str:
    return text.replace("|", "\\|").replace("_", "\\_").replace("^", "\\^").replace("*", "\\*")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
