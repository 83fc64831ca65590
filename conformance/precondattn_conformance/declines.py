"""Parts of the suite that a backend declines on purpose: `Backend.declines`, or `--declines`.

    class Solve(pa.Backend):
        declines = ("float64: kernels of half precision", "extend lucid_solve: has no step")

    --declines "float64: kernels of half precision"

A part of the suite is named by words: a check, a dtype, a library, a mask, a verb, `grouped_heads`,
or the name at the beginning of an expression. It consists of the cases to which all these words
apply. `enough.py` does not require these cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from precondattn.algebra import registry
from precondattn_conformance.checks import CHECKS
from precondattn_conformance.expectations import name_of
from precondattn_conformance.libraries import ALL, HALF, WIDE
from precondattn_conformance.masks import OF_PAIRS
from precondattn_conformance.runner import Outcome

MASKS = ("lengths", "key_mask", "segment_ids", *OF_PAIRS)
VERBS = ("vjp", "extend", "extend_vjp")
GROUPED = "grouped_heads"
LIBRARIES = tuple(library.name for library in ALL)
WORDS = (*CHECKS, *WIDE, *HALF, *LIBRARIES, *MASKS, *VERBS, GROUPED)
"""The words that are not names of mechanisms."""
EXAMPLE = '"float64: kernels of half precision"'


def declared(texts: Iterable[str]) -> dict[str, str]:
    """The declared reasons by part, from texts "part: why".

    Raises
    ------
    TypeError
        if there is one text in place of several.
    ValueError
        if a text has no reason, or the suite does not know a word of its part.
    """
    if isinstance(texts, str):
        raise TypeError(f"declines: several texts expected, as in ({texts!r},); found one")
    words = {*WORDS, *registry.registered()}
    parts: dict[str, str] = {}
    for text in texts:
        part, _, reason = (each.strip() for each in text.partition(":"))
        if not part or not reason:
            raise ValueError(f'declines: "PART: WHY" expected, such as {EXAMPLE}; found {text!r}')
        wrong = [word for word in part.split() if word not in words]
        if wrong:
            raise ValueError(
                f"declines {part!r}: the suite has no part {wrong[0]!r}; there are "
                f"{', '.join(WORDS)}, and the names of mechanisms"
            )
        parts[part] = reason
    return parts


def reason_for(outcome: Outcome, parts: Mapping[str, str]) -> str | None:
    """The declared reason for which this case may be declined, or None."""
    words = _words(outcome)
    if words & {*OF_PAIRS}:
        return "masks of pairs are optional: a backend that supports them declares masks_pairs"
    return next((reason for part, reason in parts.items() if words >= {*part.split()}), None)


def _words(outcome: Outcome) -> set[str]:
    """All words that apply to a declined case."""
    case = outcome.case
    words = {case.check, case.dtype, case.library, name_of(case.mechanism), outcome.verb}
    words |= {mask for mask in MASKS if case.layout.has(mask)}
    if outcome.verb == "extend_vjp":
        words |= {"extend", "vjp"}
    if case.layout.h != case.layout.n:
        words.add(GROUPED)
    return words
