"""Many small trainings in sequence; after an interruption, finished ones are read from files."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

FINISHED = Path(__file__).parent.parent / "_build" / "claims"
"""A file for each finished training; remove the folder to train anew."""
SEEDS = (0, 1, 2, 3, 4)


def trained(
    name: str, jobs: Mapping[str, Callable[[], dict[str, Any]]], kept: bool
) -> dict[str, dict[str, Any]]:
    """The result of each job, with its seconds of one core; read back and saved where `kept`."""
    found: dict[str, dict[str, Any]] = {}
    for i, (title, job) in enumerate(jobs.items()):
        file = FINISHED / name / f"{title}.json"
        if not kept or not file.exists():
            if kept:
                print(f"{name} {i + 1}/{len(jobs)}: {title}", file=sys.stderr)
            start = time.process_time()
            result = {**job(), "seconds": round(time.process_time() - start, 1)}
            if kept:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(result), encoding="utf-8")
        else:
            result = json.loads(file.read_text(encoding="utf-8"))
        found[title] = result
    return found


def fit(
    model: Any, rate: float, updates: int, loss_of: Callable[[], Any], *, shown: bool
) -> list[float]:
    """The losses of a training: AdamW, one cycle of rates, and gradients of norm 1 at most."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=updates)
    losses = []
    for _ in steps(updates, shown):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
        losses.append(loss.item())
    return losses


def steps(count: int, shown: bool) -> Iterator[int]:
    """0, 1, … count − 1, with a bar on the standard error."""
    for i in range(count):
        yield i
        if shown and (i + 1) % max(1, count // 30) == 0:
            filled = 30 * (i + 1) // count
            bar = "#" * filled + "." * (30 - filled)
            end = "\n" if filled == 30 else ""
            print(f"\r[{bar}] {i + 1}/{count} steps{end}", end="", file=sys.stderr, flush=True)
