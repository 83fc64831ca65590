"""Equivalent mutants: they compute the same result, so that no case can kill them.

They are listed in a TOML file, each with a reason. A mutant is named by its key, which contains the
text of its line before and after the change, so that the list stays valid if the file changes
elsewhere.

    [[group]]
    target = "mykernel.solve"
    reason = "rows beyond the last are stored nowhere"
    mutants = ["solve: if row < rows: -> if row <= rows:"]

The list is strict: a reason may not be empty, and a mutant that is killed, or that the target does
not have, is an error.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path

from precondattn_conformance.mutation.record import MutationRecord

OURS = Path(__file__).with_name("equivalents.toml")
"""The list for precondattn's own kernels."""


Known = dict[tuple[str, str], str]
"""The reason for each equivalent mutant, by target and key."""


def equivalents(targets: Iterable[str], file: Path | None) -> Known:
    """The equivalent mutants of targets, from the list `OURS` and from a file.

    Raises
    ------
    ValueError
        if the file is not as above.
    """
    found: Known = {}
    wanted = set(targets)
    for path in (OURS, file):
        if path is None:
            continue
        try:
            groups = tomllib.loads(path.read_text(encoding="utf-8")).get("group", [])
            for group in groups:
                reason, of, mutants = group["reason"], group["target"], group["mutants"]
                if not reason.strip():
                    raise ValueError(f"an empty reason for mutants of {of}")
                if of in wanted:
                    found |= {(of, key): reason for key in mutants}
        except KeyError as missing:
            raise ValueError(f"{path}: a group without {missing}") from None
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: {error}") from None
    return found


def wrong_equivalents(known: Known, record: MutationRecord) -> list[str]:
    """The listed mutants that are killed, or that the target does not have."""
    wrong = []
    for target, key in known:
        entry = record.entries[target].get(key)
        if entry is None:
            wrong.append(f"{target}: no such mutant: {key}")
        elif entry.is_killed:
            wrong.append(f"{target}: killed by {entry.case}: {key}")
    return wrong
