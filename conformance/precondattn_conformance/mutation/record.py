"""A JSON record of the results of all mutants, so that a run can be stopped and continued.

A killed mutant is not run again, nor is one that survived a run with the same options. If the text
of a target has changed, all its mutants run again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from precondattn.json_types import JsonObject
from precondattn_conformance.mutation.mutant import Mutant
from precondattn_conformance.mutation.target import Target
from precondattn_conformance.mutation.trial import INVALID, KILLED, SURVIVED, TIMEOUT, MutantVerdict


@dataclass
class MutantEntry:
    """A mutant and its result."""

    key: str
    line: int
    kind: str
    function: str
    before: str
    after: str
    status: str = ""
    """The result; empty if the mutant has not been run."""
    case: str = ""
    """The case that killed it."""
    reason: str = ""
    options: str = ""
    """The options of the run that killed it, or of the last one that it survived."""
    tried: list[str] = field(default_factory=list)
    """The options of all runs that it survived."""

    @property
    def is_killed(self) -> bool:
        return self.status in (KILLED, TIMEOUT)

    def needs(self, options: str) -> bool:
        """Whether a run with these options can give a new result."""
        return not self.is_killed and self.status != INVALID and options not in self.tried

    def add(self, verdict: MutantVerdict, options: str) -> None:
        """Add the result of a run. A mutant whose lines no case executes survives."""
        if self.status == SURVIVED and verdict.status not in (KILLED, TIMEOUT, SURVIVED):
            self.tried.append(options)
            return
        self.status, self.case, self.reason = verdict.status, verdict.case, verdict.reason
        self.options = options
        if not self.is_killed:
            self.tried.append(options)


class MutationRecord:
    """The entries of all targets, in the order of their texts."""

    def __init__(self, targets: Iterable[Target], file: Path | None) -> None:
        """Entries that are already in the file are loaded, including those of other targets.

        Raises
        ------
        ValueError
            if the file is not such a record.
        """
        self.file = file
        self.texts: dict[str, str] = {}
        self.entries: dict[str, dict[str, MutantEntry]] = {}
        """The entries by the name of the target and the key of the mutant."""
        self.others = _saved(file)
        for target in targets:
            saved = self.others.pop(target.name, {})
            text = self.texts[target.name] = hashlib.sha256(target.text.encode()).hexdigest()[:16]
            same = saved.get("mutants", []) if saved.get("text") == text else []
            known = {entry["key"]: entry for entry in same}
            self.entries[target.name] = {
                m.key: MutantEntry(**{**known.get(m.key, {}), **_place(m)})
                for m in target.mutants()
            }

    def entry_of(self, mutant: Mutant) -> MutantEntry:
        """The entry of a mutant."""
        return self.entries[mutant.target][mutant.key]

    def save(self) -> None:
        """Write the whole file at once: a run that is stopped meanwhile keeps the previous file."""
        if self.file is None:
            return
        data = dict(self.others)
        for name, entries in self.entries.items():
            mutants = [asdict(entry) for entry in entries.values()]
            data[name] = {"text": self.texts[name], "mutants": mutants}
        beside = self.file.with_suffix(self.file.suffix + ".part")
        beside.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(beside, self.file)


def _saved(file: Path | None) -> JsonObject:
    if file is None or not file.exists() or not file.stat().st_size:
        return {}
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        for target in saved.values():
            target["text"], target["mutants"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"--record {file}: expected a record of mutants: {error!r}") from None
    return dict(saved)


def _place(mutant: Mutant) -> JsonObject:
    names = ("key", "line", "kind", "function", "before", "after")
    return {name: getattr(mutant, name) for name in names}
