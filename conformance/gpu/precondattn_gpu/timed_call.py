"""One headline benchmark in this process: inputs on the device, checked results, timed calls.

    python -m precondattn_gpu.timed_call BACKEND MECHANISM SIZES --work forward --peer flash_sdpa …

The time of a row is measured between device events. A call with a wrong result is not timed. The
result holds the rows as a record of `precondattn bench`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import torch

from precondattn.arrays import Array, Arrays
from precondattn_conformance.bench import machine
from precondattn_conformance.bench.cases import BenchCase
from precondattn_conformance.bench.computation import Computation, allowed, ours
from precondattn_conformance.bench.correct import Checked
from precondattn_conformance.bench.cost import flops, moved_bytes
from precondattn_conformance.bench.measure import correct_peers, empty_row, outcome_in
from precondattn_conformance.bench.paired import ratio, spread
from precondattn_conformance.bench.peers import TimedPeer
from precondattn_conformance.bench.record import TIMED, BenchRecord, Row
from precondattn_conformance.bench.selection import Selection
from precondattn_gpu import device_inputs
from precondattn_gpu.device_clock import TorchClock, in_turns
from precondattn_gpu.device_inputs import OnDevice
from precondattn_gpu.first_tokens import FirstTokens, check_step
from precondattn_gpu.options import CPU, HELPER

ROUNDS = 7
OURS = "precondattn"


class TimedCall(NamedTuple):
    """A call with a right result, and the clock of its device."""

    clock: TorchClock
    call: Callable[[], object]
    checked: Checked


def main() -> None:
    parser = argparse.ArgumentParser(description="Time one call beside its peers.")
    for name in ("backend", "mechanism", "sizes"):
        parser.add_argument(name)
    parser.add_argument("--work", action="append", required=True)
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False  # The calls are compared with this.
    rows: list[Row] = []
    for work in options.work:
        (case,) = Selection(
            mechanisms=(options.mechanism,), works=(work,), sizes=(options.sizes,),
            dtype=options.dtype, peers=tuple(options.peer), device=options.device,
        ).cases()  # fmt: skip
        rows.append(measured(case, options.backend, options.rounds))
        record = BenchRecord(machine.now(), machine.describe(), [], rows)
        options.result.write_text(json.dumps(asdict(record)))
    if {row.status for row in rows} != {TIMED}:
        raise SystemExit(1)  # The device may be in a bad state.


def measured(case: BenchCase, backend: str, rounds: int) -> Row:
    """The row of a case, whose device is named."""
    case = replace(case, backend=f"{backend},{HELPER[backend]}")
    row = empty_row(case)
    if case.device != CPU:
        row.device = f"cuda ({torch.cuda.get_device_name()})"
    with outcome_in(row):
        _measure(case, backend, rounds, row)
    return row


def _measure(case: BenchCase, backend: str, rounds: int, row: Row) -> None:
    mechanism, device = case.parsed, str(case.device)
    x = device_inputs.make(mechanism, case.call_layout, case.dtype, device)
    contender = checked_in_torch(ours(mechanism, case.backend, OURS), x, case)
    row.error, row.bound, row.checked = contender.checked
    row.backends = _backends(case, backend)

    def of_peer(peer: TimedPeer) -> TimedCall:
        computation = peer.make(mechanism, case.backend)
        inputs = {name: x[name] for name in computation.mechanism.inputs}
        return checked_in_torch(computation, inputs, case)

    calls = {OURS: contender} | correct_peers(case, row, of_peer)
    times = in_turns({name: (each.clock, each.call) for name, each in calls.items()}, rounds)
    row.seconds = spread(times[OURS])._asdict()
    for name in calls.keys() - {OURS}:
        row.ratios[name] |= ratio(times[OURS], times[name])._asdict()
        row.ratios[name]["seconds"] = spread(times[name]).median
    row.flops = flops(mechanism, case.input_sizes, case.work)
    row.bytes = moved_bytes(mechanism, case.input_sizes, case.work, x["q"].element_size())


def checked_in_torch(
    computation: Computation, x: dict[str, torch.Tensor], case: BenchCase
) -> TimedCall:
    """The call of a computation in PyTorch, after its result was found right."""
    device = str(case.device)
    clock = TorchClock(device)
    if case.work == "decode":
        library = OnDevice(device)
        assert computation.decoder is not None
        decoder = computation.decoder(library, case.dtype, x)
        decoder.fill()

        def step() -> torch.Tensor:
            with torch.no_grad():
                decoder.reset()
                return decoder.step()

        return TimedCall(clock, step, check_step(computation, decoder, step, case.dtype))

    def forward() -> Array:
        with torch.no_grad():
            return computation.forward(**x)

    expected = FirstTokens(computation.mechanism, x, case.dtype)
    if case.work == "forward":
        return TimedCall(clock, forward, expected.check(forward()))
    leaves = {name: array.detach().requires_grad_() for name, array in x.items()}

    def both(cotangent: Array) -> tuple[Array, Arrays]:
        out = computation.forward(**leaves)
        gradients = torch.autograd.grad(out, list(leaves.values()), cotangent)
        return out, dict(zip(leaves, gradients, strict=True))

    checked = expected.check(*both(expected.cotangent))
    everywhere = torch.randn_like(expected.cotangent)
    return TimedCall(clock, lambda: both(everywhere), checked)


def _backends(case: BenchCase, backend: str) -> list[str]:
    """The backends of the call's pieces."""
    from precondattn.dispatch.described import explain_described

    sizes = {letter: size for letter, size in case.input_sizes.items() if letter in "btshnudem"}
    verb = {"forward": "forward", "decode": "extend"}.get(case.work, "vjp")
    if verb == "extend":
        sizes |= {"c": sizes["t"], "t": 1, "s": sizes["t"]}
    where = ("torch", case.dtype, torch.device(str(case.device)).type)
    explained = explain_described(case.parsed, *where, verb, sizes, backend=allowed(case.backend))
    if backend not in explained.backends:
        raise RuntimeError(f"{backend} runs none of this:\n{explained}")
    return list(explained.backends)


if __name__ == "__main__":
    main()
