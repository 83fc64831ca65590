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

import precondattn as pa
from precondattn.arrays import Array, Arrays
from precondattn_conformance.bench import machine
from precondattn_conformance.bench.cases import BenchCase
from precondattn_conformance.bench.computation import Computation, allowed, ours
from precondattn_conformance.bench.correct import Checked, WrongResultError
from precondattn_conformance.bench.cost import flops, moved_bytes
from precondattn_conformance.bench.paired import ratio, spread
from precondattn_conformance.bench.peers import lacks, peers_of
from precondattn_conformance.bench.plan import empty_row
from precondattn_conformance.bench.record import FAILED, TIMED, WRONG, BenchRecord, Row
from precondattn_conformance.bench.selection import chosen
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
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False  # The calls are compared with this.
    rows: list[Row] = []
    for work in given.work:
        (case,) = chosen(
            mechanisms=(given.mechanism,), works=(work,), sizes=(given.sizes,),
            dtype=given.dtype, peers=tuple(given.peer),
        )  # fmt: skip
        rows.append(measured(case, given.backend, given.device, given.rounds))
        record = BenchRecord(machine.now(), machine.describe(), [], rows)
        given.result.write_text(json.dumps(asdict(record)))
    if {row.status for row in rows} != {TIMED}:
        raise SystemExit(1)  # The device may be in a bad state.


def measured(case: BenchCase, backend: str, device: str, rounds: int) -> Row:
    """The row of a case."""
    names = f"{backend},{HELPER[backend]}"
    row = empty_row(case, names, device)
    if device != CPU:
        row.device = f"cuda ({torch.cuda.get_device_name()})"
    try:
        _measure(case, backend, names, device, rounds, row)
        row.status = TIMED
    except WrongResultError as wrong:
        row.status, row.reason = WRONG, str(wrong)
        row.error, row.bound = wrong.error, wrong.bound
    except Exception as error:  # An error is a result too.
        row.status, row.reason = FAILED, f"{type(error).__name__}: {error}"
    return row


def _measure(case: BenchCase, backend: str, names: str, device: str, rounds: int, row: Row) -> None:
    mechanism = pa.parse(case.mechanism)
    more = 1 if case.work == "decode" else 0
    layout = case.layout._replace(t=case.layout.t + more, s=case.layout.s + more)
    x = device_inputs.make(mechanism, layout, case.dtype, device)
    contender = ours(mechanism, names, OURS)
    found = checked_in_torch(contender, x, case, device)
    row.error, row.bound, row.checked = found.checked.error, found.checked.bound, found.checked.what
    row.backends = _backends(mechanism, x, case, names, backend)
    calls = {OURS: found} | _peers(case, names, x, row, device)
    times = in_turns({name: (each.clock, each.call) for name, each in calls.items()}, rounds)
    row.seconds = spread(times[OURS])._asdict()
    for name in calls.keys() - {OURS}:
        row.ratios[name] |= ratio(times[OURS], times[name])._asdict()
        row.ratios[name]["seconds"] = spread(times[name]).median
    shapes = {name: tuple(array.shape) for name, array in x.items()}
    sizes = mechanism.inputs.sizes(str(mechanism), shapes)
    row.flops = flops(mechanism, sizes, case.work)
    row.bytes = moved_bytes(mechanism, sizes, case.work, x["q"].element_size())


def checked_in_torch(
    computation: Computation, x: dict[str, torch.Tensor], case: BenchCase, device: str
) -> TimedCall:
    """The call of a computation in PyTorch, after its result was found right."""
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


def _backends(
    mechanism: pa.Mechanism, x: dict[str, torch.Tensor], case: BenchCase, names: str, backend: str
) -> list[str]:
    """The backends of the call's pieces."""
    from precondattn.dispatch.described import explain_described

    shapes = {name: tuple(array.shape) for name, array in x.items()}
    sizes = mechanism.inputs.sizes(str(mechanism), shapes)
    known = {letter: size for letter, size in sizes.items() if letter in "btshnudem"}
    verb = {"forward": "forward", "decode": "extend"}.get(case.work, "vjp")
    device = x["q"].device.type
    if verb == "extend":
        known |= {"c": known["t"], "t": 1, "s": known["t"]}
    explained = explain_described(
        mechanism, "torch", case.dtype, device, verb, known, backend=allowed(names)
    )
    if backend not in explained.backends:
        raise RuntimeError(f"{backend} runs none of this:\n{explained}")
    return list(explained.backends)


def _peers(
    case: BenchCase, names: str, x: dict[str, torch.Tensor], row: Row, device: str
) -> dict[str, TimedCall]:
    """The peers that are installed and right; the row gets the reasons for the others."""
    found: dict[str, TimedCall] = {}
    for peer in peers_of(replace(case, library="torch")):
        reason = lacks(peer, replace(case, library="torch"), row.device)
        if not reason:
            try:
                computation = peer.make(pa.parse(case.mechanism), names)
                own = {name: x[name] for name in computation.mechanism.inputs}
                found[peer.name] = checked_in_torch(computation, own, case, device)
                row.ratios[peer.name] = {"error": found[peer.name].checked.error}
                continue
            except Exception as error:  # An error of a peer does not affect the times of others.
                reason = f"{type(error).__name__}: {error}"
        row.absent_peers[peer.name] = reason
    return found


if __name__ == "__main__":
    main()
