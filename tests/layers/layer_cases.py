"""The mechanisms whose layers are tested: all that an expression can name, and compositions."""

from functools import cache

import precondattn as pa
from precondattn.layers.plan import plan_for
from precondattn.layers.sizes import LayerSizes

COMPOSITIONS = (
    "path[forget=unscaled]",
    "lucid(path)",
    "lucid[beta=true]",
    "differential(laser)",
    "differential[per=token]",
    "differential[paired=q/k/w/beta](path)",
    "ccq(gated_delta)",
    "ccq[covariance=decayed](gla)",
    "bidirectional[combine=concat](gla)",
    "row_normalized(gsa)",
    "hedgehog(gla)",
    "elu1(linear[normalize=true])",
    "qk_norm[gain=true]",
    "softmax[sink=true,window=3]",
    "nystrom[landmarks=3,skip=true]",
    "lucid(softmax[distance=slopes])",
    "softmax[distance=buckets]",
)
MECHANISMS = (*sorted(pa.mechanisms()), *COMPOSITIONS)
CAUSAL = tuple(name for name in MECHANISMS if pa.parse(name).offers.causal)
"""The mechanisms that can have a cache."""

HEADS = 4


@cache
def covering(*first):
    """These mechanisms, and others of `MECHANISMS`, which together have a recipe of every class."""
    classes = {
        expression: {type(entry.recipe) for entry in plan_of(expression).entries}
        for expression in MECHANISMS
    }
    chosen = [*first]
    found = set().union(*(classes[expression] for expression in chosen))
    while missing := set().union(*classes.values()) - found:
        chosen.append(max(classes, key=lambda expression: len(classes[expression] & missing)))
        found |= classes[chosen[-1]]
    return tuple(chosen)


def plan_of(expression):
    return plan_for(expression, LayerSizes(**sizes_for(expression)), None)


def sizes_for(expression):
    """Fewer key/value heads, more value heads, and wider values, where the mechanism has them."""
    inputs = pa.parse(expression).inputs
    # Keys may be made of gates, or there are none.
    keys = next(inputs[name] for name in ("k", "g", "v") if name in inputs)
    of_k, of_v = keys.axes[2].letter, inputs["v"].axes[2].letter
    sizes = {"width": 24, "heads": HEADS, "head_dim": 6, "value_dim": 5}
    if inputs["v"].axes[3].letter == keys.axes[3].letter:
        del sizes["value_dim"]
    if of_k == "n":
        sizes["kv_heads"] = 2
    if of_v == "u" != of_k:
        sizes["value_heads"] = 8
    if "m" in "".join(pattern.letters for pattern in inputs.values()):
        sizes["slots"] = 3
    return sizes


def layer(attention, expression, **options):
    """A layer of that expression with odd sizes."""
    sizes = {**sizes_for(expression), **options}
    return attention(sizes.pop("width"), mechanism=expression, **sizes)
