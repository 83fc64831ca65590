"""Stage 3: the times that matter most, each with its peer's time from the same run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from precondattn_gpu.options import RunOptions
from precondattn_gpu.suite import benchmark, dtype_of
from precondattn_gpu.task import ProcessTask

SDPA = ("flash_sdpa", "cudnn_sdpa")
BOTH = ("forward", "forward_backward")


class Headline(NamedTuple):
    """Benchmarks of a mechanism."""

    mechanism: str
    peers: tuple[str, ...]
    sizes: str
    works: tuple[str, ...] = BOTH
    backend: str = "triton"


SHORT, LONG = "b=2,t=8192,h=16", "b=1,t=32768,h=16"
HEADLINES = (
    *(
        Headline("lucid", SDPA, f"{tokens},n={n},d={d}")
        for tokens in (SHORT, LONG)
        for n in (16, 2)
        for d in (128, 64)
    ),
    Headline("laser", SDPA, f"{SHORT},n=16,d=128"),
    Headline("gated_delta", ("fla",), f"{SHORT},n=16,d=128"),
    Headline("gla", ("fla",), f"{SHORT},n=16,d=128"),
    Headline("path", ("fla", *SDPA), f"{SHORT},n=16,d=128"),
    Headline("ccq(gated_delta)", ("base",), f"{SHORT},n=16,d=128"),
    Headline("lucid", ("sdpa",), "b=4,t=32768,h=16,n=2,d=128", ("decode",)),
    Headline("path", ("sdpa",), "b=2,t=32768,h=16,n=16,d=128", ("decode",)),
    Headline("gated_delta", (), "b=2,t=32768,h=16,n=16,d=128", ("decode",)),
    Headline("laser", SDPA, f"{SHORT},n=16,d=64"),
    Headline("path", ("fla", *SDPA), f"{SHORT},n=16,d=64"),
    Headline("gated_delta", ("fla",), f"{SHORT},n=16,d=256"),
    *(
        Headline(mechanism, peers, f"{SHORT},n=16,d=128", BOTH, backend)
        for backend, mechanism, peers in (
            ("pallas", "softmax", ("cudnn", "xla")),
            ("pallas", "lucid", ("cudnn",)),
            ("pallas", "gated_delta", ("torch",)),
            ("cupy", "softmax", ("flash_sdpa",)),
            ("cupy", "lucid", ("torch", "flash_sdpa")),
            ("cupy", "gated_delta", ("torch",)),
            ("triton", "delta", ("fla",)),
            ("triton", "gsa", ("fla",)),
            ("triton", "retention", ("fla",)),
            ("triton", "differential", SDPA),
        )
    ),
)
"""The benchmarks, in half precision; the most important first."""

ROUNDS, ROUNDS_ON_A_CPU = "20", "2"


def tasks(options: RunOptions) -> list[ProcessTask]:
    """One process for each mechanism and size."""
    return list(_tasks(options))


def _tasks(options: RunOptions) -> Iterator[ProcessTask]:
    rounds = ROUNDS_ON_A_CPU if options.is_cpu else ROUNDS
    for mechanism, peers, sizes, works, backend in HEADLINES:
        yield benchmark(
            f"{backend} {mechanism} {' '.join(works)} {sizes}",
            backend,
            options,
            *("--mechanism", mechanism, "--sizes", sizes, "--rounds", rounds),
            *(word for work in works for word in ("--work", work)),
            *(word for peer in peers for word in ("--peer", peer)),
            *(() if peers else ("--no-peers",)),
            *("--dtype", dtype_of(backend, options)),
            seconds=25.0,
        )
