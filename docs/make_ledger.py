"""Write `kernel_ledger.md` from the saved reports of the compilers.

    python docs/make_ledger.py

`measurements/kernels/*.json` are the reports that the compilers' `--save` writes, and
`measurements/kernels/other_versions` those of other versions of the compilers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("kernel_ledger.md")
REPORTS = Path(__file__).with_name("measurements") / "kernels"

HEAD = """\
# Ledger of kernels

No kernel has run on a GPU yet. Kernels of `triton` and `pallas` have run in an interpreter, and
kernels of `cupy` in a simulator. This page lists what they need when they are compiled; nothing is
known about their speed. [Checking kernels](kernels.md) describes how kernels are checked without a
GPU, and `docs/make_ledger.py` generates this page.

A kernel is compiled in several variants: for dtypes, widths, options and compute capabilities. Each
cell has the largest numbers of a kernel's variants for one target: registers of a thread, bytes
that it spills to memory, and KiB of shared memory of a block. The reports in
`docs/measurements/kernels` have the numbers of each variant.
"""

Variant = dict[str, Any]
"""A variant in a report: its name, target, registers, spilt and shared bytes, and failures."""


def main() -> None:
    PAGE.write_text(page(reports(), reports("other_versions")), encoding="utf-8")


def page(ours: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> str:
    """The page, as Markdown; `others` are reports of other versions of the compilers."""
    compiled = "".join(map(_table, ours))
    of_others = "".join(f"* {_differences(other, ours)}\n" for other in others)
    return f"{HEAD}{compiled}\n## Compiled with other versions\n\n{of_others}"


def reports(folder: str = ".") -> list[dict[str, Any]]:
    """The reports in a folder of `measurements/kernels`."""
    files = sorted((REPORTS / folder).glob("*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in files]


def _table(report: dict[str, Any]) -> str:
    """A row for each kernel of a report, a column for each target."""
    targets = list(dict.fromkeys(v["target"] for v in report["variants"]))
    by_kernel: dict[str, list[Variant]] = {}
    for variant in report["variants"]:
        by_kernel.setdefault(_kernel(variant["name"]), []).append(variant)
    lines = [
        f"\n## {_versions(report)}\n",
        f"| kernel | variants | {' | '.join(targets)} |",
        "|---" * (len(targets) + 2) + "|",
    ]
    for kernel, variants in sorted(by_kernel.items()):
        names = {variant["name"] for variant in variants}
        cells = [_largest([v for v in variants if v["target"] == target]) for target in targets]
        lines.append(f"| `{kernel}` | {len(names)} | {' | '.join(cells)} |")
    failed = [v for v in report["variants"] if v["failures"]]
    lines += [f"\n`{v['name']}` for {v['target']}: {v['failures'][0]}" for v in failed]
    return "\n".join(lines) + "\n"


def _kernel(variant: str) -> str:
    """The kernel of a variant such as `laser float32 64 _close` or `softmax_forward<float, 64>`."""
    return [word for word in re.sub("<.*", "", variant).split() if word.isidentifier()][-1]


def _largest(variants: list[Variant]) -> str:
    """The largest numbers of a kernel's variants for one target."""
    if not variants:
        return "–"
    registers, spilt, shared = (
        max(v[name] for v in variants) for name in ("registers", "spilt_bytes", "shared_bytes")
    )
    return f"{registers}/{spilt}/{shared / 1024:.0f}"


def _differences(other: dict[str, Any], ours: Sequence[dict[str, Any]]) -> str:
    """How many kernels fail with other versions, or spill more bytes."""
    spilt = {
        (v["name"], v["target"]): v["spilt_bytes"]
        for report in ours
        if {*report} == {*other}
        for v in report["variants"]
    }
    variants = other["variants"]
    failing = sum(bool(v["failures"]) for v in variants)
    more = sum(v["spilt_bytes"] > spilt.get((v["name"], v["target"]), 0) for v in variants)
    return (
        f"{_versions(other)}: {len(variants)} variants, of which {failing} fail and {more} spill"
        " more bytes than above."
    )


def _versions(report: dict[str, Any]) -> str:
    source = f", from JAX {report['jax']}" if "jax" in report else ""
    compiler = f"Triton {report['triton']}" if "triton" in report else f"NVRTC {report['nvrtc']}"
    return compiler + source


if __name__ == "__main__":
    main()
