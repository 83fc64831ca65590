"""The committed ratios of the gate, by kind of machine.

A ratio of two times depends on the processor, on the number of threads, and on the version of the
library that the peer belongs to. So it is compared only with one that was saved on a machine of the
same kind: all of `machine_kind()` is equal. The file has one entry for each kind.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from precondattn.json_types import JsonObject
from precondattn_conformance.bench import machine
from precondattn_conformance.bench.bootstrap import Interval

FILE = Path(__file__).with_name("committed_ratios.json")

LIBRARIES = ("numpy", "torch", "jax", "transformers")
SETTINGS = ("OMP_WAIT_POLICY", "XLA_FLAGS")
"""Environment variables that change times."""


@dataclass
class Committed:
    """The ratios of one kind of machine."""

    machine: JsonObject
    date: str
    flops_per_second: float
    """The rate of a large matrix product when the machine was idle."""
    ratios: dict[str, Interval]
    """The ratios, by row of the gate."""


def machine_kind() -> JsonObject:
    """What has to be equal so that ratios are comparable."""
    described = machine.describe()
    versions = described["versions"]
    return {
        **{name: described[name] for name in ("processor", "cores", "threads", "system")},
        "model": processor_model(),
        "versions": {name: versions[name] for name in LIBRARIES if name in versions},
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
    }


def processor_model(info: Path = Path("/proc/cpuinfo")) -> str:
    """Family, model and cache: a virtual machine may hide the processor's name."""
    lines = info.read_text().splitlines() if info.exists() else []
    found: dict[str, str] = {
        name.strip(): value.strip()
        for name, _, value in (line.partition(":") for line in reversed(lines) if line)
    }
    names = ("cpu family", "model", "cache size")
    return ", ".join(f"{name} {found[name]}" for name in names if name in found)


def load(path: Path = FILE) -> list[Committed]:
    """All entries of a file; none if it does not exist.

    Raises
    ------
    ValueError
        if the file has something else in it.
    """
    if not path.exists():
        return []
    try:
        return [
            Committed(**{**entry, "ratios": {n: Interval(*r) for n, r in entry["ratios"].items()}})
            for entry in json.loads(path.read_text(encoding="utf-8"))
        ]
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} has no ratios of the gate: {error}") from None


def of_this_kind(kind: JsonObject, path: Path = FILE) -> Committed | None:
    """The entry of this kind of machine."""
    return next((entry for entry in load(path) if entry.machine == kind), None)


def save(new: Committed, path: Path) -> None:
    """Write the ratios of one kind of machine, and keep those of others and of other rows."""
    entries = load(path)
    for entry in entries:
        if entry.machine == new.machine:
            new.ratios = {**entry.ratios, **new.ratios}
    kept = [entry for entry in entries if entry.machine != new.machine]
    content = [asdict(entry) for entry in [*kept, new]]
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
