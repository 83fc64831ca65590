"""The times that matter most, in one process on an otherwise idle device, each beside its peers.

Times beside flash-linear-attention are separate calls at the end: its kernels choose among many
configurations, all of which have to be compiled first (`peer_call`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from precondattn_gpu.estimates import COMPILED, HEADLINE, TRIED
from precondattn_gpu.estimates import FLA as CONFIGURATIONS
from precondattn_gpu.headline import BOTH, LONG, SDPA, SHORT
from precondattn_gpu.options import RunOptions, variables
from precondattn_gpu.suite import dtype_of, outcome_of_record
from precondattn_gpu.task import FAILED, Finished, ProcessTask, TaskOutcome

TINY = "b=1,t=48,h=4,n=4,d=16"
"""The sizes of a test run on a CPU."""
WIDE = f"{SHORT},n=16,d=128"


class TimedBesidePeers(NamedTuple):
    """A call that is timed beside its peers."""

    mechanism: str
    sizes: str
    peers: tuple[str, ...] = SDPA
    works: tuple[str, ...] = BOTH
    backend: str = "triton"

    @property
    def name(self) -> str:
        beside = " beside fla" if self.peers == FLA else ""
        return f"{self.backend} {self.mechanism} {' '.join(self.works)} {self.sizes}{beside}"


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
    TimedBesidePeers("softmax", WIDE, SDPA, BOTH, "cupy"),
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
    arguments = ["-m", "precondattn_gpu.timed_call", each.backend, each.mechanism]
    arguments += [TINY if options.is_cpu else each.sizes]
    arguments += [word for work in each.works for word in ("--work", work)]
    arguments += [word for peer in each.peers for word in ("--peer", peer)]
    arguments += ["--dtype", dtype_of(each.backend, options), "--device", options.device]
    arguments += ["--rounds", "2"] if options.is_cpu else []
    seconds = HEADLINE[each.works[0]]
    return ProcessTask(
        each.name,
        (*arguments, "--result", "{result}"),
        read,
        seconds=seconds + (TRIED * CONFIGURATIONS[each.mechanism] if each.peers == FLA else 0.0),
        timeout=(90.0 if each.peers == FLA else 45.0) if not options.is_cpu else 600.0,
        # One process on a GPU, whatever the backend.
        environment={**variables("triton", options), **variables(each.backend, options)},
        worker="headline",
        data={"backend": each.backend},
    )


def read(finished: Finished) -> TaskOutcome:
    """The benchmark record, and the seconds of replays."""
    if not finished.result.exists():
        return TaskOutcome(FAILED, f"exit code {finished.code}, no record\n{finished.output}")
    content = json.loads(finished.result.read_text())
    outcome = outcome_of_record(content["record"])
    outcome.data["replays"] = content["replays"]
    return outcome


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
                *("--dtype", dtype_of(each.backend, options), "--device", options.device),
                *("--result", "{result}"),
            ),
            read_peer,
            seconds=COMPILED * CONFIGURATIONS[each.mechanism],
            timeout=400.0,
            continues=True,
            environment=variables("triton", options),
            worker="peer",
            data={"backend": "fla", "mechanism": each.mechanism},
        )
        for each in BESIDE_FLA
    ]  # fmt: skip


def compiling_name(each: TimedBesidePeers) -> str:
    return f"fla {each.mechanism} {each.sizes}"
