"""Unfolding a mechanism's nested steps into its program, a flat list of leaf calls."""

from __future__ import annotations

from functools import lru_cache

from precondattn.algebra.declaration import ATTENTION_INPUTS
from precondattn.algebra.leaf_protocol import LeafCall, LeafProtocol
from precondattn.algebra.program import Program
from precondattn.algebra.registry import AnyMechanism
from precondattn.limits import KEPT


@lru_cache(maxsize=KEPT)
def program_of(mechanism: AnyMechanism) -> Program:
    """The program of a mechanism: the programs of its steps, concatenated, with unique names."""
    if isinstance(mechanism, LeafProtocol):
        call = LeafCall("out", mechanism, tuple([(name, name) for name in mechanism.inputs]))
        return Program([call], "out", {name: mechanism.meaning(name) for name in mechanism.inputs})
    calls: list[LeafCall] = []
    computed: dict[tuple[LeafProtocol, tuple[tuple[str, str], ...]], str] = {}
    values: dict[str, str] = {}  # The name of a step's output or of an input -> the value's name.
    meanings: dict[str, object] = {}
    outputs: set[str] = set()
    steps = mechanism.steps()
    for step in steps:
        inner, renamed = step.mechanism.program, dict(step.renamed)
        unknown = sorted(set(renamed) - set(inner.inputs))
        if unknown and step.mechanism == mechanism.base:
            raise _without(mechanism, "changes", *unknown)
        if unknown:
            raise TypeError(
                f"{mechanism.name}: a step renames {', '.join(unknown)}, and {step.mechanism} "
                f"takes {', '.join(inner.inputs)}"
            )
        if step.out in outputs:
            raise TypeError(f"{mechanism.name}: two steps are named {step.out!r}")
        value_of = {}  # The step's own name of a value -> its name in the program.
        for name in step.mechanism.inputs:
            outer = renamed.get(name, name)
            if outer not in outputs:
                _declare(mechanism, step.mechanism, name, outer, meanings)
                values.setdefault(outer, outer)
            value_of[name] = values[outer]
        for call in inner.calls:
            arguments = tuple((formal, value_of[value]) for formal, value in call.arguments)
            name = step.out if call.out == inner.out else f"{step.out}.{call.out}"
            if (call.leaf, arguments) not in computed:
                computed[call.leaf, arguments] = name
                calls.append(LeafCall(name, call.leaf, arguments))
            value_of[call.out] = computed[call.leaf, arguments]
        if step.out in meanings:
            raise TypeError(f"{mechanism.name}: {step.out!r} is both a step and an input")
        outputs.add(step.out)
        values[step.out] = value_of[inner.out]
    return Program(calls, values[steps[-1].out], meanings)


def _declare(
    owner: AnyMechanism, piece: AnyMechanism, name: str, outer: str, meanings: dict[str, object]
) -> None:
    """Record that `piece` reads the input `outer` as `name`; raises an error on a contradiction."""
    if outer != name and piece == owner.base and outer in owner.base.inputs:
        raise TypeError(
            f"{owner.name}({owner.base}): {name} would be renamed to {outer}, "
            f"which {owner.base} declares already"
        )
    if outer == name:
        meaning = piece.meaning(name)
        base = owner.base
        if piece != base and meaning == "attention" and name not in base.inputs:
            raise _without(owner, "reads", name)
        is_own_input = piece.role == "piece" and meaning == piece.name
        if is_own_input and name in base.inputs and base.meaning(name) == meaning:
            raise TypeError(
                f"{owner.name}({owner.base}) makes no sense: {name} is an input of {owner.base} "
                f"already, and would be used twice"
            )
    elif piece != owner.base and outer in owner.base.inputs:
        meaning = owner.base.meaning(outer)  # The step is wired to the base's input.
    else:
        meaning = "attention" if outer in ATTENTION_INPUTS else owner.name
    if meanings.setdefault(outer, meaning) != meaning:
        raise TypeError(
            f"{owner.name}({owner.base}): the input {outer!r} would mean two things, "
            f"that of {meanings[outer]} and that of {meaning}"
        )


def _without(owner: AnyMechanism, does: str, *names: str) -> TypeError:
    """The error of a base without the inputs that a preconditioner changes or reads."""
    return TypeError(
        f"{owner.name}({owner.base}) makes no sense: it {does} {', '.join(names)}, and "
        f"{owner.base} takes {', '.join(owner.base.inputs)}"
    )
