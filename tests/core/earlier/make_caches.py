"""Save two caches as they were saved before 0.2.0; this needs the code at that time.

    git worktree add /tmp/before c94fffa0
    cd /tmp/before && python THIS_FILE

Their state dicts have no version. The cache of `gla` has no short names of states either, as the
first caches that could be saved.
"""

from pathlib import Path

import numpy as np

import precondattn as pa

HELD = 4
MECHANISMS = ("lucid", "gla")


def inputs_of(expression):
    """The inputs of six tokens."""
    rng = np.random.default_rng(0)
    q, k, v, g = rng.normal(size=(4, 2, 6, 2, 4))
    return {"q": q, "k": k, "v": v} | ({"g": -np.abs(g)} if expression == "gla" else {})


def main():
    for expression in MECHANISMS:
        m, x = pa.parse(expression), inputs_of(expression)
        first = {name: array[:, :HELD] for name, array in x.items()}
        _, cache = m.extend(m.init_cache(**x, capacity=8), **first)
        saved = {key.replace("state S: ", "state: "): a for key, a in cache.state_dict().items()}
        np.savez_compressed(Path(__file__).with_name(f"{expression}.npz"), **saved)


if __name__ == "__main__":
    main()
