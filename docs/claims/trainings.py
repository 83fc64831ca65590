"""Many small trainings in sequence; after an interruption, finished ones are read from files."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

FINISHED = Path(__file__).parent.parent / "_build" / "claims"
"""A file for each finished training; remove the folder to train anew."""
SEEDS = (0, 1, 2, 3, 4)


def trained(
    name: str,
    train: Callable[..., dict],
    settings: Mapping[str, tuple],
    *,
    names: Iterable[str] | None = None,
    seeds: tuple[int, ...] = SEEDS,
    kept: bool = True,
    **arguments,
) -> dict:
    """For each seed and setting, a title and arguments, what `train` finds, and its seconds."""
    import torch

    torch.set_num_threads(1)
    chosen, runs = list(settings if names is None else names), {}
    for seed in seeds:
        for title in chosen:
            key = _key(title, seed)
            file = FINISHED / name / f"{key}.json"
            if kept and file.exists():
                runs[key] = json.loads(file.read_text(encoding="utf-8"))
                continue
            start = time.process_time()
            torch.manual_seed(seed)
            runs[key] = train(seed, *settings[title], **arguments)
            runs[key]["seconds"] = round(time.process_time() - start, 1)
            if kept:
                print(f"{name}: {key}, {runs[key]['seconds']} s", file=sys.stderr)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(runs[key]), encoding="utf-8")
    return {"seeds": list(seeds), "names": chosen, "runs": runs}


def _key(title: str, seed: int) -> str:
    return f"{title}, seed {seed}".replace("/", ":")


def over_seeds(found: dict, title: str, *path: str) -> np.ndarray:
    """A result of each seed, (seeds, …); objects if they are of different lengths."""
    runs = [found["runs"][_key(title, seed)] for seed in found["seeds"]]
    for part in path:
        runs = [run[part] for run in runs]
    ragged = len({len(run) for run in runs if isinstance(run, list)}) > 1
    return np.array(runs, dtype=object if ragged else None)


def titles(found: dict, settings: Iterable[str]) -> list[str]:
    """The settings that were trained."""
    return [title for title in settings if _key(title, found["seeds"][0]) in found["runs"]]


def gaining(change: np.ndarray) -> str:
    """How many of the changes are below 0."""
    return f"{(change < 0).sum()} of {len(change)}"


def fit(model, rate: float, updates: int, loss_of: Callable) -> list[float]:
    """The losses of a training: AdamW, one cycle of rates, and gradients of norm 1 at most."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=updates)
    losses = []
    for _ in range(updates):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
        losses.append(loss.item())
    return losses


def means(losses: list[float], every: int) -> list[float]:
    """The mean of each so many losses."""
    return [round(float(np.mean(losses[i : i + every])), 4) for i in range(0, len(losses), every)]


def cross_entropy(logits, targets):
    """Of logits (…, t, n) and targets (…, t)."""
    import torch

    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
