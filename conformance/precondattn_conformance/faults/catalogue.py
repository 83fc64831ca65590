"""All faults: every operator on every mechanism to which it applies, and faults written by hand.

They are faults that can not be made by changing one token of code; a tool for mutation testing
makes those. An operator is applied to a leaf, and to variants of it that have a window, a bias or a
gate. Faults between leaves are applied to compositions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache

import precondattn as pa
from precondattn.algebra import registry
from precondattn.algebra.group import Group
from precondattn.algebra.piece import Piece
from precondattn_conformance.faults import (
    anywhere,
    blocks,
    heads,
    masks,
    options,
    saved,
    states,
    wiring,
    written_by_hand,
)
from precondattn_conformance.faults.applicable import Named, stages_of
from precondattn_conformance.faults.fault import STEP_BACKWARD, Fault

Operators = dict[str, Callable[[Piece, str], Named]]

OF_LEAVES: Operators = {
    "segments": masks.segments,
    "validity": masks.validity,
    "option ignored": options.ignored,
    "head map": heads.head_map,
    "placement": masks.placement,
    "gradient": anywhere.gradient,
    "gradient of a state": states.gradient_of_state,
    "update": states.update,
    "meaning": states.meaning,
    "past": states.past,
    "first state": states.first_state,
    "zero times": anywhere.zero_times,
    "saved output": saved.saved_output,
    "result": anywhere.result,
    "memory": anywhere.memory,
}
OF_BLOCKS: Operators = {"residual": blocks.residual, "block tail": blocks.block_tail}
OF_THE_WHOLE: Operators = {
    "wiring": wiring.wiring,
    "shared input": wiring.shared,
    "value between": saved.value_between,
    "gradient": anywhere.gradient,
    "gradient of a state": states.gradient_of_state,
    "update": states.update,
    "result": anywhere.result,
    "memory": anywhere.memory,
}

IN_TURN: dict[str, dict[str, int]] = {
    "leaves": dict.fromkeys(
        (
            *("segments", "validity", "head map", "placement", "update", "gradient of a state"),
            *("saved output", "result", "memory"),
        ),
        1,
    ),
    "blocks": {"block tail": 1},
    "whole": dict.fromkeys(("gradient of a state", "update", "memory"), 1)
    | dict.fromkeys(("wiring", "gradient", "result"), 2),
}
"""The number of faults per method of a mechanism, for operators that act the same on all
mechanisms. Each method gets other faults in turn. Operators that are not listed give every method
all their faults."""

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
"""Compositions for leaves that treat each token alone and so have no state. They contribute to a
state's gradient only in a composition with a stateful leaf."""

OF_EACH_STAGE = 2
"""The smallest number of faults of each mechanism in each of its methods."""


@cache
def faults() -> tuple[Fault, ...]:
    """All faults, with unique names."""
    every = (*_systematic(), *written_by_hand.FAULTS)
    names = Counter(fault.name for fault in every)
    assert max(names.values()) == 1, names.most_common(3)
    return every


def subjects() -> dict[str, tuple[str, ...]]:
    """The subjects of faults: every registered class, and its methods."""
    return {name: _stages(pa.parse(name)) for name in registry.registered()}


def _stages(m: pa.Mechanism) -> tuple[str, ...]:
    stages = stages_of(m)
    return (*stages, STEP_BACKWARD) if m.name in AROUND else stages


def _systematic() -> Iterator[Fault]:
    turns: Counter[str] = Counter()
    for cls in registry.registered().values():
        made: set[tuple[str, ...]] = set()
        for text in (cls.name, *cls.variants):
            m = pa.parse(text)
            for carrier, operators in _operators(m).items():
                for stage in _stages(m):
                    if stage == STEP_BACKWARD and cls.name in AROUND and text != cls.name:
                        continue  # The compositions contain the leaf with its defaults.
                    yield from _of_one(m, cls.name, carrier, stage, operators, made, turns)


def _operators(m: pa.Mechanism) -> dict[str, Operators]:
    """The operators of each carrier that apply to a mechanism."""
    if len(m.program.calls) > 1:
        return {"whole": OF_THE_WHOLE}
    return {"leaves": OF_LEAVES, "blocks": OF_BLOCKS}


def _of_one(
    m: pa.Mechanism,
    subject: str,
    carrier: str,
    stage: str,
    operators: Operators,
    made: set[tuple[str, ...]],
    turns: Counter[str],
) -> Iterator[Fault]:
    mechanism = AROUND[subject] if stage == STEP_BACKWARD and subject in AROUND else str(m)
    if mechanism != str(m):
        # Memory between the leaves of a composition belongs to the core, which no longer needs it.
        operators = {name: make for name, make in operators.items() if name != "memory"}
    # The arrays of a group have other names than those of the composition.
    planted = m if carrier != "whole" else Group(m.program.part(range(len(m.program.calls)))[0])
    for operator, make in operators.items():
        changes = [*make(planted, stage)]
        count = IN_TURN[carrier].get(operator)
        if count is not None and changes:
            if (carrier, stage, operator) in made:
                continue
            made.add((carrier, stage, operator))
            start = turns[operator]
            turns[operator] += count
            chosen = range(start, start + min(count, len(changes)))
            changes = [changes[i % len(changes)] for i in chosen]
        for detail, change in changes:
            key = (carrier, stage, operator, detail)
            if key not in made:
                made.add(key)
                yield Fault(subject, mechanism, (stage,), carrier, operator, detail, change)
