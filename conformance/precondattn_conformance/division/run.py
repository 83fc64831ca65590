"""The outcome of a divided call: its parts are joined and compared with the oracle.

The oracle computes the whole call in float64, as for every case. Padding contains NaN, which must
not reach any result. Output and gradients of the devices are joined in the order of the sequence;
gradients of inputs without tokens are summed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from precondattn_conformance import libraries
from precondattn_conformance.case import Case
from precondattn_conformance.checks.check import Backend, Measured, Trial, names_of
from precondattn_conformance.checks.packing import with_nan
from precondattn_conformance.disagreement import DisagreementError
from precondattn_conformance.division.parts import ProcessParts, masks_of, name_of
from precondattn_conformance.division.processes import WORKERS, LibraryProcesses, LostError
from precondattn_conformance.division.replies import PartOfCall, Reply
from precondattn_conformance.runner import Outcome
from precondattn_conformance.status import FAILED, PASSED, UNSUPPORTED


def run_divided(
    cases: Iterable[Case],
    devices: int,
    backend: Backend = None,
    *,
    timeout: float | None = None,
    inside: str | None = None,
    started: Callable[[Case], object] = lambda case: None,
) -> Iterator[Outcome]:
    """Yield the outcomes as soon as each is known."""
    of_library = {
        name: LibraryProcesses(devices, name, backend, timeout, inside) for name in WORKERS
    }
    try:
        for case in cases:
            started(case)
            yield outcome_of(case, of_library[case.library])
    finally:
        for processes in of_library.values():
            processes.stop()


def outcome_of(case: Case, processes: LibraryProcesses) -> Outcome:
    """Run one case on all devices."""
    start = time.perf_counter()
    trial = Trial(case, libraries.named(case.library), processes.backend)
    parts = ProcessParts.of_order(case.check, case.layout, processes.devices)

    def outcome(
        status: str, measured: Measured | None = None, reason: str = "", details: str = ""
    ) -> Outcome:
        code = _command(case, processes) if status == FAILED else ""
        seconds = time.perf_counter() - start
        return Outcome(case, status, measured, reason, details, code, seconds)

    if trial.mechanism.mixes_sequences:
        reason = f"{case.mechanism}: the output of a sequence depends on all others"
        return outcome(UNSUPPORTED, None, reason)
    try:
        replies = processes.run(calls_of(trial, parts))
    except LostError as lost:
        return outcome(FAILED, None, str(lost), lost.details)
    failed = _failure(replies)
    if failed is not None:
        return outcome(FAILED, None, *failed)
    if replies[0].status == UNSUPPORTED:
        return outcome(UNSUPPORTED, None, replies[0].reason)
    try:
        return outcome(PASSED, compared(trial, parts, replies))
    except DisagreementError as error:
        found = None
        if error.error is not None and error.bound is not None:
            found = Measured(error.error, error.bound)
        where = _where(trial, parts, error)
        return outcome(FAILED, found, f"{error}{where}", error.details)


def calls_of(trial: Trial, parts: ProcessParts) -> list[PartOfCall]:
    """Each device's part of the call of a case."""
    case, mechanism = trial.case, trial.mechanism
    inputs = with_nan(trial)[0] if case.layout.has("lengths") else trial.numpy_inputs
    masks, cotangent = masks_of(case.layout, case.library), trial.expected.cotangent
    return [
        PartOfCall(
            case.mechanism,
            name_of(case.check, case.layout),
            case.dtype,
            {n: parts.cut(a, mechanism.inputs[n], device) for n, a in inputs.items()},
            {n: parts.cut_mask(n, a, device) for n, a in masks.items()},
            parts.cut(cotangent, mechanism.program.output, device),
        )
        for device in range(parts.devices)
    ]


def _failure(replies: list[Reply]) -> tuple[str, str] | None:
    """The reason and details if a process has an error, or reasons of refusals differ."""
    failed = [(rank, reply) for rank, reply in enumerate(replies) if reply.status == FAILED]
    if failed:
        rank, first = failed[0]
        return f"process {rank} {first.reason}", first.details
    said = [(reply.status, reply.reason) for reply in replies]
    other = next((rank for rank, each in enumerate(said) if each != said[0]), None)
    if other is None:
        return None
    texts = [f"process {rank}: {' '.join(said[rank])}" for rank in (0, other)]
    return f"processes do not agree: {'; '.join(texts)}", ""


def compared(trial: Trial, parts: ProcessParts, replies: list[Reply]) -> Measured:
    """Return the worst error, or raise a DisagreementError if one is above its bound."""
    expected, mechanism = trial.expected, trial.mechanism
    done = [(r.out, r.gradients) for r in replies if r.out is not None and r.gradients is not None]
    out = parts.joined([out for out, _ in done], mechanism.program.output, expected.out.shape)
    pairs = {"the output": (out, expected.out)}
    for name, right in expected.gradients.items():
        pattern = mechanism.inputs[name]
        found = parts.joined([d[name] for _, d in done], pattern, right.shape)
        pairs[f"vjp of {name}"] = (found, right)
    return trial.agree(pairs)


def _where(trial: Trial, parts: ProcessParts, error: DisagreementError) -> str:
    """The device that has the worst element, in words."""
    for letter, place in zip(trial.axes(error.what), error.index, strict=False):
        if letter in parts.tokens:
            device, number = parts.device_of(letter, place)
            each = "process" if trial.case.library == "torch" else "device"
            return f"; that is token {number} of {each} {device}"
    return ""


def _command(case: Case, processes: LibraryProcesses) -> str:
    """The command that runs the case again."""
    options = "".join(f" --backend {name}" for name in names_of(processes.backend))
    return f"precondattn conformance --devices {processes.devices}{options} --case '{case.id}'\n"
