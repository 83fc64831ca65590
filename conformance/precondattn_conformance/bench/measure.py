"""One case: checked, timed, and compared with its peers, into a row.

The order matters. The first call, which includes compilation, is timed separately. Its result and
each peer's are compared with the oracle. Then the contender and the correct peers are timed in
turns.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import precondattn as pa
from precondattn.arrays import Array
from precondattn.backend import UnsupportedError
from precondattn_conformance import libraries
from precondattn_conformance.bench import machine
from precondattn_conformance.bench.cases import BenchCase
from precondattn_conformance.bench.computation import (
    Computation,
    backward_run,
    decode_run,
    forward_run,
    ours,
    packed,
)
from precondattn_conformance.bench.correct import (
    Checked,
    UncheckedError,
    WrongResultError,
    check_backward,
    check_decode,
    check_forward,
    inputs_of,
    oracle,
)
from precondattn_conformance.bench.cost import flops, moved_bytes
from precondattn_conformance.bench.paired import Run, Turns, spread, timed
from precondattn_conformance.bench.peers import TimedPeer, lacks, peers_of
from precondattn_conformance.bench.plan import empty_row, plan
from precondattn_conformance.bench.record import FAILED, TIMED, UNSUPPORTED, WRONG, Row
from precondattn_conformance.libraries import Library
from precondattn_conformance.memory import MeasuredCall, NoPeakError, peak_bytes

BUDGET = 8.0
"""Seconds for the rounds of a case, peers included, unless the number of rounds is given."""

LEAST_ROUNDS, MOST_ROUNDS = 5, 200
QUICK_ROUNDS = 3


@dataclass(frozen=True)
class MeasureOptions:
    """How to measure."""

    device: str | None = None
    rounds: int | None = None
    memory: bool = False
    quick: bool = False
    at_round: Callable[[int, int], None] = lambda number, rounds: None
    """Called before each round, with its number and how many there are. The warm-up is round 0."""


Benchmark = Any
"""The fixture of pytest-benchmark, which has no types."""


def measure(
    case: BenchCase, backend: str | None, options: MeasureOptions, benchmark: Benchmark
) -> Row:
    """A row of any status. `benchmark` is pytest-benchmark's fixture; it times correct results.

    A case of memory has peaks at multiples of the number of tokens, each call in its own process.
    """
    row = empty_row(case, backend, options.device)
    try:
        if case.work == "memory":
            plan(case, backend, options.device, row)
            _measure_peaks(case, backend, options, case.multiples, row)
        else:
            with libraries.named(case.library, options.device).precision(case.dtype):
                _measure(case, backend, options, benchmark, row)
        row.status = TIMED
    except (UnsupportedError, UncheckedError, NoPeakError) as reason:
        row.status, row.reason = UNSUPPORTED, str(reason)
    except WrongResultError as wrong:
        row.status, row.reason = WRONG, str(wrong)
        row.error, row.bound = wrong.error, wrong.bound
    except Exception as error:
        row.status, row.reason = FAILED, f"{type(error).__name__}: {error}"
        traceback.print_exc()
    return row


def _measure(
    case: BenchCase,
    backend: str | None,
    options: MeasureOptions,
    benchmark: Benchmark,
    row: Row,
) -> None:
    run, checked, row.first_call_seconds = our_run(case, backend, options.device, row)
    row.error, row.bound, row.checked = checked.error, checked.bound, checked.what
    peers = _correct_peers(case, backend, options, row)
    _time(run, peers, case, options, benchmark, row)
    _add_rates(case, options, row)
    row.status = TIMED
    if options.memory and case.work != "decode":
        try:
            _measure_peaks(case, backend, options, (1,), row)
        except NoPeakError as reason:
            row.reason = str(reason)
    benchmark.extra_info.update(row=vars(row) | {"key": [str(part) for part in row.key]})


def _time(
    run: Run,
    peers: dict[str, Run],
    case: BenchCase,
    options: MeasureOptions,
    benchmark: Benchmark,
    row: Row,
) -> None:
    """Write the times of the rounds, and the ratios to peers, to the row."""
    turns = Turns(peers)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else _affordable(run, peers))
    numbers = itertools.count()

    def before_each_round() -> None:
        options.at_round(next(numbers), rounds)
        turns()
        run.reset()

    benchmark.pedantic(run.call, setup=before_each_round, rounds=rounds, warmup_rounds=1)
    times = list(benchmark.stats.stats.data)
    of_peers = {name: peer[-len(times) :] for name, peer in turns.times.items()}
    benchmark.extra_info.update(peer_seconds=of_peers)
    row.seconds = spread(seconds / case.calls for seconds in times)._asdict()
    for name, ratio in turns.ratios(times).items():
        own = spread(of_peers[name]).median / case.calls
        row.ratios[name] |= {**ratio._asdict(), "seconds": own}


CheckedRun = tuple[Run, Checked, float]
"""The run to be timed, its check, and the duration of its first call."""


def our_run(case: BenchCase, backend: str | None, device: str | None, row: Row) -> CheckedRun:
    """Our run of a case, whose backends are written to the row."""
    plan(case, backend, device, row)
    library = libraries.named(case.library, device)
    computation = ours(pa.parse(case.mechanism), backend)
    return checked_run(packed(computation, library) if case.packed else computation, case, library)


def peer_run(
    peer: TimedPeer, case: BenchCase, backend: str | None, device: str | None
) -> CheckedRun:
    """A peer's run of a case, in its own library."""
    library = libraries.named(peer.library or case.library, device)
    return checked_run(peer.make(pa.parse(case.mechanism), backend), case, library)


def checked_run(computation: Computation, case: BenchCase, library: Library) -> CheckedRun:
    """The run of a computation, after its result was compared with the oracle."""
    results: list[Array] = []
    text, layout = str(computation.mechanism), case.call_layout
    if case.work == "decode":
        if computation.decoder is None:
            raise UnsupportedError(f"{computation.name} has no decoding")
        inputs = inputs_of(text, layout, case.dtype, library.name)
        decoder = computation.decoder(library, case.dtype, inputs)
        decoder.fill()
        run = decode_run(library, decoder, case.calls)
        run.reset()
        once = decode_run(library, decoder)
        first = timed(lambda: results.append(once.call()))
        return run, check_decode(computation, layout, library, case.dtype, decoder, once), first
    expected = oracle(text, layout, case.dtype, library.name)
    arrays = {name: library.array(a, case.dtype) for name, a in expected.inputs.items()}
    if case.work == "forward":
        once = forward_run(computation, library, arrays)
        first = timed(lambda: results.append(once.call()))
        checked = check_forward(computation, expected, library, case.dtype, results.pop())
        run = forward_run(computation, library, arrays, case.calls) if case.calls > 1 else once
        return run, checked, first
    run = backward_run(computation, library, arrays, library.array(expected.cotangent, case.dtype))
    first = timed(lambda: results.append(run.call()))
    checked = check_backward(expected, library, case.dtype, results.pop())
    if not expected.is_whole:  # The timed run has a cotangent for all tokens.
        everywhere = np.random.default_rng(2).normal(size=expected.cotangent.shape)
        run = backward_run(computation, library, arrays, library.array(everywhere, case.dtype))
    return run, checked, first


def _correct_peers(
    case: BenchCase, backend: str | None, options: MeasureOptions, row: Row
) -> dict[str, Run]:
    """The peers that are installed and correct; the row gets the reasons of the others."""
    runs: dict[str, Run] = {}
    for peer in peers_of(case):
        reason = lacks(peer, case, row.device)
        if not reason:
            try:
                runs[peer.name], checked, _ = peer_run(peer, case, backend, options.device)
                row.ratios[peer.name] = {"error": checked.error}
                continue
            except (WrongResultError, UnsupportedError, UncheckedError) as error:
                reason = str(error)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
        row.absent_peers[peer.name] = reason
    return runs


def _affordable(run: Run, peers: dict[str, Run]) -> int:
    """The number of rounds that fit into the budget."""
    seconds = 0.0
    for each in (run, *peers.values()):
        each.reset()
        seconds += timed(each.call)
    return int(np.clip(BUDGET / max(seconds, 1e-6), LEAST_ROUNDS, MOST_ROUNDS))


def _add_rates(case: BenchCase, options: MeasureOptions, row: Row) -> None:
    """Write FLOPs, bytes, and the shares of the machine's own rates to the row."""
    m = pa.parse(case.mechanism)
    shapes = {name: p.shape(case.call_layout.sizes) for name, p in m.inputs.items()}
    sizes = m.inputs.sizes(str(m), shapes)
    own = machine.rates(case.library, options.device, case.dtype, quick=options.quick)
    row.flops = flops(m, sizes, case.work)
    itemsize = {"float64": 8, "float32": 4}.get(case.dtype, 2)
    row.bytes = moved_bytes(m, sizes, case.work, itemsize)
    median = row.seconds["median"]
    if row.flops is not None:
        row.gemm_share = row.flops / median / own.flops_per_second
    row.copy_share = row.bytes / median / own.bytes_per_second


def _measure_peaks(
    case: BenchCase,
    backend: str | None,
    options: MeasureOptions,
    multiples: tuple[int, ...],
    row: Row,
) -> None:
    for multiple in multiples:
        tokens = multiple * case.layout.t
        call = MeasuredCall(
            case.mechanism,
            case.layout._replace(t=tokens, s=tokens),
            case.library,
            case.dtype,
            has_backward=case.work != "forward",
            backend=backend,
            device=options.device,
        )
        row.peak_bytes.append(peak_bytes(call))
        row.peak_tokens.append(tokens)
