"""Code that each Python process of a test run executes first, if `MUTATION` names a JSON file.

The folder is on `PYTHONPATH`, so that processes started by a test execute it too.

`{"plant": {"module": ..., "start": ..., "stop": ..., "new": ...}}` replaces the text of one module
in memory: no file is written, and two mutants can run at the same time.

`{"note": {module: {line: [number, ...]}}, "folder": ...}` writes which tests execute which lines:
`number<TAB>test`, one file for each process. It needs `sys.monitoring` of Python 3.12, which costs
nothing for lines that are not watched.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

TOOL = 4
STARTED_BY = os.environ.get("PYTEST_CURRENT_TEST", "")
"""The test that started this process, even if the process runs tests itself."""


class Planted(SourceFileLoader):
    """Loads a module with one change in its text."""

    change: dict[str, Any]

    def get_code(self, fullname: str) -> CodeType:
        with open(self.path, encoding="utf-8", newline="") as file:
            text = file.read()
        start, stop, new = (self.change[name] for name in ("start", "stop", "new"))
        return compile(text[:start] + new + text[stop:], self.path, "exec", dont_inherit=True)


class Watched(SourceFileLoader):
    """Loads a module whose code notes the lines that it executes."""

    lines: dict[int, list[int]]
    notes: Notes

    def get_code(self, fullname: str) -> CodeType | None:
        code = super().get_code(fullname)
        if code is not None:
            self._watch(code)
        return code

    def _watch(self, code: CodeType) -> None:
        if any(line in self.lines for _, _, line in code.co_lines()):
            self.notes.lines[code] = self.lines
            sys.monitoring.set_local_events(TOOL, code, sys.monitoring.events.LINE)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._watch(constant)


class Notes:
    """Writes each pair of a mutant and a test once."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.lines: dict[CodeType, dict[int, list[int]]] = {}
        self.seen: set[tuple[int, str]] = set()
        sys.monitoring.use_tool_id(TOOL, "mutation")
        sys.monitoring.register_callback(TOOL, sys.monitoring.events.LINE, self.line)

    def line(self, code: CodeType, line: int) -> None:
        test = (STARTED_BY or os.environ.get("PYTEST_CURRENT_TEST", "")).rpartition(" (")[0]
        for number in self.lines[code].get(line, ()):
            if (number, test) not in self.seen:
                self.seen.add((number, test))
                with open(f"{self.folder}/{os.getpid()}.notes", "a", encoding="utf-8") as file:
                    file.write(f"{number}\t{test}\n")


class Finder(MetaPathFinder):
    """Finds the modules that are changed or watched, before Python's own finder does."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.plant = task.get("plant", {})
        self.note = task.get("note", {})
        self.notes = Notes(task["folder"]) if self.note else None

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.plant.get("module") and fullname not in self.note:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            return None
        if fullname in self.note:
            assert self.notes is not None
            loader: SourceFileLoader = Watched(fullname, spec.origin)
            loader.lines = {int(line): to for line, to in self.note[fullname].items()}
            loader.notes = self.notes
        else:
            loader = Planted(fullname, spec.origin)
            loader.change = self.plant
        spec.loader = loader
        return spec


if "MUTATION" in os.environ and __name__ == "sitecustomize":  # Not if a test collects it.
    with open(os.environ["MUTATION"], encoding="utf-8") as task:
        sys.meta_path.insert(0, Finder(json.load(task)))
