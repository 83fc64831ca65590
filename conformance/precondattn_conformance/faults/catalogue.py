"""All faults: every operator on everything that it applies to, and those written by hand.

An operator is tried on a leaf, and on its variants for what the leaf's own defaults do not have: a
window, a bias, a gate. What all leaves of a mechanism do together is tried on compositions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache

import precondattn as pa
from precondattn.algebra import registry
from precondattn.algebra.group import Group
from precondattn_conformance.faults import (
    gradients,
    heads,
    masks,
    options,
    saved,
    states,
    tails,
    tokens,
    wiring,
    written_by_hand,
)
from precondattn_conformance.faults.anywhere import anywhere, result
from precondattn_conformance.faults.applicable import Named, stages_of
from precondattn_conformance.faults.fault import STEP_BACKWARD, Fault

Operators = dict[str, Callable[[pa.Mechanism, str], Named]]

OF_LEAVES: Operators = {
    **masks.OPERATORS,
    **options.OPERATORS,
    **heads.OPERATORS,
    **tokens.OPERATORS,
    **gradients.OPERATORS,
    **states.OPERATORS,
    "saved output": saved.saved_output,
    "anywhere": anywhere,
}
OF_BLOCKS: Operators = {
    "mask offset": masks.mask_offset,
    "segments": masks.segments,
    "residual": saved.residual,
    **tails.OPERATORS,
}
OF_THE_WHOLE: Operators = {
    **wiring.OPERATORS,
    "value between": saved.value_between,
    **gradients.OPERATORS,
    "update": states.update,
    "anywhere": anywhere,
}

IN_TURN: dict[str, dict[str, int]] = {
    "leaves": {
        "mask offset": 1,
        "segments": 1,
        "validity": 1,
        "scale": 1,
        "head map": 1,
        "placement": 1,
        "update": 1,
        "gradient of a state": 1,
        "saved output": 1,
        "anywhere": 2,
    },
    "blocks": {"mask offset": 1, "segments": 1, "block tail": 1},
    "whole": {
        "wiring": 2,
        "gradient": 2,
        "gradient of a state": 1,
        "update": 1,
        "anywhere": 3,
    },
}
"""Operators of which each method of a mechanism has so many, the next in turn: what they do does
not differ from one mechanism to the other. Of the others each has all."""

AROUND = {
    "tempered": "temperature(linear)",
    "scaled_dims": "per_dim_scale(linear)",
    "rms_norm": "qk_norm(linear)",
    "l2_norm": "qk_norm[norm=l2](linear)",
    "layer_norm": "qk_norm[norm=layer](linear)",
    "elu_plus_one": "elu1(linear)",
    "hedgehog_map": "hedgehog(linear)",
    "unit_rows": "row_normalized(linear)",
    "difference": "differential(linear)",
}
"""A leaf that treats each token alone has no state, and takes part in the gradient of one only
where another has: in these."""

MINIMUM = 120
"""Faults in all."""

OF_EACH_STAGE = 3
"""Faults of each mechanism in each method that it has."""


@cache
def faults() -> tuple[Fault, ...]:
    """All of them, under names that are all different."""
    found = [*_systematic(), *written_by_hand.faults()]
    names = Counter(fault.name for fault in found)
    assert max(names.values()) == 1, names.most_common(3)
    return tuple(found)


def subjects() -> dict[str, tuple[str, ...]]:
    """What has to be tested: every registered class, and the methods that it has."""
    return {name: _stages(pa.parse(name)) for name in registry.registered()}


def _stages(m: pa.Mechanism) -> tuple[str, ...]:
    found = stages_of(m)
    return (*found, STEP_BACKWARD) if m.name in AROUND else found


def _systematic() -> Iterator[Fault]:
    turns: Counter[str] = Counter()
    for cls in registry.registered().values():
        known: set[tuple[str, ...]] = set()
        for text in (cls.name, *cls.variants):
            m = pa.parse(text)
            for carrier, operators in _operators(m).items():
                for stage in _stages(m):
                    if stage == STEP_BACKWARD and cls.name in AROUND and text != cls.name:
                        continue  # The compositions have the defaults in them.
                    yield from _of_one(m, cls.name, carrier, stage, operators, known, turns)


def _operators(m: pa.Mechanism) -> dict[str, Operators]:
    """By carrier."""
    if len(m.program.calls) > 1:
        return {"whole": OF_THE_WHOLE}
    return {"leaves": OF_LEAVES, "blocks": OF_BLOCKS}


def _of_one(
    m: pa.Mechanism,
    subject: str,
    carrier: str,
    stage: str,
    operators: Operators,
    known: set[tuple[str, ...]],
    turns: Counter[str],
) -> Iterator[Fault]:
    mechanism = AROUND[subject] if stage == STEP_BACKWARD and subject in AROUND else str(m)
    if mechanism != str(m) and "anywhere" in operators:
        # What is between the leaves of a composition belongs to the core, which has done with it.
        operators = {**operators, "anywhere": result}
    # A group's values have names of their own, whatever they were called in the composition.
    own = m if carrier != "whole" else Group(m.program.part(range(len(m.program.calls)))[0])
    for operator, make in operators.items():
        found = [*make(own, stage)]
        count = IN_TURN[carrier].get(operator)
        if count is not None and found:
            if (carrier, stage, operator) in known:
                continue
            known.add((carrier, stage, operator))
            first = turns[operator]
            turns[operator] += count
            found = [found[i % len(found)] for i in range(first, first + min(count, len(found)))]
        for detail, change in found:
            key = (carrier, stage, operator, detail)
            if key not in known:
                known.add(key)
                yield Fault(subject, mechanism, (stage,), carrier, operator, detail, change)
