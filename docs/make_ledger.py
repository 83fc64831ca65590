"""Write `kernel_ledger.md` from the saved reports and runs in `measurements/`.

    python docs/make_ledger.py

Registers and memory are from `measurements/kernels/*.json`, which the compilers' `--save` writes.
Those of other versions of the compilers are from `measurements/kernels/other_versions`.
Predictions are from `measurements/predictions`, which `make_predictions.py` and
`make_cuda_predictions.py` write. `triton_before.json` has those of an earlier version of kernels.
Host times and counts of calls are from `measurements/host`. Runs on a GPU are from
`measurements/gpu`, which `precondattn_gpu` writes. Nothing on the page is
written by hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from precondattn_gpu import pages

PAGE = Path(__file__).with_name("kernel_ledger.md")
MEASUREMENTS = Path(__file__).with_name("measurements")

HEAD = """\
# Ledger of kernels

This page lists where each kernel has been compiled and run. `docs/make_ledger.py` generates it.
[Checking kernels](kernels.md) describes how kernels are checked without a GPU, and with one.

## Run on a GPU

"""

NEVER = """\
No kernel has run on a GPU yet. Kernels of `triton` and `pallas` have run in an interpreter, and
kernels of `cupy` in a simulator. The compiled ones are listed below. Nothing is known about their
speed.
"""

PREDICTED = """\
## Predictions, before the first run

Nothing in this section is measured. `docs/make_predictions.py` predicts these times from the
machine code, so that later measurements can be compared with them. [Reading
kernels](kernel_reading.md) describes what the machine code shows.

* **Counts**: launches, FLOPs and bytes. In each launch, every input is counted as read once and
  every output as written once.
* **Computed from counts**: the roof, which is the time of a roofline model, the longest of three:
  products over the rate of tensor cores, exponentials over the rate of their unit, bytes over
  bandwidth, with the rates of a data sheet.
* **Guesses**: the predicted times. The share of the roof that a kernel reaches is a person's
  estimate from its machine code.

The predicted share is the roof divided by the predicted time. The calls have one sequence
(`gated_delta`: 4) of 16 heads, causal, in 16 bits. A row has all launches of a kernel in a forward
call, or in its gradient. In a cell with an arrow, the first value is that of an earlier version of
the kernel.

"""

Measured = Mapping[str, Mapping[str, float]]
"""The seconds of a kernel in a call, for each model of GPU (`pages.kernel_seconds`)."""

CALLS = """\
## What a call asks of the host and of memory

A call is causal, on one sequence of 16 heads, with keys and values of width 128, in bfloat16. The
number in its name is that of its tokens. A step adds one token to a cache that has room for so
many and is half full.

* **Counted** [without a GPU](kernels.md#the-hosts-time-of-a-call): launches of Triton's kernels,
  and operators of PyTorch that launch kernels, without its attention. **Bytes** of both: an array
  counts once a launch, and whole, a cache too. **FLOPs** of products of tiles, masked pairs and
  padded rows included; a product in float32's accuracy is three.
* **Computed** for full calls of `lucid`, from the model of its kernels (`work.py`): FLOPs, which
  agree with the count of the forward call at 8,192 tokens, and the bytes of `update` and
  `substitute`, whose launches read parts of arrays. Other FLOPs are in part from counts at fewer
  tokens, in which they are quadratic ([which](kernels.md#the-flops-of-a-call)).
* **Measured**: the host's time, in which PyTorch's operators and Triton's kernels do nothing, on
  one core of an {processor}.
* Nothing is guessed.

In a cell with an arrow, the first value is that of the version before calls were repeated. Arrows
in the tables above begin at an earlier one. What the columns do not say:

* **Steps before**: the host did not know how many tokens a cache on a GPU had. So a step read all
  of its slots, and the host waited for the device as often as the cell says. The time is without
  what a wait takes.
* **Steps**: that of `gated_delta` computes sums in place of products of tiles. That of `path`
  rewrites the cached keys each time, unless `flush` is above 1.
* **`path`** stores a matrix for each block of chunks, by which a query passes the block in one
  product, not in one for each chunk: forward, more bytes and fewer FLOPs. Before, 0.7 % of the
  FLOPs forward and backward are products of PyTorch.
* **`lucid`** has more launches for smaller super-blocks. Sums for the gradient of the keys take
  more bytes and fewer FLOPs.
* **`gla`** computes scores by halving chunks: more products replace 16 steps in sequence.
* **`differential`** sums the weights of each row by a product with 16 columns, forward.

| call | launches | operators | FLOPs | bytes of launches | bytes of operators | host's time |
|---|---|---|---|---|---|---|
"""

KERNEL = ("call", "kernel", "width", "tokens")
CALL = ("mechanism", "work", "heads", "tokens")
"""What identifies a row of the predictions for kernels, and for whole calls."""

COMPILED = """\
## Compiled ahead of time

Each cell has the registers of a thread, the bytes that it spills to memory, and the shared memory
of a block. A kernel that several variants share is listed under the first of them.
"""

OTHERS = """
## Compiled with other versions

The same kernels, compiled by `conformance/gpu/twin.sh` with the versions that a GPU machine has.
"""


def main() -> None:
    text = page(_reports(), MEASUREMENTS / "gpu", _reports("other_versions"))
    PAGE.write_text(text, encoding="utf-8")


def page(reports: list[dict[str, Any]], gpu: Path, others: Sequence[dict[str, Any]] = ()) -> str:
    """The page, as Markdown; `others` are reports of other versions."""
    run = pages.ledger(gpu) or NEVER
    compiled = COMPILED + "".join(map(_compiled, reports))
    with_others = OTHERS + "".join(_differences(other, reports) for other in others)
    measured = pages.kernel_seconds(gpu)
    predictions = predicted(_predictions(), _predictions("triton_before"), measured)
    predictions += predicted_cuda(_predictions("cuda"), measured) + counted()
    return HEAD + run + "\n" + predictions + compiled + (with_others if others else "")


def _reports(folder: str = ".") -> list[dict[str, Any]]:
    files = sorted((MEASUREMENTS / "kernels" / folder).glob("*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in files]


def _predictions(backend: str = "triton") -> dict[str, Any]:
    path = MEASUREMENTS / "predictions" / f"{backend}.json"
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def predicted(content: dict[str, Any], before: dict[str, Any], measured: Measured) -> str:
    """The predictions for kernels and whole calls, with those of `before`, and measured seconds."""
    lines = [f"* {name}: {source}." for name, source in content["devices"].items()]
    lines += _kernels(content, before["kernels"], "triton", measured)
    lines += [
        "\nPredicted for whole calls of width 128 on an H100. The other kernels of a call, and",
        "PyTorch's flash attention at the same sizes, are estimates. `lucid` includes it.\n",
        "| call | work | tokens | predicted time | flash attention | predicted ratio |",
        "|---" * 6 + "|",
    ]
    rows_before = {_key(row, CALL): row for row in before["mechanisms"]}
    lines += [_call(row, rows_before.get(_key(row, CALL))) for row in content["mechanisms"]]
    return PREDICTED + "\n".join(lines) + "\n\n"


def predicted_cuda(content: dict[str, Any], measured: Measured) -> str:
    """The predictions for the kernels of `cupy`, at the same sizes."""
    return "\n".join(["### CUDA kernels", *_kernels(content, [], "cupy", measured)]) + "\n\n"


def counted() -> str:
    """The counts and host times of calls, beside those of an earlier version."""
    path = MEASUREMENTS / "host" / "host_time.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    before, now = content["before"]["calls"], content["now"]["calls"]
    products = json.loads(path.with_name("products.json").read_text(encoding="utf-8"))
    flops_before, flops = (
        {name: {"flops": sum(of_kernels.values())} for name, of_kernels in products[when].items()}
        for when in ("before", "now")
    )
    lines = []
    for name, row in now.items():
        earlier = before[name]
        cells = [
            f"`{name.split()[0]}` {name.partition(' ')[2]}",
            _change(earlier, row, "launches", str),
            _change(earlier, row, "operators", str),
            _change(flops_before[name], flops[name], "flops", _flops),
            _change(earlier, row, "launched_bytes", _bytes),
            _change(earlier, row, "bytes", _bytes),
            _host(earlier) + " → " + _host(row),
        ]
        lines.append(_row(*cells))
    processor = content["now"]["processor"]
    return CALLS.format(processor=processor) + "\n".join(lines) + "\n\n"


def _flops(number: int) -> str:
    return f"{number:.3g}".replace("e+0", "e").replace("e+", "e") if number else "none"


def _bytes(number: int) -> str:
    if number >= 1e8:
        return f"{number / 1e9:.2f} GB"
    return f"{number / 1e6:.1f} MB" if number >= 1e5 else f"{number / 1e3:.0f} kB"


def _host(row: dict[str, Any]) -> str:
    waits = row.get("waits", 0)
    more = f" and {waits} wait{'s' if waits > 1 else ''}" if waits else ""
    return f"{row['microseconds']:.0f} µs{more}"


def _kernels(
    content: dict[str, Any], before: list[dict[str, Any]], backend: str, measured: Measured
) -> list[str]:
    """A table for each device, and the reasons why kernels are predicted below their rooflines."""
    lines = []
    for device in content["devices"]:
        model = device.split()[0]
        seconds = next((of for name, of in measured.items() if model in name), {})
        lines += [
            f"\nPredicted for an {device}:\n",
            "| kernel | width | tokens | launches | FLOPs | bytes | roof | by | predicted time | "
            "predicted share | measured |",
            "|---" * 11 + "|",
        ]
        rows_before = {_key(row, KERNEL): row for row in before}
        for row in content["kernels"]:
            lines.append(_kernel(row, rows_before.get(_key(row, KERNEL)), device, backend, seconds))
    reasons = {
        f"`{row['call']} {row['kernel']}`, width {row['width']}": row["reason"]
        for row in content["kernels"]
    }
    lines += ["\nPredicted reasons why kernels stay below their roofs:\n"]
    return lines + [f"* {name}: {reason}." for name, reason in reasons.items()]


def _kernel(
    row: dict[str, Any],
    before: dict[str, Any] | None,
    device: str,
    backend: str,
    measured: Mapping[str, float],
) -> str:
    at = row["devices"][device]
    at_before = None if before is None else before["devices"][device]
    name = f"{backend} {row['call']} {row['kernel']} {row['width']} {row['tokens']}"
    seconds = measured.get(name)
    cells = [
        f"`{row['call']} {row['kernel']}`",
        *(str(row[name]) for name in ("width", "tokens")),
        _change(before, row, "launches", str),
        _change(before, row, "flops", "{:.2g}".format),
        _change(before, row, "bytes", "{:.2g}".format),
        _change(at_before, at, "roof", _milliseconds),
        at["limit"],
        _change(at_before, at, "seconds", _milliseconds),
        f"{100 * at['share']:.0f} %",
        "–" if seconds is None else _milliseconds(seconds),
    ]
    return _row(*cells)


def _call(row: dict[str, Any], before: dict[str, Any] | None) -> str:
    cells = [
        f"`{row['mechanism']}`",
        *(str(row[name]) for name in ("work", "tokens")),
        _change(before, row, "seconds", _milliseconds),
    ]
    if row["flash"] is None:
        return _row(*cells, "–", "–")
    ratios = [
        None if each is None else {"": each["seconds"] / each["flash"]} for each in (before, row)
    ]
    return _row(*cells, _milliseconds(row["flash"]), _change(*ratios, "", "{:.2f}".format))


def _key(row: dict[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(row[name] for name in names)


def _change(
    before: dict[str, Any] | None, now: dict[str, Any], name: str, text: Callable[[Any], str]
) -> str:
    """The value of `name` now, behind the value before if that has another text."""
    if before is None or text(before[name]) == text(now[name]):
        return text(now[name])
    return f"{text(before[name])} → {text(now[name])}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _compiled(report: dict[str, Any]) -> str:
    """One report: a row for each variant, a column for each target."""
    targets = list(dict.fromkeys(v["target"] for v in report["variants"]))
    cells_by_name: dict[str, dict[str, str]] = {}
    for v in report["variants"]:
        text = f"{v['registers']} / {v['spilt_bytes']} / {v['shared_bytes'] / 1024:.0f} KiB"
        cells_by_name.setdefault(v["name"], {})[v["target"]] = (
            "; ".join(f.splitlines()[0] for f in v["failures"]) or text
        )
    lines = [
        f"\nWith {_versions(report)}.\n",
        "| kernel | " + " | ".join(targets) + " |",
        "|---" * (len(targets) + 1) + "|",
    ]
    for name, by_target in cells_by_name.items():
        cells = (by_target.get(target, "–") for target in targets)
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _differences(other: dict[str, Any], reports: list[dict[str, Any]]) -> str:
    """The kernels that fail with other versions, or spill another number of bytes."""
    listed = {
        (v["name"], v["target"]): v
        for report in reports
        if {*report} == {*other}
        for v in report["variants"]
    }
    rows, failing = [], 0
    for v in other["variants"]:
        above = listed.get((v["name"], v["target"]))
        failing += bool(v["failures"])
        text = "; ".join(f.splitlines()[0] for f in v["failures"]) or str(v["spilt_bytes"])
        spilt = "–" if above is None else str(above["spilt_bytes"])
        if text != spilt:
            rows.append(f"| `{v['name']}` | {v['target']} | {text} | {spilt} |")
    counts = f"{len(other['variants'])} kernels, of which {failing} fail and {len(rows)} differ"
    head = f"\nWith {_versions(other)}: {counts}"
    if not rows:
        return f"{head}.\n"
    table = ["| kernel | target | spilt bytes | above |", "|---|---|---|---|", *rows]
    return f"{head} from those above.\n\n" + "\n".join(table) + "\n"


def _versions(report: dict[str, Any]) -> str:
    source = f", from JAX {report['jax']}" if "jax" in report else ""
    compiler = f"Triton {report['triton']}" if "triton" in report else f"NVRTC {report['nvrtc']}"
    return compiler + source


if __name__ == "__main__":
    main()
