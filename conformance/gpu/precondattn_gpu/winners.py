"""Writes the winners of the stage `tuning` to a file of configurations that the backend reads.

    python -m precondattn_gpu.winners docs/measurements/gpu/nvidia_h200

The file is `tuned/NAME.json` in the folder of the backend `triton`; NAME is the device's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from precondattn_gpu.machine import folder_name
from precondattn_gpu.results import Results

if TYPE_CHECKING:
    from precondattn.json_types import JsonObject


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m precondattn_gpu.winners FOLDER")
    import precondattn_triton

    results = Results.load(Path(sys.argv[1]) / "tuning.json")
    path = write(results, Path(precondattn_triton.__file__).parent / "tuned")
    print(f"{len(winners(results))} configurations written to {path}")


def write(results: Results, folder: Path) -> Path:
    """Write the winners to the device's file in a folder."""
    device = results.machine["device"]
    path = folder / f"{folder_name(device)}.json"
    path.parent.mkdir(exist_ok=True)
    versions, entries = results.machine["versions"], winners(results)
    content = {"device": device, "versions": versions, "configurations": entries}
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def winners(results: Results) -> list[JsonObject]:
    """The configurations that were faster than the default."""
    data = [entry["data"] for entry in results.tasks.values()]
    return [
        {"kernel": d["kernel"], "width": d["width"], "half": True, "configuration": d["winner"]}
        for d in data
        if d.get("winner")
    ]


if __name__ == "__main__":
    main()
