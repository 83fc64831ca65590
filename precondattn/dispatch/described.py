"""The plan of a call that is described by its sizes, for a device that may be absent."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

from precondattn.algebra.declaration import FIXED, LETTERS
from precondattn.arrays import FLOATING
from precondattn.backend import Request
from precondattn.dispatch.discovery import discover
from precondattn.dispatch.explanation import Explanation
from precondattn.dispatch.plan import uncached_plan

if TYPE_CHECKING:
    from precondattn.algebra.piece import Piece

DEVICES = {
    "numpy": ("cpu",),
    "array_api_strict": ("cpu",),
    "torch": ("cpu", "cuda", "mps", "xpu"),
    "jax": ("cpu", "cuda", "tpu"),
    "cupy": ("cuda",),
}
"""The kinds of devices of each array library; the first one is the default."""

VERBS = ("forward", "vjp", "extend", "extend_vjp")


def explain_described(
    mechanism: Piece,
    library: str,
    dtype: str,
    device: str | None,
    verb: str,
    sizes: Mapping[str, int],
    *,
    backend: tuple[str, ...] | None = None,
) -> Explanation:
    """The plan of a call with these sizes by dimension letter; other sizes have defaults."""
    _check("library", library, tuple(DEVICES))
    _check("dtype", dtype, tuple(sorted(FLOATING)))
    _check("verb", verb, VERBS)
    kinds = DEVICES[library]
    kind, _, number = (device or kinds[0]).partition(":")
    kind = "cuda" if kind in ("gpu", "rocm") else kind
    if kind not in kinds or (number and not number.isdecimal()):
        raise ValueError(f"device of {library} must be {' or '.join(kinds)}; found {device!r}")
    if verb.startswith("extend") and not mechanism.offers.causal:
        raise ValueError(f"{mechanism}: is not causal, so it can not have a cache")
    complete = _complete(sizes)
    declared = mechanism.inputs.extending() if verb.startswith("extend") else mechanism.inputs
    shapes = {name: pattern.shape(complete) for name, pattern in declared.items()}
    declared.sizes(str(mechanism), shapes)
    keeps_tokens = any(pattern.keeps_tokens for _, pattern in mechanism.program.slots.values())
    if verb == "extend_vjp" and keeps_tokens:
        raise ValueError(f"{mechanism}: extend_vjp needs a cache of states; this one stores tokens")
    request = Request(verb, library, kind, dtype, tuple(shapes.items()), frozenset())
    discovered = discover()
    with ExitStack() as stack:
        for each in discovered.backends:
            stack.enter_context(each.describing(kind))
        plan = uncached_plan(mechanism, request, complete["c"] if keeps_tokens else None, backend)
    return Explanation(str(mechanism), mechanism.program, request, plan, discovered)


def _check(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{what} must be one of {', '.join(choices)}; found {value!r}")


def _complete(described: Mapping[str, int]) -> dict[str, int]:
    """The sizes of all letters."""
    for letter, size in described.items():
        if letter not in LETTERS or size < 1:
            raise ValueError(
                f"sizes are 1 or above, by the letters {', '.join(LETTERS)}; found {letter}={size}"
            )
    sizes = {"b": 1, "t": 128, "h": 4, "d": 64, "m": 64, **described}
    for letter, same in (("s", "t"), ("n", "h"), ("u", "h"), ("e", "d"), ("c", "s")):
        sizes.setdefault(letter, sizes[same])
    return {FIXED: 1, **sizes}
