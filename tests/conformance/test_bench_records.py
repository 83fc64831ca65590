"""Records of benchmarks: their comparison, their costs, and the page and the figure of them."""

import io
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import precondattn as pa
from precondattn_conformance.bench import command, plot
from precondattn_conformance.bench.compare import (
    IMPROVED,
    NEW,
    REGRESSED,
    SAME,
    UNCOMPARED,
    changes,
)
from precondattn_conformance.bench.cost import flops, moved_bytes
from precondattn_conformance.bench.plot import ratios_to_plain
from precondattn_conformance.bench.record import TIMED, WRONG, BenchRecord, Row

DOCS = Path(__file__).parents[2] / "docs"


def a_row(median=1.0, spread_=0.01, **changed):
    seconds = {"median": median, "q1": median - spread_, "q3": median + spread_, "rounds": 9}
    row = Row("lucid", "lucid", "forward", "torch", "cpu", "float32", {"t": 64}, "default")
    return replace(row, status=TIMED, seconds=seconds, **changed)


def beside(median, spread_=0.01, **peers):
    """A row whose ratio to `sdpa` has this median; its time is the same in every record."""
    ratio = {"median": median, "q1": median - spread_, "q3": median + spread_, "rounds": 9}
    return a_row(ratios={"sdpa": ratio, **peers})


OTHER = {value: {"median": value, "q1": value, "q3": value} for value in (1.0, 2.0)}
PEAKS = {
    name: {"peak_tokens": [64, 128], "peak_bytes": [1e6, most]}
    for name, most in (("small", 2e6), ("large", 4e6))
}
LOST = {"ratios": {"sdpa": {"error": 1.0}}, "absent_peers": {"sdpa": "it is off by 1"}}


@pytest.mark.parametrize(
    ("old", "new", "verdict", "text"),
    [
        (beside(1.0), beside(1.3), REGRESSED, "1.30 x the ratio to sdpa"),
        (beside(1.3), beside(1.0), IMPROVED, "0.77 x the ratio to sdpa"),
        (beside(1.0), beside(1.05), SAME, ""),
        (beside(1.0, 0.2), beside(1.3, 0.2), SAME, ""),
        (beside(2.0, base=OTHER[1.0]), beside(1.0, base=OTHER[2.0]), REGRESSED, "to base"),
        (a_row(), replace(a_row(), status=WRONG, seconds={}), REGRESSED, "wrong"),
        (a_row(**PEAKS["small"]), a_row(**PEAKS["large"]), REGRESSED, "the memory at t=128"),
        (a_row(**PEAKS["small"]), a_row(**PEAKS["small"]), UNCOMPARED, ""),
        (replace(a_row(**PEAKS["small"]), seconds={}),) * 2 + (SAME, ""),
        (a_row(1.0), a_row(3.0), UNCOMPARED, ""),
        (a_row(), beside(1.0), UNCOMPARED, ""),
        (beside(1.0), a_row(**LOST), UNCOMPARED, "no ratio to sdpa now: it is off by 1"),
        (None, a_row(), NEW, ""),
    ],
)
def test_compare_judges_ratios_beyond_their_noise_peaks_and_results(old, new, verdict, text):
    records = (BenchRecord("", {}, rows=[row] if row else []) for row in (old, new))
    (change,) = changes(*records, 0.1)
    assert change.verdict == verdict
    assert text in change.text


def compared(folder, old, new, threshold=0.1):
    """The exit code and the text of a comparison."""
    paths = folder / "old.json", folder / "new.json"
    for path, record in zip(paths, (old, new), strict=True):
        record.save(path)
    printed = io.StringIO()
    code = command.compare(*paths, threshold, Console(file=printed, width=200))
    return code, printed.getvalue()


@pytest.mark.parametrize(
    ("old", "new", "threshold", "code", "texts"),
    [
        (
            beside(1.0), replace(beside(1.0), seconds=a_row(3.0).seconds), 0.1, 0,
            ("sdpa 1.00 → 1.00", "3.00", "0 of 1 regressed by more than 10%: in the ratio to a",
             "times are not judged"),
        ),
        (beside(1.0), beside(2.0), 0.1, 1, ("1 of 1 regressed", "sdpa 1.00 → 2.00")),
        (beside(1.0), beside(2.0), 1.5, 0, ("0 of 1 regressed",)),
        (
            a_row(), a_row(), 0.1, 0,
            ("1 of 1 are not comparable by ratio: no peer was measured beside them",),
        ),
    ],
)  # fmt: skip
def test_what_compare_prints_and_its_exit_code(tmp_path, old, new, threshold, code, texts):
    records = [
        BenchRecord("", {"processor": p, "versions": {"torch": p, "precondattn": p}}, rows=[r])
        for p, r in (("a", old), ("b", new))
    ]
    exit_code, printed = compared(tmp_path, *records, threshold)
    assert exit_code == code
    assert "the machines differ in processor: a before, b now" in printed
    assert "torch: a before, b now" in printed
    assert "precondattn: a" not in printed  # What two records compare.
    for text in texts:
        assert text in printed
    (tmp_path / "old.json").write_text("{}")
    with pytest.raises(ValueError, match="no record of format"):
        command.compare(tmp_path / "old.json", tmp_path / "new.json", 0.1, Console())


SIZES = {"b": 1, "t": 4, "s": 4, "h": 2, "n": 2, "u": 2, "d": 3, "e": 5}
ONE_QUERY = {**SIZES, "t": 1}


@pytest.mark.parametrize(
    ("mechanism", "sizes", "work", "expected"),
    [
        # Two heads; N² = 16, d + e = 8, 3 d + 2 e = 19.
        ("softmax", SIZES, "forward", 2 * 16 * 8),
        ("softmax", SIZES, "forward_backward", 2 * 16 * (8 + 19)),
        ("softmax", ONE_QUERY, "decode", 2 * (2 * 4 * 8)),
        # A window of w tokens: 2 N w − w² in place of N². Without a mask it is 2 N².
        ("softmax[window=2]", SIZES, "forward", 2 * (2 * 4 * 2 - 4) * 8),
        ("softmax[causal=false]", SIZES, "forward", 2 * 32 * 8),
        # LUCID needs the same FLOPs again, once for each key/value head.
        ("lucid", {**SIZES, "n": 1}, "forward", (2 + 1) * 16 * 8),
        ("lucid", SIZES, "forward_backward", 2 * 2 * 16 * (8 + 19)),
        # The delta rule, in chunks of 64: N (6 d e + 4 C (d + e)).
        ("delta", SIZES, "forward", 2 * 4 * (6 * 15 + 4 * 64 * 8)),
        ("delta", SIZES, "decode", 2 * 7 * 15),
    ],
)
def test_flops_are_those_computed_by_hand(mechanism, sizes, work, expected):
    assert flops(pa.parse(mechanism), sizes, work) == expected


@pytest.mark.parametrize(
    ("mechanism", "work", "elements"),
    [
        # q and k have 24 elements each, v and o 40; y is written and read.
        ("softmax", "forward", 24 + 24 + 40 + 40),
        ("lucid", "forward", 24 + 24 + 40 + 40 + 2 * 40),
        # One token's q, k, v and o are a quarter of that; the cache contains four of k and v.
        ("softmax", "decode", 24 + 40 + 128 / 4),
        # A state is read and written: 2 heads of 3 × 5; then one token with its beta.
        ("delta", "decode", 2 * 30 + (128 + 8) / 4),
    ],
)
def test_bytes_are_those_computed_by_hand(mechanism, work, elements):
    assert moved_bytes(pa.parse(mechanism), SIZES, work, 4) == 4 * elements


def test_the_performance_page_is_generated_from_the_saved_files():
    """The page equals the output of `docs/make_performance.py`."""
    maker = runpy.run_path(str(DOCS / "make_performance.py"))
    assert maker["PAGE"].read_text(encoding="utf-8") == maker["page"](maker["load_records"]())
    peer = {"median": 2.345, "q1": 2.3, "q3": 2.4, "rounds": 9, "seconds": 0.5, "error": 1e-7}
    row = a_row(0.0123, error=1e-6, bound=1e-4, backends=["torch"], ratios={"sdpa": peer})
    machine = {"processor": "a processor", "cores": 2, "threads": 2, "versions": {"torch": "9"}}
    text = maker["page"]({"run": BenchRecord("2026-01-01", machine, rows=[row])})
    for measured in ("12.3 ms", "2.35 (2.30–2.40)", "a processor", "2026-01-01", "torch 9"):
        assert measured in text


def test_curves_are_ratios_to_plain_attention_at_the_same_length(tmp_path):
    """Plain attention is timed in turns with a row if it is its peer, else in the same run."""
    ours = {"sdpa": {"median": 1.25, "seconds": 0.008}}
    rows = [
        a_row(0.01, mechanism="softmax", sizes={"t": 16}, ratios=ours),
        a_row(0.004, mechanism="gla", sizes={"t": 16}, peak_bytes=[2**20], peak_tokens=[16]),
        a_row(0.004, mechanism="gla", sizes={"t": 32}),
    ]
    work = rows[0].work
    assert ratios_to_plain(rows) == {work: {"softmax": [(16, 1.25)], "gla": [(16, 0.5)]}}
    maker = runpy.run_path(str(DOCS / "make_performance.py"))
    text = maker["lengths"]({"gla": [(16, 0.5)], "lucid": [(32, 2.0)]}, "{:.2f}")
    assert "| `gla` | 0.50 | – |" in text
    written = plot.draw(BenchRecord("2026-01-01", {}, rows=rows), tmp_path)
    assert [path.name for path in written] == ["beside_plain.svg", "beside_plain.png"]
    assert written[0].read_text().startswith("<?xml")
    assert not plot.draw(BenchRecord("", {}), tmp_path)
