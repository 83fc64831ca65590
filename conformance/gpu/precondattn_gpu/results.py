"""A file of results: one JSON file, replaced after every task.

Files are carried between machines, so their number and sizes are limited. A file holds no message
longer than `LONGEST` characters. If a file would still be larger than `LARGEST`, a result is saved
without its message and its data, and says so.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from precondattn_gpu.task import INTERRUPTED, TaskOutcome

if TYPE_CHECKING:
    from precondattn.json_types import Json, JsonObject

FORMAT = 1
LONGEST = 4000
LARGEST = 15 << 20
"""Size limit of a file in bytes. The hard limit is 16 MiB, and the header needs some of it."""


class Results:
    """The results of one file, by the name of the task."""

    def __init__(self, file: str, machine: JsonObject | None = None) -> None:
        self.file = file
        self.machine = machine or {}
        self.tasks: dict[str, JsonObject] = {}
        self._size = 0

    @classmethod
    def load(cls, path: Path) -> Results:
        """The results of a file.

        Raises
        ------
        ValueError
            if it is no file of results, or has another format.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is no file of results: {error}") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"{path} is no file of results of format {FORMAT}")
        results = cls(content["file"], content["machine"])
        for name, entry in content["tasks"].items():
            results._put(name, entry)
        return results

    def is_done(self, name: str) -> bool:
        """Whether a task has an outcome; one that was interrupted runs again."""
        return bool(self.tasks.get(name, {}).get("status", INTERRUPTED) != INTERRUPTED)

    def add(self, name: str, outcome: TaskOutcome, seconds: float, **more: Json) -> None:
        """Set the outcome of a task, replacing an earlier one."""
        entry = asdict(outcome) | {"seconds": round(seconds, 2)} | more
        entry["message"] = shortened(outcome.message)
        old = len(_text(self.tasks[name])) if name in self.tasks else 0
        if self._size - old + len(_text(entry)) > LARGEST:
            entry |= {"message": "left out: the file is as large as it may be", "data": {}}
        self._put(name, entry)

    def _put(self, name: str, entry: JsonObject) -> None:
        if name in self.tasks:
            self._size -= len(_text(self.tasks[name]))
        self._size += len(_text(entry))
        self.tasks[name] = entry

    def count(self, status: str) -> int:
        return sum(entry["status"] == status for entry in self.tasks.values())

    def save(self, folder: Path) -> Path:
        """Replace the file in a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.file}.json"
        lines = [f"  {json.dumps(name)}: {_text(entry)}" for name, entry in self.tasks.items()]
        head = {"format": FORMAT, "file": self.file, "machine": self.machine}
        text = json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}")
        text += ',\n "tasks": {\n' + ",\n".join(lines) + "\n }\n}\n"
        temporary = path.with_suffix(".part")
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(temporary, path)
        return path


def shortened(message: str) -> str:
    """The beginning and the end of a long message, and how much is left out."""
    message = message.strip()
    if len(message) <= LONGEST:
        return message
    part = LONGEST // 2 - 40
    left_out = len(message) - 2 * part
    return f"{message[:part]}\n… {left_out} characters are left out …\n{message[-part:]}"


def _text(entry: Json) -> str:
    return json.dumps(entry, ensure_ascii=False)
