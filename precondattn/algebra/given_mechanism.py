"""What is given in the place of a mechanism, and what to write instead.

That is the name of one, its class, its shorthand, or an attribute that the package has not.
"""

from __future__ import annotations

import re

from precondattn.algebra import registry
from precondattn.algebra.options import OptionValue
from precondattn.algebra.other_names import in_our_spelling, mechanism_elsewhere
from precondattn.algebra.text import nearest, read


def name_given(value: OptionValue) -> str | None:
    """The expression of a mechanism given as an object, text, class or shorthand; or None."""
    if isinstance(value, str):
        return value
    cls = getattr(getattr(value, "__wrapped__", None), "cls", value)
    if isinstance(cls, type):
        name: str | None = getattr(cls, "name", None) if hasattr(cls, "variants") else None
        return name
    return str(value) if hasattr(value, "program") else None


def not_a_mechanism(value: OptionValue) -> TypeError:
    """The error for an argument that is not a mechanism where a layer expects one."""
    expression = name_given(value)
    advice = "" if expression is None else f"; write mechanism={expression!r}"
    return TypeError(f"mechanism must be a text or a mechanism; found {value!r}{advice}")


def around(outer: str, inner: str) -> str:
    """The expression for one mechanism around another, or the reason why it is refused."""
    whole = inner if inner.partition("(")[0] == outer else f"{outer}({inner})"
    try:
        return f"write pa.parse({str(read(whole))!r})"
    except (TypeError, ValueError) as refusal:
        return str(refusal)


def is_around_another(text: str) -> bool:
    """Whether an expression begins with the name of a preconditioner."""
    cls = registry.known(re.split(r"[\[(]", text)[0].strip())
    return cls is not None and cls.role == "preconditioner"


LAYERS = "precondattn.layers.torch", "precondattn.layers.flax"
TRANSFORMERS = ("precondattn.integrations.transformers",)
PARALLEL = "precondattn.parallel.torch", "precondattn.parallel.jax"
PLACES = {
    **dict.fromkeys(("Attention", "Block", "Decoder", "VisionTransformer"), LAYERS),
    **dict.fromkeys(("replace_attention", "PrecondattnConfig"), TRANSFORMERS),
    "PrecondattnForCausalLM": TRANSFORMERS,
    "context_parallel": PARALLEL,
    "check": ("precondattn_conformance",),
}
"""The modules of names that `import precondattn` does not have."""


def attribute_elsewhere(name: str) -> str:
    """The advice for an attribute that the package does not have; empty for unknown names."""
    if name in PLACES:
        return f"; import it from {' or '.join(PLACES[name])}"
    elsewhere = mechanism_elsewhere(name)
    if elsewhere is not None:
        return f"; here it is pa.parse({elsewhere!r})"
    return nearest(in_our_spelling(name), registry.nameable())
