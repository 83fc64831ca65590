"""The JSON record of a run (its schema is `schema.json`), which is valid at any moment of the run.

During a run the file is replaced about once a second, so a run that is killed leaves a valid record
in which `complete` is false. Only the id of the running case is written in place, into space
reserved near the beginning of the file, so a case that kills the process is always named.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING

import precondattn
from precondattn_conformance.report import environment
from precondattn_conformance.report.printable import all_printable, printable
from precondattn_conformance.report.refusal import in_few_words
from precondattn_conformance.report.result import Result
from precondattn_conformance.status import SKIPPED, UNSUPPORTED

if TYPE_CHECKING:
    from precondattn.json_types import Json, JsonObject
    from precondattn_conformance.case import Case
    from precondattn_conformance.enough import CheckShare
    from precondattn_conformance.promises import Promise
    from precondattn_conformance.runner import Outcome

SCHEMA = "precondattn-conformance/1"
SECONDS = 1.0
"""The shortest time in seconds between two replacements of the file."""

PATIENCE = 20
"""The shortest time between two replacements, as a multiple of the time that writing took."""

RESERVED = 512
"""The number of bytes reserved for the id of the running case."""


@dataclass
class Coverage:
    """The number of compared cases of a mechanism and check, and why others were not compared."""

    mechanism: str
    check: str
    compared: int = 0
    unsupported: Counter[str] = field(default_factory=Counter)
    """The number of declined cases by the backend's reason."""
    skipped: Counter[str] = field(default_factory=Counter)
    """The number of skipped cases by reason."""

    @property
    def total(self) -> int:
        return self.compared + self.unsupported.total() + self.skipped.total()

    def to_json(self) -> JsonObject:
        """The entry in a record, without empty fields."""
        reasons = {"unsupported": dict(self.unsupported), "skipped": dict(self.skipped)}
        entry = {"mechanism": self.mechanism, "check": self.check, "compared": self.compared}
        return {**entry, **{name: counts for name, counts in reasons.items() if counts}}


@dataclass
class RunRecord:
    """A run: the results of its cases, its backends and its environment."""

    date: str
    """The time at which the run began, in UTC."""
    suite: str
    """The version of precondattn that contains the suite and the oracle."""
    backends: list[dict[str, str]]
    """The backends under test (name, package, version), preferred first. Empty: the defaults."""
    level: str
    device: str | None = None
    """The device as requested."""
    filters: dict[str, list[str]] = field(default_factory=dict)
    environment: JsonObject = field(default_factory=dict)
    outcomes: list[Result] = field(default_factory=list)
    layouts: dict[str, JsonObject] = field(default_factory=dict)
    """The sizes and masks of calls, by the name of the layout."""
    promises: list[JsonObject] = field(default_factory=list)
    """For each convention, whether it is promised and whether it holds. Written when the run ends;
    empty if no backend is named."""
    checks: list[JsonObject] = field(default_factory=list)
    """How much of each check was compared, if a backend is named. Written when the run ends."""
    seconds: float = 0.0
    complete: bool = False
    running: str | None = None
    """The case that was running when the record was last written."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the backends under test."""
        return tuple(backend["name"] for backend in self.backends)

    @property
    def coverage(self) -> list[Coverage]:
        """The coverage of the outcomes, in the order of their mechanisms and checks."""
        rows: dict[tuple[str, str], Coverage] = {}
        for result in self.outcomes:
            key = result.mechanism, result.check
            row = rows.setdefault(key, Coverage(*key))
            row.compared += result.is_compared
            if result.status == UNSUPPORTED:
                row.unsupported[in_few_words(result.reason, self.names)] += 1
            if result.status == SKIPPED:
                row.skipped[result.headline or "no reason given"] += 1
        return list(rows.values())

    def count(self, status: str) -> int:
        return sum(result.status == status for result in self.outcomes)

    def head(self) -> JsonObject:
        """The fields that precede coverage and outcomes."""
        names = ("date", "seconds", "suite", "backends", "level", "device", "filters")
        more = ("environment", "layouts", "promises", "checks")
        return {name: getattr(self, name) for name in (*names, *more)} | {
            "seconds": round(self.seconds, 3)
        }


def load(path: Path | str) -> RunRecord:
    """A record from its file.

    Raises
    ------
    ValueError
        if the file does not exist, is not a record, or has another version of the schema.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no record of a conformance run: {error}") from None
    declared = content.get("schema") if isinstance(content, dict) else None
    if declared != SCHEMA:
        schema, _, version = SCHEMA.partition("/")
        if isinstance(declared, str) and declared.startswith(f"{schema}/"):
            declared_version = declared.removeprefix(f"{schema}/")
            raise ValueError(
                f"{path} is a record of version {declared_version} of the schema; this is "
                f"precondattn {precondattn.__version__}, which reads version {version}"
            )
        raise ValueError(f"{path} is no record of a conformance run: its schema is not {SCHEMA!r}")
    content = all_printable(content)
    try:
        return RunRecord(
            **{name: content[name] for name in ("date", "suite", "backends", "level", "complete")},
            **{name: content[name] for name in ("device", "filters", "environment", "seconds")},
            running=content.get("running"),
            layouts=content.get("layouts", {}),
            promises=list(content.get("promises", [])),
            checks=list(content.get("checks", [])),
            outcomes=[Result.from_json(entry) for entry in content["outcomes"]],
        )
    except KeyError as error:
        raise ValueError(f"{path} is no whole record: {error} is missing") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no record of a conformance run: {error}") from None


def is_record(path: Path | str) -> bool:
    """Whether a file declares itself a record of a conformance run, of any version."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    declared = content.get("schema") if isinstance(content, dict) else None
    return isinstance(declared, str) and declared.startswith(SCHEMA.partition("/")[0])


class RecordWriter:
    """Writes the record of a run. The file is valid whenever and however the run ends.

    If `path` is None, the record is kept in memory only. `record` is the record so far.

    with RecordWriter(path, backends=("mine",), level="smoke", device=None, filters={}) as writer:
        for case in cases:
            writer.started(case)
            writer.add(run_case(case, "mine"))
    """

    def __init__(
        self,
        path: Path | str | None,
        *,
        backends: tuple[str, ...],
        level: str,
        device: str | None,
        filters: dict[str, tuple[str, ...]],
    ) -> None:
        self.path = None if path is None else Path(path)
        self.record = RunRecord(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            suite=precondattn.__version__,
            backends=environment.backends(backends),
            level=level,
            device=device,
            filters={name: list(chosen) for name, chosen in filters.items() if chosen},
            environment={**environment.describe(), "accelerators": {}},
        )
        self._began = self._due = time.monotonic()
        self._lines: list[str] = []
        self._file: IO[bytes] | None = None

    def __enter__(self) -> RecordWriter:
        """Write the record once, so that an unwritable path raises an error at the start.

        Raises
        ------
        ValueError
            if the record can not be written.
        """
        try:
            self._write()
        except OSError as error:
            raise ValueError(f"no record can be written to {self.path}: {error}") from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(complete=kind is None)

    def started(self, case: Case) -> None:
        """Record which case is running."""
        self.record.running = printable(case.id)
        if self._file is not None:
            self._file.seek(len(_opening(complete=False)))
            self._file.write(_padded(self.record.running))

    def add(self, outcome: Outcome | Result) -> None:
        """Add the outcome of a case."""
        result = Result.of_outcome(outcome)
        self.record.outcomes.append(result)
        self._lines.append(_text(result.to_json()))
        if not isinstance(outcome, Result):
            layout = outcome.case.layout
            self.record.layouts.setdefault(result.layout, all_printable(layout._asdict()))
        self.record.running = None
        if time.monotonic() >= self._due:
            self._write()

    def put_in_order(self, ids: Iterable[str]) -> None:
        """Arrange the outcomes in the order of these ids of cases."""
        position = {printable(text): number for number, text in enumerate(ids)}
        results = self.record.outcomes
        order = sorted(
            range(len(results)), key=lambda i: position.get(results[i].id, len(position))
        )
        self.record.outcomes = [results[i] for i in order]
        self._lines = [self._lines[i] for i in order]

    def summarize(self, promises: Iterable[Promise], shares: Iterable[CheckShare]) -> None:
        """Set what was compared: conventions, and shares of the checks."""
        self.record.promises = [promise.to_json() for promise in promises]
        self.record.checks = [all_printable(share.to_json()) for share in shares]

    def close(self, *, complete: bool) -> None:
        """Write the record for the last time."""
        self.record.complete = complete
        if complete:
            self.record.running = None
        self._write()
        self._leave_file()

    def _write(self) -> None:
        """Replace the file by the record so far."""
        start = time.monotonic()
        self.record.seconds = start - self._began
        self.record.environment["accelerators"] = environment.accelerators()
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
            try:
                temporary.write_bytes(self._bytes())
                self._leave_file()
                os.replace(temporary, self.path)
            finally:
                temporary.unlink(missing_ok=True)
            self._file = self.path.open("r+b", buffering=0)
        now = time.monotonic()
        self._due = now + max(SECONDS, PATIENCE * (now - start))

    def _bytes(self) -> bytes:
        running = b"null" if self.record.complete else _padded(self.record.running)
        head = _text(self.record.head(), indent=1).removeprefix("{").removesuffix("\n}")
        rows = [_text(row.to_json()) for row in self.record.coverage]
        lists = f'"coverage": {_one_a_line(rows)},\n "outcomes": {_one_a_line(self._lines)}'
        # Characters that UTF-8 can not encode become JSON escapes.
        rest = f"{head},\n {lists}\n}}\n".encode("utf-8", "backslashreplace")
        return _opening(complete=self.record.complete) + running + b"," + rest

    def _leave_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def _opening(*, complete: bool) -> bytes:
    """The part of the file before the running case."""
    value = json.dumps(complete)
    return f'{{\n "schema": "{SCHEMA}",\n "complete": {value},\n "running": '.encode()


def _text(value: Json, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)


def _one_a_line(items: list[str]) -> str:
    return "[\n  " + ",\n  ".join(items) + "\n ]" if items else "[]"


def _padded(case: str | None) -> bytes:
    """The id of a case, or null, padded with blanks to the reserved space."""
    text = json.dumps(case)
    while case and len(text) > RESERVED:
        case = case[: 3 * len(case) // 4]
        text = json.dumps(f"{case}…")
    return text.encode("ascii").ljust(RESERVED)
