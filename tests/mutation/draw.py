"""Draws a hundred mutants with a seed from all files that compute or check.

No file gives more than one, each folder gives at least one, and larger folders give more. Mutants
of JAX take longest, since each is traced and compiled again; at most fifteen are drawn.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from precondattn_conformance.mutation.mutant import Mutant
from precondattn_conformance.mutation.python_mutants import python_mutants

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "precondattn",
    "backends/precondattn_portable",
    "backends/precondattn_torch",
    "backends/precondattn_jax",
)
PRINTS = ("precondattn/command_line", "precondattn/__main__.py")
"""Modules that neither compute nor check."""
OF_JAX = ("jax", "flax")


@dataclass(frozen=True)
class DrawnMutant:
    """A mutant of the sample, identified by names that stay valid when lines above it change."""

    file: str
    key: str
    kind: str

    @property
    def is_of_jax(self) -> bool:
        """Whether JAX traces and compiles the mutant."""
        return any(name in self.file for name in OF_JAX)

    @property
    def module(self) -> str:
        """The name of the mutant's module."""
        parts = Path(self.file).with_suffix("").parts
        parts = parts[1:] if parts[0] == "backends" else parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def mutant(self) -> Mutant:
        """The mutant at its current place in the file.

        Raises
        ------
        LookupError
            if its file no longer contains it.
        """
        path = ROOT / self.file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for mutant in python_mutants(text):
            if mutant.key == self.key:
                return mutant
        raise LookupError(f"{self.file} has no mutant {self.key!r}")

    @property
    def is_there(self) -> bool:
        """Whether the mutant's file still contains it."""
        try:
            self.mutant()
        except LookupError:
            return False
        return True

    def saved(self) -> dict[str, Any]:
        """The fields as JSON data."""
        return asdict(self)


def draw(count: int = 100, seed: int = 20, most_of_jax: int = 15) -> list[DrawnMutant]:
    """The sample, in the order of its files."""
    random_numbers = random.Random(seed)
    by_file = dict(_mutants_of_files())
    chosen: list[DrawnMutant] = []
    for folder, share in _shares(by_file, count).items():
        files = [file for file in by_file if _folder(file) == folder]
        random_numbers.shuffle(files)
        for file in files:
            each = random_numbers.choice(by_file[file])
            if sum(_folder(drawn.file) == folder for drawn in chosen) == share:
                break
            if each.is_of_jax and sum(drawn.is_of_jax for drawn in chosen) == most_of_jax:
                continue
            chosen.append(each)
    rest = [file for file in by_file if file not in {drawn.file for drawn in chosen}]
    random_numbers.shuffle(rest)
    for file in rest:
        each = random_numbers.choice(by_file[file])
        if len(chosen) < count and not each.is_of_jax:
            chosen.append(each)
    return sorted(chosen, key=lambda drawn: (drawn.file, drawn.key))


def _mutants_of_files() -> Iterable[tuple[str, list[DrawnMutant]]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            file = path.relative_to(ROOT).as_posix()
            mutants = python_mutants(path.read_text(encoding="utf-8"))
            if mutants and not file.startswith(PRINTS):
                yield file, [DrawnMutant(file, mutant.key, mutant.kind) for mutant in mutants]


def _folder(file: str) -> str:
    """The folder of a file in two levels, such as `precondattn/cache` or
    `backends/precondattn_jax`."""
    parts = file.split("/")
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def _shares(by_file: dict[str, list[DrawnMutant]], count: int) -> dict[str, int]:
    """The number of mutants from each folder, in proportion to all its mutants; at least one."""
    sizes: dict[str, int] = defaultdict(int)
    for file, mutants in by_file.items():
        sizes[_folder(file)] += len(mutants)
    total = sum(sizes.values())
    return {folder: max(1, int(count * size / total)) for folder, size in sizes.items()}
