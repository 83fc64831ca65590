"""Measurements of the scripts of this folder, saved as JSON and shown between marks on a page."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def save(path: Path, run: dict[str, Any]) -> None:
    """Write a run; each list of numbers is one line."""
    text = json.dumps(run, indent=1, ensure_ascii=False)
    text = re.sub(r"\[[^\[\]]*\]", lambda found: " ".join(found[0].split()), text)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def load(path: Path) -> dict[str, Any]:
    """A saved run."""
    saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return saved


def with_measured(path: Path, measured: str) -> str:
    """The text of a page, with the measurements between its marks."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n\n{measured}\n\n{END}{rest.partition(END)[2]}"


def captioned(path: str, finding: str) -> str:
    """A figure, as Markdown, whose caption and alternative text say what was found."""
    return f":::{{figure}} {path}\n:alt: {finding}\n\n{finding}\n:::"


def falls(losses: dict[str, list[float]]) -> str:
    """The first and the last loss of each mechanism, as a list in a sentence."""
    return ", ".join(f"{of[0]:.2f} to {of[-1]:.2f} with {name}" for name, of in losses.items())


def shown(
    path: Path,
    record: Callable[[], dict[str, Any]],
    draw: Callable[[dict[str, Any]], None],
    page: Path,
    text: Callable[[dict[str, Any]], str],
) -> None:
    """Record and save a run, unless `--draw` asks for the saved one; draw it, update the page."""
    if "--draw" not in sys.argv:
        save(path, record())
    saved = load(path)
    draw(saved)
    page.write_text(text(saved), encoding="utf-8")
