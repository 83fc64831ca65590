"""One case: checked, timed, and compared with its peers, into a row.

The first call, which includes compilation, is timed separately. Its result and each peer's are
compared with the oracle. Then the contender and the correct peers are timed in turns.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from precondattn.arrays import Arrays
from precondattn.backend import UnsupportedError
from precondattn_conformance.bench import machine
from precondattn_conformance.bench.cases import BenchCase, columns_of
from precondattn_conformance.bench.computation import (
    Computation,
    allowed,
    backward_run,
    decode_run,
    forward_run,
    ours,
    packed,
)
from precondattn_conformance.bench.correct import (
    LARGEST,
    Checked,
    UncheckedError,
    WrongResultError,
    check,
    check_decode,
    inputs_of,
    oracle,
)
from precondattn_conformance.bench.cost import flops, keeps_tokens, moved_bytes
from precondattn_conformance.bench.paired import Run, Turns, ratio, spread, timed
from precondattn_conformance.bench.peers import TimedPeer, lacks, peers_of
from precondattn_conformance.bench.record import FAILED, TIMED, UNSUPPORTED, WRONG, Row
from precondattn_conformance.memory import MeasuredCall, NoPeakError, peak_bytes

BUDGET = 8.0
"""Seconds for the rounds of a case, peers included, unless the number of rounds is given."""

LEAST_ROUNDS, MOST_ROUNDS = 5, 200
QUICK_ROUNDS = 3

Benchmark = Any
"""The fixture of pytest-benchmark, which has no types."""


class MeasureOptions(NamedTuple):
    """How to measure."""

    rounds: int | None = None
    memory: bool = False
    quick: bool = False


class CheckedRun(NamedTuple):
    """A run to be timed, its check, and the duration of its first call."""

    run: Run
    checked: Checked
    first_call_seconds: float


def empty_row(case: BenchCase) -> Row:
    """A row with the description of a measurement, and no results."""
    letters = {x for pattern in case.parsed.inputs.values() for x in pattern.letters}
    sizes = {letter: case.layout.sizes[letter] for letter in "btshnudem" if letter in letters}
    where = (case.library, case.device or "cpu", case.dtype)
    return Row(
        case.name, str(case.parsed), case.work, *where, sizes, asked=case.backend or "default"
    )


def plan(case: BenchCase, row: Row) -> None:
    """Write the backends to the row, and refuse sizes at which the reference is too expensive."""
    m, layout, library = case.parsed, case.call_layout, case.arrays
    few = layout._replace(t=1, s=1) if case.work == "decode" else layout
    like = {n: library.array(np.zeros(p.shape(few.sizes)), case.dtype) for n, p in m.inputs.items()}
    row.device = machine.device_name(library, next(iter(like.values())))
    names = allowed(case.backend)
    if case.work == "decode":
        cache = m.init_cache(**like, capacity=layout.t)
        explanation = m.explain(**like, cache=cache, backend=names)
    else:
        verb = "forward" if case.work == "forward" else "vjp"
        explanation = m.explain(**like, verb=verb, backend=names)
    row.backends = list(explanation.backends)
    if names is not None and names[0] not in row.backends:
        raise UnsupportedError(f"{names[0]} supports none of this:\n{explanation}")
    is_quadratic = any(
        call.backend.name == "reference" and any(map(keeps_tokens, call.piece.program.leaves))
        for call in explanation.plan.calls
    )
    if is_quadratic and layout.b * layout.h * layout.t * layout.s > 16 * LARGEST:
        raise UnsupportedError(
            f"the reference would run a piece of this, and needs memory quadratic in t={layout.t}"
        )


def measure(case: BenchCase, options: MeasureOptions, benchmark: Benchmark) -> Row:
    """A row of any status. `benchmark` is pytest-benchmark's fixture; it times correct results.

    A case of memory has peaks at multiples of the number of tokens, each call in its own process.
    """
    row = empty_row(case)
    with outcome_in(row), case.arrays.precision(case.dtype):
        if case.work == "memory":
            plan(case, row)
            _measure_peaks(case, case.multiples, row)
        else:
            _measure(case, options, benchmark, row)
    return row


@contextmanager
def outcome_in(row: Row) -> Iterator[None]:
    """The row gets a status and, after an error, the reason: an error is a result too."""
    try:
        yield
        row.status = TIMED
    except (UnsupportedError, UncheckedError, NoPeakError) as reason:
        row.status, row.reason = UNSUPPORTED, str(reason)
    except WrongResultError as wrong:
        row.status, row.reason = WRONG, str(wrong)
        row.error, row.bound = wrong.error, wrong.bound
    except Exception as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # A library made an error of Ctrl-C.
            raise KeyboardInterrupt from error
        row.status, row.reason = FAILED, f"{type(error).__name__}: {error}"
        traceback.print_exc()


def _measure(case: BenchCase, options: MeasureOptions, benchmark: Benchmark, row: Row) -> None:
    run, checked, row.first_call_seconds = our_run(case, row)
    row.error, row.bound, row.checked = checked
    calls = correct_peers(case, row, partial(peer_run, case=case))
    turns = Turns({name: each.run for name, each in calls.items()})

    def before_our_turn() -> None:
        turns()
        run.reset()

    rounds = options.rounds or (QUICK_ROUNDS if options.quick else 0)
    if not rounds:  # As many as fit into the budget.
        seconds = sum(map(timed, (before_our_turn, run.call)))
        rounds = int(np.clip(BUDGET / max(seconds, 1e-6), LEAST_ROUNDS, MOST_ROUNDS))
    benchmark.pedantic(run.call, setup=before_our_turn, rounds=rounds, warmup_rounds=1)
    _write_times(case, turns, benchmark, row)
    _write_rates(case, options, row)
    if options.memory and case.work != "decode":
        try:
            _measure_peaks(case, (1,), row)
        except NoPeakError as reason:
            row.reason = str(reason)
    benchmark.extra_info["row"] = vars(row) | {"key": [str(part) for part in row.key]}


def _write_times(case: BenchCase, turns: Turns, benchmark: Benchmark, row: Row) -> None:
    """Write the times of a call, and the ratios to peers, to the row.

    In pytest-benchmark each peer is a row of its own beside the case.
    """
    times = benchmark.stats.stats.data
    times[:] = [seconds / case.calls for seconds in times]
    benchmark.stats.iterations = case.calls
    row.seconds = spread(times)._asdict()
    for peer in (peer for peer in peers_of(case) if peer.name in turns.times):
        beside = copy(benchmark)
        describe(beside, case, peer)
        statistics = beside._make_stats(case.calls)
        for seconds in turns.times[peer.name][-len(times) :]:  # Without what warmed up.
            statistics.update(seconds)
        of_peer = statistics.stats.data
        row.ratios[peer.name] |= ratio(times, of_peer)._asdict()
        row.ratios[peer.name]["seconds"] = spread(of_peer).median


def describe(benchmark: Benchmark, case: BenchCase, peer: TimedPeer | None = None) -> None:
    """Give a row of pytest-benchmark the group, columns and name of a case, or of its peer."""
    columns, computed = columns_of(case), ""
    if peer is not None:
        columns, computed = columns_of(case, peer), str(peer.computes(case.parsed))
        benchmark.extra_info = {"case": case.name, "computes": computed, "is_peer": True}
    benchmark.group = columns.group
    benchmark.params, benchmark.param = columns._asdict(), columns.id(computed)
    benchmark.name = benchmark.fullname = f"{case.name}[{benchmark.param}]"


def our_run(case: BenchCase, row: Row) -> CheckedRun:
    """Our run of a case, whose backends are written to the row."""
    plan(case, row)
    computation = ours(case.parsed, case.backend)
    if case.packed:
        computation = packed(computation, case.arrays, case.layout.b, case.layout.t)
    return checked_run(computation, case)


def peer_run(peer: TimedPeer, case: BenchCase) -> CheckedRun:
    """A peer's run of a case, in its own library."""
    of_peer = replace(case, library=peer.library or case.library)
    return checked_run(peer.make(case.parsed, case.backend), of_peer)


def checked_run(computation: Computation, case: BenchCase) -> CheckedRun:
    """The run of a computation, after its result was compared with the oracle."""
    library, dtype = case.arrays, case.dtype
    oracle_of = (str(computation.mechanism), case.call_layout, dtype)
    if case.work == "decode":
        if computation.decoder is None:
            raise UnsupportedError(f"{computation.name} has no decoding")
        decoder = computation.decoder(library, dtype, inputs_of(*oracle_of))
        decoder.fill()
        once = decode_run(library, decoder)
        once.reset()
        seconds = timed(once.call)
        checked = check_decode(computation, case.call_layout, decoder, once)
        return CheckedRun(decode_run(library, decoder, case.calls), checked, seconds)
    expected = oracle(*oracle_of)
    arrays = {name: library.array(a, dtype) for name, a in expected.inputs.items()}

    def run_of(cotangent: np.ndarray, calls: int = 1) -> Run:
        if case.work == "forward":
            return forward_run(computation, library, arrays, calls)
        return backward_run(computation, library, arrays, library.array(cotangent, dtype))

    results: Arrays = {}
    run, cotangent = run_of(expected.cotangent), expected.cotangent
    seconds = timed(lambda: results.update(run.call()))
    checked = check(computation, expected, library, dtype, results)
    if not expected.is_whole:  # The timed run has a cotangent for all tokens.
        cotangent = np.random.default_rng(2).normal(size=expected.cotangent.shape)
    if case.calls > 1 or not expected.is_whole:
        run = run_of(cotangent, case.calls)
    return CheckedRun(run, checked, seconds)


def correct_peers(case: BenchCase, row: Row, run_of: Callable[[TimedPeer], Any]) -> dict[str, Any]:
    """What `run_of` gives, with a field `checked`, for the peers that are installed and correct.

    The row gets the reasons of the others.
    """
    calls: dict[str, Any] = {}
    for peer in peers_of(case):
        reason = lacks(peer, case, row.device)
        if not reason:
            try:
                calls[peer.name] = run_of(peer)
                row.ratios[peer.name] = {"error": calls[peer.name].checked.error}
                continue
            except (WrongResultError, UnsupportedError, UncheckedError) as error:
                reason = str(error)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
        row.absent_peers[peer.name] = reason
    return calls


def _write_rates(case: BenchCase, options: MeasureOptions, row: Row) -> None:
    """Write FLOPs, bytes, and the shares of the machine's rates to the row."""
    rates = machine.rates(case.library, case.device, case.dtype, quick=options.quick)
    itemsize = {"float64": 8, "float32": 4}.get(case.dtype, 2)
    row.flops = flops(case.parsed, case.input_sizes, case.work)
    row.bytes = moved_bytes(case.parsed, case.input_sizes, case.work, itemsize)
    median = row.seconds["median"]
    if row.flops is not None:
        row.gemm_share = row.flops / median / rates.flops_per_second
    row.copy_share = row.bytes / median / rates.bytes_per_second


def _measure_peaks(case: BenchCase, multiples: tuple[int, ...], row: Row) -> None:
    for multiple in multiples:
        tokens = multiple * case.layout.t
        layout = case.layout._replace(t=tokens, s=tokens)
        sizes = (case.mechanism, layout, case.library, case.dtype)
        call = MeasuredCall(*sizes, case.work != "forward", case.backend, case.device)
        row.peak_bytes.append(peak_bytes(call))
        row.peak_tokens.append(tokens)
