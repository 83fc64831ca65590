"""The ledgers of the backends, which turn kernels on, are written from saved runs.

    python -m precondattn_gpu.ledger docs/measurements/gpu

A kernel has an entry if a call of it agreed with the oracle on a device, and no call of the same
family, verb, dtype and width disagreed. Only calls on the same compute capability, from the same
code and the same assembler count. The file is `ledger.json` in the package of the backend.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

from precondattn.json_types import JsonObject
from precondattn.kernel_backend.ledger import FILE, LedgerEntry
from precondattn_gpu.first import BUNDLED
from precondattn_gpu.options import BACKENDS
from precondattn_gpu.results import Results
from precondattn_gpu.task import CRASHED, FAILED, PASSED, TIMED_OUT, WRONG

FILES = ("roof", "alive", BUNDLED)
"""The files of results whose calls are compared with the oracle and carry ledger entries."""


BAD = (WRONG, FAILED, CRASHED, TIMED_OUT)


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m precondattn_gpu.ledger FOLDER")
    for backend, entries in shown(Path(sys.argv[1])).items():
        path = write(backend, entries)
        print(f"{len(entries)} entries in {path}")


def shown(measurements: Path) -> dict[str, list[LedgerEntry]]:
    """The entries of all devices, by backend."""
    found: dict[str, set[LedgerEntry]] = {backend: set() for backend in BACKENDS}
    for folder in sorted(path for path in measurements.glob("*") if path.is_dir()):
        paths = [path for name in FILES if (path := folder / f"{name}.json").exists()]
        calls = [entry for path in paths for entry in Results.load(path).tasks.values()]
        good = {each for e in calls if e["status"] == PASSED for each in _entries(e)}
        bad = {each for e in calls if e["status"] in BAD for each in _entries(e)}
        for backend, entry in good - bad:
            found[backend].add(entry)
    return {backend: sorted(entries) for backend, entries in found.items()}


def _entries(entry: JsonObject) -> list[tuple[str, LedgerEntry]]:
    """The backend and each entry that a call gives if it agrees with the oracle."""
    data = entry["data"]
    return [(data["backend"], LedgerEntry(**each)) for each in data.get("ledger", ())]


def write(backend: str, entries: list[LedgerEntry]) -> Path:
    """Write the ledger of a backend's package."""
    spec = find_spec(f"precondattn_{backend}")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).with_name(FILE)
    lines = [json.dumps(entry._asdict()) for entry in entries]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    main()
