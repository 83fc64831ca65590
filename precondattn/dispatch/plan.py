"""Plans: which backend runs which calls of a program, and why not the others.

Among all groups of calls that could be done in one go, larger ones are offered first, each to the
backends in their order of preference; what nobody else takes, the reference takes, a leaf at a
time. A plan is made from shapes, dtypes and the like, never from values, and is kept.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

from precondattn.algebra.declaration import Pattern
from precondattn.algebra.group import Group
from precondattn.algebra.program import Program
from precondattn.arrays import Shape
from precondattn.backend import (
    Backend,
    PassedOverWarning,
    Request,
    Support,
    UnsupportedError,
)
from precondattn.dispatch.discovery import REFERENCE, Discovered, discover

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Mechanism

LARGEST_SEARCH = 8
"""Longer programs are searched for neighbouring calls only, not for every subset."""


Names = dict[str, str]
"""Values by a piece's names of them, or the other way round."""


class PlannedCall(NamedTuple):
    """A leaf or a group, its backend, and the names of its values in the whole program."""

    out: str
    piece: Any
    arguments: tuple[tuple[str, str], ...]
    """(the piece's name of an input, the name of the value)."""
    buffers: tuple[tuple[str, str], ...]
    """(the piece's name of a cache buffer, the buffer's name in the store)."""
    backend: Backend
    support: Support


class Considered(NamedTuple):
    """One question that was asked, and its answer."""

    calls: frozenset[int]
    backend: str
    support: Support


class Plan(NamedTuple):
    """What runs, in order."""

    calls: tuple[PlannedCall, ...]
    out: str
    considered: tuple[Considered, ...]


def make_plan(
    mechanism: Mechanism,
    request: Request,
    capacity: int | None = None,
    allowed: tuple[str, ...] | None = None,
) -> Plan:
    """The plan for a request, whose shapes are those of the mechanism's inputs.

    Raises
    ------
    UnsupportedError
        when `allowed` names backends, and none of them takes some of the work.
    """
    plan, warning = _plan(mechanism, request, capacity, allowed, discover())
    if warning is not None:
        _warn_once(warning)
    return plan


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, PassedOverWarning, stacklevel=_frames_of_this_package())


def _frames_of_this_package() -> int:
    """How many calls deep this package is, this one included.

    A warning that skips them points at the user's own line.
    """
    depth, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("precondattn."):
        depth, frame = depth + 1, frame.f_back
    return depth


@lru_cache(maxsize=4096)
def _plan(
    mechanism: Mechanism,
    request: Request,
    capacity: int | None,
    allowed: tuple[str, ...] | None,
    discovered: Discovered,
) -> tuple[Plan, str | None]:
    program = mechanism.program
    shapes = _value_shapes(program, request, capacity)
    if allowed is None:
        backends = tuple(b for b in discovered.backends if not getattr(b, "only_by_name", False))
    else:
        backends = tuple(discovered.named(name) for name in allowed)
    considered: list[Considered] = []
    taken: dict[frozenset[int], tuple[Any, Names, Names, Backend, Support]] = {}
    for calls in _groups(program):
        if any(calls & other for other in taken) or not _is_acyclic(program, [*taken, calls]):
            continue
        piece, arguments, names = _piece(program, calls)
        asked = request_for(arguments, request, shapes)
        for backend in backends:
            support = ask(backend, piece, asked)
            considered.append(Considered(calls, backend.name, support))
            if support.ok:
                taken[calls] = piece, arguments, names, backend, support
                break
    left = set(range(len(program.calls))).difference(*taken)
    if left:
        raise UnsupportedError(_refusal(mechanism, program, left, considered, backends))
    planned = [_planned(program, calls, *taken[calls]) for calls in _in_order(program, list(taken))]
    plan = Plan(tuple(planned), program.out, tuple(considered))
    return plan, _passed_over(mechanism, request, plan, backends)


def ask(backend: Backend, piece: Any, request: Request) -> Support:
    """A backend's answer, after what need not be asked."""
    if backend.libraries and request.library not in backend.libraries:
        takes = " and ".join(sorted(backend.libraries))
        return Support.no(f"takes arrays of {takes}, not of {request.library}")
    if request.transformed and backend is not REFERENCE:
        return Support.no("torch.func differentiates here, which only the reference lets it")
    if request.verb == "extend" and request.differentiated and request.library == "torch":
        support = backend.supports(piece, request)
        if support.ok and not support.differentiable and not _steps_back(backend, piece, request):
            return Support.no("its extend has no gradient, which these inputs ask for")
        return support
    return backend.supports(piece, request)


def _steps_back(backend: Backend, piece: Any, request: Request) -> bool:
    """Whether the piece replaces states by states, and the backend has the gradient of that."""
    slots = piece.program.slots.values()
    if not slots or any("c" in pattern.letters for _, pattern in slots):
        return False
    return backend.supports(piece, dataclasses.replace(request, verb="extend_vjp")).ok


def request_for(arguments: Names, request: Request, shapes: Mapping[str, Shape]) -> Request:
    """The request as it looks to a piece, whose inputs are called otherwise."""
    own = tuple((name, shapes[value]) for name, value in arguments.items())
    return dataclasses.replace(request, shapes=own)


def _groups(program: Program) -> Iterable[frozenset[int]]:
    """Sets of calls that could run as one: those with a single value that is used outside."""
    n = len(program.calls)
    for size in range(n, 0, -1):
        if n <= LARGEST_SEARCH:
            chosen: Iterable[tuple[int, ...]] = combinations(range(n), size)
        else:
            chosen = (tuple(range(i, i + size)) for i in range(n - size + 1))
        for calls in map(frozenset, chosen):
            if len(_results(program, calls)) == 1:
                yield calls


def _results(program: Program, calls: frozenset[int]) -> set[str]:
    """The values that these calls make and others use."""
    outside = {program.out}.union(
        *(call.reads for i, call in enumerate(program.calls) if i not in calls)
    )
    return {program.calls[i].out for i in calls} & outside


def _is_acyclic(program: Program, groups: list[frozenset[int]]) -> bool:
    return _in_order(program, groups) is not None


def _in_order(program: Program, groups: list[frozenset[int]]) -> Any:
    """The groups, and every call outside them, so that each value is made before it is read.

    None where there is no such order: two groups wait for each other.
    """
    loose = set(range(len(program.calls))).difference(*groups)
    waiting = [*groups, *(frozenset([i]) for i in loose)]
    waiting.sort(key=min)
    ordered: list[frozenset[int]] = []
    while waiting:
        for group in waiting:
            reads = frozenset[str]().union(*(program.calls[i].reads for i in group))
            others = (i for other in waiting if other is not group for i in other)
            if not reads & {program.calls[i].out for i in others}:
                ordered.append(group)
                waiting.remove(group)
                break
        else:
            return None
    return ordered


def _piece(program: Program, calls: frozenset[int]) -> tuple[Any, Names, Names]:
    """The calls as one mechanism; the values of its inputs; its names of the values it makes."""
    if len(calls) == 1:
        (call,) = (program.calls[i] for i in calls)
        return call.leaf, dict(call.arguments), {call.out: "out"}
    part, names = program.part(calls)
    values = {name: value for value, name in names.items()}
    return Group(part), {name: values[name] for name in part.inputs}, names


def _planned(
    program: Program,
    calls: frozenset[int],
    piece: Any,
    arguments: Names,
    names: Names,
    backend: Backend,
    support: Support,
) -> PlannedCall:
    (out,) = _results(program, calls)
    own_calls = {call.out: call for call in piece.program.calls}
    buffers = {}
    for call in (program.calls[i] for i in sorted(calls)):
        keys = call.slot_keys()
        for slot, own_key in own_calls[names[call.out]].slot_keys().items():
            buffers[own_key] = keys[slot]
    return PlannedCall(
        out, piece, tuple(arguments.items()), tuple(buffers.items()), backend, support
    )


def _value_shapes(program: Program, request: Request, capacity: int | None) -> dict[str, Shape]:
    """The shape of every value of the program."""
    shapes = dict(request.shapes)
    extending = request.verb.startswith("extend")
    for call in program.calls:
        inputs = call.leaf.inputs.extending() if extending else call.leaf.inputs
        output = Pattern.read(call.leaf.output)
        if extending:
            output = output.renamed({"s": "t"})
        known = {} if capacity is None else {"c": capacity}
        own = {formal: shapes[value] for formal, value in call.arguments}
        shapes[call.out] = output.shape(inputs.sizes(str(call.leaf), own, known))
    return shapes


def _refusal(
    mechanism: Mechanism,
    program: Program,
    left: set[int],
    considered: Iterable[Considered],
    backends: Iterable[Backend],
) -> str:
    names = ", ".join(backend.name for backend in backends)
    lines = [f"{mechanism}: backend {names} was asked for, and does not take all of it"]
    for i in sorted(left):
        lines.append(f"  {program.calls[i]}")
        lines += [
            f"    {c.backend}: {c.support.reason}" for c in considered if c.calls == frozenset([i])
        ]
    return "\n".join(lines)


def _passed_over(
    mechanism: Mechanism, request: Request, plan: Plan, backends: Iterable[Backend]
) -> str | None:
    """A backend that was made for this device and these arrays, and takes nothing of this call."""
    working = {call.backend.name for call in plan.calls}
    for backend in backends:
        fits = not backend.libraries or request.library in backend.libraries
        if request.device not in backend.accelerates or not fits or backend.name in working:
            continue
        reasons = dict.fromkeys(
            c.support.reason for c in plan.considered if c.backend == backend.name
        )
        if reasons:
            return (
                f"{backend.name} is made for {request.device}, and was passed over for "
                f"{mechanism}: {'; '.join(reasons)}"
            )
    return None
