"""Plans: which backend runs which leaf calls of a program.

All groups of leaf calls that could run as one are tried, larger groups first. For each group, the
backends are asked in their order of preference. A plan never depends on the entries of arrays.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import chain, combinations
from typing import TYPE_CHECKING, NamedTuple, cast

from precondattn.algebra.declaration import Pattern
from precondattn.algebra.group import Group
from precondattn.algebra.program import Program
from precondattn.arrays import Shape
from precondattn.backend import (
    Backend,
    PassedOverWarning,
    Request,
    Runner,
    Support,
    UnsupportedError,
)
from precondattn.dispatch.discovery import REFERENCE, Discovered, discover
from precondattn.dispatch.empty import EMPTY, is_empty
from precondattn.limits import KEPT, KEPT_PLANS

if TYPE_CHECKING:
    from precondattn.algebra.piece import Piece

LARGEST_SEARCH = 8
"""The most leaf calls of a program of which all groups are tried. In a larger program, the whole
program is tried, and groups of at most this number of consecutive leaf calls."""


Names = Mapping[str, str]


class PlannedCall(NamedTuple):
    """A leaf or a group, its runner, and the program's names of its values."""

    out: str
    piece: Piece
    arguments: tuple[tuple[str, str], ...]
    """(the piece's name of an input, the program's name of the value)."""
    buffers: tuple[tuple[str, str], ...]
    """(the piece's name of a buffer, the buffer's name in `Cache.store`)."""
    backend: Backend
    runner: Runner
    is_symbolic: bool = False
    has_gradient_of_step: bool = False
    """Whether the runner has a `step_backward` for it, in an extension of JAX arrays."""
    is_whole: bool = False
    """Whether its inputs are the inputs of the call, with the same names in the same order."""
    owned: tuple[tuple[str, str], ...] = ()
    """The buffers that it updates; if several calls share a buffer, the first one updates it."""
    is_reversed: bool = False
    """Whether it is computed on the tokens in reversed order."""
    narrowed: tuple[str, ...] = ()
    """The inputs that other pieces compute, and that are cast to the call's dtype."""


class Considered(NamedTuple):
    """A question to a backend, and its answer."""

    calls: frozenset[int]
    backend: str
    support: Support


class CallPlan(NamedTuple):
    """The planned calls to run, in order."""

    calls: tuple[PlannedCall, ...]
    out: str
    considered: tuple[Considered, ...]
    shares_buffers: bool = False
    """Whether several calls read one buffer; then none of them may overwrite it."""


def make_plan(
    mechanism: Piece,
    request: Request,
    capacity: int | None = None,
    allowed: tuple[str, ...] | None = None,
) -> CallPlan:
    """The plan for a request, which has the shapes of the mechanism's inputs."""
    make = _plan.__wrapped__ if request.is_symbolic else _plan  # Symbolic sizes have no hash.
    plan, warning = make(mechanism, request, capacity, allowed, discover())
    if warning is not None:
        _warn_once(warning)
    return plan


def uncached_plan(
    mechanism: Piece,
    request: Request,
    capacity: int | None,
    allowed: tuple[str, ...] | None = None,
) -> CallPlan:
    """The plan for a request, without warnings, and not kept for later calls."""
    return _plan.__wrapped__(mechanism, request, capacity, allowed, discover(), True)[0]


@lru_cache(maxsize=KEPT)
def _warn_once(message: str) -> None:
    warnings.warn(message, PassedOverWarning, stacklevel=_frames_of_this_package())


def _frames_of_this_package() -> int:
    """The number of innermost stack frames in this package, this function included."""
    depth, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("precondattn."):
        depth, frame = depth + 1, frame.f_back
    return depth


@lru_cache(maxsize=KEPT_PLANS)
def _plan(
    mechanism: Piece,
    request: Request,
    capacity: int | None,
    allowed: tuple[str, ...] | None,
    discovered: Discovered,
    is_described: bool = False,
) -> tuple[CallPlan, str | None]:
    program = mechanism.program
    if is_empty([shape for _, shape in request.shapes]):
        every = frozenset(range(len(program.calls)))
        runner = EMPTY.prepare(_piece(program, every)[0], request)
        call = _planned(program, every, EMPTY, runner)
        return CallPlan((call._replace(owned=call.buffers),), program.out, ()), None
    shapes = _value_shapes(program, request, capacity)
    if allowed is None:
        backends = [b for b in discovered.backends if not b.only_by_name]
    else:
        backends = [discovered.named(name) for name in allowed]
    considered: list[Considered] = []
    claimed: dict[frozenset[int], PlannedCall] = {}
    taken: frozenset[int] = frozenset()
    for calls in _groups(program):
        is_searched = len(program.calls) <= LARGEST_SEARCH  # Consecutive calls have an order.
        if calls & taken or (is_searched and _in_order(program, [*claimed, calls]) is None):
            continue
        piece, arguments, _ = _piece(program, calls)
        of_piece = tuple([(name, shapes[value]) for name, value in arguments.items()])
        piece_request = dataclasses.replace(request, shapes=of_piece)
        for backend in backends:
            answer = query(backend, piece, piece_request, is_described)
            if isinstance(answer, str):
                support = Support.no(answer)
            elif allowed is None and (reason := answer.refuses_by_default()) is not None:
                support = Support(False, reason, by_name=True)
            else:
                support = Support.yes(differentiable=answer.differentiable)
                is_step_of_jax = request.verb == "extend" and request.library == "jax"
                has_gradient = is_step_of_jax and _has_step_backward(backend, piece, piece_request)
                planned = _planned(program, calls, backend, answer)
                claimed[calls] = planned._replace(
                    has_gradient_of_step=has_gradient, is_symbolic=request.is_symbolic
                )
                taken |= calls
            considered.append(Considered(calls, backend.name, support))
            if support.ok:
                break
    unclaimed = set(range(len(program.calls))) - taken
    if unclaimed:
        error = UnsupportedError(_refusal(mechanism, program, unclaimed, considered, backends))
        error.request = request
        raise error
    order = _in_order(program, list(claimed))
    assert order is not None  # Each group was accepted only with an order.
    ordered = [claimed[calls] for calls in order]
    inputs = [name for name, _ in request.shapes]
    whole = tuple(zip(inputs, inputs, strict=True))
    updated, shares_buffers = set[str](), False
    for i, call in enumerate(ordered):
        owned = call.buffers
        if not updated.isdisjoint(dict(call.buffers).values()):
            owned = tuple((name, key) for name, key in call.buffers if key not in updated)
            shares_buffers = True
        ordered[i] = call._replace(is_whole=call.arguments == whole, owned=owned)
        updated.update(dict(owned).values())
    plan = CallPlan(tuple(ordered), program.out, tuple(considered), shares_buffers)
    return plan, _passed_over(mechanism, request, plan, backends)


def query(
    backend: Backend, piece: Piece, request: Request, is_described: bool = False
) -> Runner | str:
    """A backend's answer, without asking it about requests that it can not support in general."""
    if backend.libraries and request.library not in backend.libraries:
        supported = " and ".join(sorted(backend.libraries))
        return f"supports arrays of {supported}, not of {request.library}"
    masks_of_pairs = sorted(request.masks & {"attn_mask", "prefix"})
    if masks_of_pairs and not backend.masks_pairs:
        return f"has no masks of pairs: {', '.join(masks_of_pairs)}"
    if request.transformed and backend is not REFERENCE:
        return "only the reference supports differentiation by torch.func"
    try:
        answer = backend.prepare(piece, request)
    except ImportError as error:
        if not is_described:
            raise
        return f"could not be imported: {type(error).__name__}: {error}"
    if not isinstance(answer, str | Runner):
        raise TypeError(
            f"prepare of backend {backend.name!r} must return a precondattn.Runner, or the reason "
            f"why there is none as a str; found {type(answer).__name__}"
        )
    if isinstance(answer, str) or answer.differentiable or request.library != "torch":
        return answer
    is_differentiated = request.verb == "extend" and request.differentiated
    if is_differentiated and not _has_step_backward(backend, piece, request):
        return "its extend has no gradient, which these inputs require"
    return answer


def _has_step_backward(backend: Backend, piece: Piece, request: Request) -> bool:
    """Whether the piece's cache is a state, and the backend has the gradient of its step."""
    slots = piece.program.slots.values()
    if not slots or any("c" in pattern.letters for _, pattern in slots):
        return False
    asked = dataclasses.replace(request, verb="extend_vjp")
    return not isinstance(backend.prepare(piece, asked), str)


def _groups(program: Program) -> Iterable[frozenset[int]]:
    """The sets of leaf calls that could run as one, with exactly one value used outside the set."""
    n = len(program.calls)
    if n <= LARGEST_SEARCH:
        chosen = (each for size in range(n, 0, -1) for each in combinations(range(n), size))
    else:
        sizes = (n, *range(LARGEST_SEARCH, 0, -1))
        chosen = (tuple(range(i, i + size)) for size in sizes for i in range(n - size + 1))
    for calls in map(frozenset, chosen):
        if len(_results(program, calls)) == 1:
            yield calls


def _results(program: Program, calls: frozenset[int]) -> set[str]:
    """The values that these leaf calls compute and that others, or the caller, use."""
    computed = [program.calls[i].out for i in calls]
    return {
        value
        for value in computed
        if value == program.out or not program.readers.get(value, frozenset()) <= calls
    }


def _in_order(program: Program, groups: list[frozenset[int]]) -> list[frozenset[int]] | None:
    """The groups and all other leaf calls, each value computed before it is read; or None."""
    if len(program.calls) == 1:
        return groups
    ungrouped = set(range(len(program.calls))).difference(*groups)
    waiting = [*groups, *(frozenset([i]) for i in ungrouped)]
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


@lru_cache(maxsize=KEPT)
def _piece(program: Program, calls: frozenset[int]) -> tuple[Piece, Names, Names]:
    """The leaf calls as one piece, the values of its inputs, and its names of their outputs."""
    if len(calls) == 1:
        (call,) = (program.calls[i] for i in calls)
        return cast("Piece", call.leaf), dict(call.arguments), {call.out: "out"}
    part, names = program.part(calls)
    values = {name: value for value, name in names.items()}
    return Group(part), {name: values[name] for name in part.inputs}, names


def _planned(
    program: Program, calls: frozenset[int], backend: Backend, runner: Runner
) -> PlannedCall:
    piece, arguments, names = _piece(program, calls)
    (out,) = _results(program, calls)
    outs = {call.out for call in program.calls}
    computed = tuple(name for name, value in arguments.items() if value in outs)
    piece_calls = {call.out: call for call in piece.program.calls}
    buffers = {}
    for call in (program.calls[i] for i in sorted(calls)):
        keys = call.slot_keys()
        for slot, piece_key in piece_calls[names[call.out]].slot_keys().items():
            buffers[piece_key] = keys[slot]
    return PlannedCall(
        out,
        piece,
        tuple(arguments.items()),
        tuple(buffers.items()),
        backend,
        runner,
        is_reversed=not program.reversed_values.isdisjoint(arguments.values()),
        narrowed=() if backend.wide_values else computed,
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
        sizes = {} if capacity is None else {"c": capacity}
        leaf_shapes = {formal: shapes[value] for formal, value in call.arguments}
        shapes[call.out] = output.shape(inputs.sizes(str(call.leaf), leaf_shapes, sizes))
    return shapes


def _refusal(
    mechanism: Piece,
    program: Program,
    unclaimed: set[int],
    considered: Iterable[Considered],
    backends: Iterable[Backend],
) -> str:
    names = ", ".join(backend.name for backend in backends)
    lines = [f"{mechanism}: the requested backend {names} does not support all of it"]
    answers = [(c.calls, f"    {c.backend}: {c.support.reason}") for c in considered]
    of_leaves = {i: [line for calls, line in answers if calls == {i}] for i in sorted(unclaimed)}
    shown = set(chain.from_iterable(of_leaves.values()))
    every = frozenset(range(len(program.calls)))
    of_whole = [line for calls, line in answers if calls == every and line not in shown]
    if of_whole:
        lines += ["  as a whole", *of_whole]
    for i, of_leaf in of_leaves.items():
        lines += [f"  {program.calls[i]}", *of_leaf]
    return "\n".join(lines)


def _passed_over(
    mechanism: Piece, request: Request, plan: CallPlan, backends: Iterable[Backend]
) -> str | None:
    """A warning text if a backend made for this device and library runs no part of the call."""
    used = {call.backend.name for call in plan.calls}
    for backend in backends:
        fits = not backend.libraries or request.library in backend.libraries
        if request.device not in backend.accelerates or not fits or backend.name in used:
            continue
        reasons = dict.fromkeys(
            c.support.reason
            for c in plan.considered
            if c.backend == backend.name and not c.support.by_name
        )
        if reasons:
            return (
                f"{backend.name} is made for {request.device}, but runs no part of "
                f"{mechanism}: {'; '.join(reasons)}"
            )
    return None
