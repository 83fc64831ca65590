"""Write `versions.md`: the versions with which the tests ran, from `measurements/versions/`.

    python docs/make_versions.py

The records are written by `nox -f conformance/versions/noxfile.py -- --save`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("versions.md")
RECORDS = Path(__file__).with_name("measurements") / "versions"

HEAD = """\
# Versions

This page lists the versions of Python and of the dependencies with which the tests have run. There
are three sets of versions: **lowest** contains the lower bounds of `pyproject.toml`, **pinned** the
versions of `constraints.txt`, and **newest** the newest versions on the package index on that day.

```console
$ pip install "nox[uv]"
$ nox -f conformance/versions/noxfile.py                     # everything, needs Python 3.11 to 3.13
$ nox -f conformance/versions/noxfile.py -s "numpy(lowest)"  # one session
```

There are four sessions:

* `numpy` installs neither PyTorch nor JAX, and skips tests that need them.
* `frameworks` installs both. From the next saved run on, it also installs Flax for the tests of
  layers.
* `kernels` runs the kernels of Triton and Pallas in interpreters, and tests the kernel tools.
* `everything` runs the whole test suite.

CI runs `everything` with the pinned set, and `numpy(lowest)`.

*Not run* means that no run is saved. For `precondattn conformance`, *skipped* counts the cases that
it lists as unsupported. The pytest run of the conformance suite itself uses the lower bound of
pytest in the extra `conformance`; the versions below are those of the tests that ran after it.

One dependency has a fault that concerns users. On a CPU, compiled code of jaxlib 0.10.2 may compute
a sum over a product from uninitialised memory if a factor repeats one number (jax-ml/jax issue
39103). The backend `jax` never uses such a factor. Your own compiled code around `reference` may
use one; to avoid the fault, set `XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=-reduce`.

`docs/make_versions.py` generates this page from saved runs.

"""

NOTES = """
## What is not in the table

* **CuPy** (14 or newer) needs a GPU, so no version of it has been tested. Its kernels are
  simulated.
* **Triton**: each PyTorch for Linux needs one version of it. 2.11 needs 3.6, 2.13 needs 3.7, and
  2.15 needs 3.9.

## Why the bounds are not lower

* **PyTorch**: the library has no code for versions before 2.11. The compilers of 2.9 and 2.10 can
  not compile operations on a cache.
* **array-api-compat**: with 1.13 and older versions, `torch.compile` can compile neither CCQ's gate
  nor the norm of its query.
* **JAX**: in 0.9, functions that JAX divides among devices (`custom_partitioning`) may not contain
  constants, so nearly all calls fail under `jit`.
* **Typer**: 0.15.0 does not work with the newest Click.
* Two packages are needed for the tests only: **pytest** 8 has no option to end a process that
  hangs, and **array-api-strict** 2.5 loses the device of an array.
"""

EVERY = [
    ("everything", "pinned", "3.11"),
    *(
        (session, chosen, python)
        for chosen, python in (("lowest", "3.11"), ("newest", "3.12"), ("newest", "3.13"))
        for session in ("numpy", "frameworks", "kernels")
    ),
]
"""The sessions of the noxfile."""


def page(records: list[dict[str, Any]]) -> str:
    """The page, as Markdown."""
    found = {(r["session"], r["set"], r["python"].rpartition(".")[0]): r for r in records}
    lines = ["| set | Python | session | what ran | passed | failed | skipped | date |"]
    lines += ["|---" * 8 + "|"]
    for session, chosen, python in EVERY:
        record = found.get((session, chosen, python))
        if record is None:
            lines.append(f"| {chosen} | {python} | `{session}` | not run | | | | |")
            continue
        lines += [
            f"| {chosen} | {record['python']} | `{session}` | `{run['what']}` | {run['passed']} "
            f"| {run['failed']} | {run['skipped']} | {record['date']} |"
            for run in record["runs"]
        ]
    lines += ["", "Their versions:", "", "| set | Python | session | versions |", "|---" * 4 + "|"]
    for key in EVERY:
        if key in found:
            record = found[key]
            versions = ", ".join(f"{name} {v}" for name, v in record["versions"].items())
            lines.append(f"| {key[1]} | {record['python']} | `{key[0]}` | {versions} |")
    return HEAD + "\n".join(lines) + "\n" + NOTES


def load_records() -> list[dict[str, Any]]:
    """The saved runs."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECORDS.glob("*.json"))]


if __name__ == "__main__":
    PAGE.write_text(page(load_records()), encoding="utf-8")
