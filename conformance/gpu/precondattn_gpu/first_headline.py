"""The times that matter most, in one process on an otherwise idle device, each beside its peers.

Times beside flash-linear-attention are separate calls at the end: its kernels choose among many
configurations, all of which have to be compiled first (`peer_call`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from precondattn_gpu.options import RunOptions, variables
from precondattn_gpu.task import (
    FAILED,
    PASSED,
    UNSUPPORTED,
    WRONG,
    Finished,
    ProcessTask,
    TaskOutcome,
)

if TYPE_CHECKING:
    from precondattn.json_types import JsonObject

SDPA = ("flash_sdpa", "cudnn_sdpa")
BOTH = ("forward", "forward_backward")
DTYPE = "bfloat16"
SHORT, LONG = "b=2,t=8192,h=16", "b=1,t=32768,h=16"
TINY = "b=1,t=48,h=4,n=4,d=16"
"""The sizes of a test run on a CPU."""
WIDE = f"{SHORT},n=16,d=128"


class TimedBesidePeers(NamedTuple):
    """A call that is timed beside its peers."""

    mechanism: str
    sizes: str
    peers: tuple[str, ...] = SDPA
    works: tuple[str, ...] = BOTH

    @property
    def name(self) -> str:
        beside = " beside fla" if self.peers == FLA else ""
        return f"triton {self.mechanism} {' '.join(self.works)} {self.sizes}{beside}"


FLA = ("fla",)
# Chosen by hand: there is time for a few.
HEADLINES = (
    TimedBesidePeers("lucid", WIDE),
    TimedBesidePeers("gated_delta", WIDE, ()),
    TimedBesidePeers("laser", WIDE),
    TimedBesidePeers("path", WIDE),
    TimedBesidePeers("kda", WIDE, ()),
    TimedBesidePeers("gla", WIDE, ()),
    TimedBesidePeers("lucid", f"{LONG},n=16,d=128"),
    TimedBesidePeers("lucid", "b=4,t=32768,h=16,n=2,d=128", ("sdpa",), ("decode",)),
)
BESIDE_FLA = tuple(
    TimedBesidePeers(name, WIDE, FLA) for name in ("gated_delta", "path", "kda", "gla")
)


def ready(options: RunOptions, compiled: Iterable[str]) -> list[ProcessTask]:
    """The headline benchmarks whose peers are in `compiled`, the names of tasks of `compiling`."""
    compiled = {*compiled}
    return [
        task(each, options)
        for each in (*HEADLINES, *BESIDE_FLA)
        if each.peers != FLA or compiling_name(each) in compiled
    ]


def task(each: TimedBesidePeers, options: RunOptions) -> ProcessTask:
    arguments = ["-m", "precondattn_gpu.timed_call", "triton", each.mechanism]
    arguments += [TINY if options.is_cpu else each.sizes]
    arguments += [word for work in each.works for word in ("--work", work)]
    arguments += [word for peer in each.peers for word in ("--peer", peer)]
    arguments += ["--dtype", DTYPE, "--device", options.device]
    arguments += ["--rounds", "2"] if options.is_cpu else []
    return ProcessTask(
        each.name,
        (*arguments, "--result", "{result}"),
        outcome_of,
        timeout=(90.0 if each.peers == FLA else 45.0) if not options.is_cpu else 600.0,
        environment=variables("triton", options),
        worker="headline",
        data={"backend": "triton"},
    )


def outcome_of(finished: Finished) -> TaskOutcome:
    """The benchmark record: the worst status of its rows, and a line for each."""
    if not finished.result.exists():
        return TaskOutcome(FAILED, f"exit code {finished.code}, no record\n{finished.output}")
    record = json.loads(finished.result.read_text())
    statuses = {row["status"] for row in record["rows"]}
    lines = [f"{row['case']}: {_result_of(row)}" for row in record["rows"]]
    worst = next((s for s in (WRONG, FAILED, UNSUPPORTED) if s in statuses), PASSED)
    return TaskOutcome(worst, "\n".join(lines), {"record": record})


def _result_of(row: JsonObject) -> str:
    if row["reason"]:
        return str(row["reason"])
    ratios = [f"{r['median']:.2f} × {n}" for n, r in row["ratios"].items() if "median" in r]
    return ", ".join([f"{1e3 * row['seconds']['median']:.3f} ms", *ratios])


def read_peer(finished: Finished) -> TaskOutcome:
    """Whether a peer ran and was right."""
    if not finished.result.exists():
        return TaskOutcome(FAILED, f"exit code {finished.code}\n{finished.output}")
    result = json.loads(finished.result.read_text())
    return TaskOutcome(result.pop("status"), result.pop("message"), result)


def compiling(options: RunOptions) -> list[ProcessTask]:
    """A task for each peer of flash-linear-attention that compiles its kernels."""
    return [
        ProcessTask(
            compiling_name(each),
            (
                "-m", "precondattn_gpu.peer_call", "fla", each.mechanism,
                TINY if options.is_cpu else each.sizes,
                *("--dtype", DTYPE, "--device", options.device),
                *("--result", "{result}"),
            ),
            read_peer,
            timeout=400.0,
            environment=variables("triton", options),
            worker="peer",
            data={"backend": "fla", "mechanism": each.mechanism},
        )
        for each in BESIDE_FLA
    ]  # fmt: skip


def compiling_name(each: TimedBesidePeers) -> str:
    return f"fla {each.mechanism} {each.sizes}"
