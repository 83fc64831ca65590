"""Benchmarks: refusals, saved files, arithmetic. No test asserts a time."""

import io
import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import precondattn as pa
from precondattn.backend import Backend
from precondattn.dispatch.discovery import register_backend
from precondattn.installed import is_installed
from precondattn.method_backend import MethodRunner
from precondattn_conformance import libraries
from precondattn_conformance.bench import (
    command,
    correct,
    paired,
    plot,
)
from precondattn_conformance.bench.cases import COMPARED, declared, layout
from precondattn_conformance.bench.compare import (
    IMPROVED,
    NEW,
    REGRESSED,
    SAME,
    UNCOMPARED,
    changes,
    machines_differ,
)
from precondattn_conformance.bench.computation import forward_run, ours
from precondattn_conformance.bench.cost import flops, moved_bytes
from precondattn_conformance.bench.paired import Run, Turns, ratio, spread
from precondattn_conformance.bench.peers import PEERS, peers_of
from precondattn_conformance.bench.plot import curves_beside_plain, draw_one, ratios_to_plain
from precondattn_conformance.bench.record import TIMED, WRONG, BenchRecord, Row, load
from precondattn_conformance.bench.selection import Selection
from precondattn_conformance.memory import MeasuredCall, peak_bytes
from precondattn_conformance.peers import project

DOCS = Path(__file__).parents[2] / "docs"


def run_quick(*names, **options):
    """A quick run in this process: its exit code and printed text."""
    printed = io.StringIO()
    console = Console(file=printed, width=200)
    code = command.bench(names=names, quick=True, rounds=2, console=console, **options)
    return code, printed.getvalue()


def in_a_process(*arguments, folder, **environment):
    return subprocess.run(
        [sys.executable, "-c", "from precondattn.command_line.cli import main; main()", *arguments],
        env={**os.environ, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


class Rescaled(Backend):
    """Softmax by the reference, times a factor; wrong unless the factor is 1."""

    libraries = frozenset({"torch"})
    preference = -1_000_001  # It is after the reference, so it runs only if it is requested.

    def __init__(self, name, factor):
        self.name, self.factor = name, factor

    def prepare(self, piece, request):
        is_softmax = piece == pa.Softmax()
        return (
            MethodRunner(self, piece, differentiable=True) if is_softmax else "knows softmax only"
        )

    def forward(self, piece, inputs, frame):
        out, residuals = piece.forward(inputs, frame)
        return self.factor * out, residuals


@pytest.fixture
def rescaled(only_the_reference):
    register_backend(Rescaled("right", 1.0))
    register_backend(Rescaled("wrong", 1.01))


@pytest.mark.thorough(but=("packed_lucid_backward",))
@pytest.mark.parametrize("name", ["packed_lucid_backward", "numpy_packed_laser_backward"])
def test_a_packed_case_is_compared_with_its_batch(name, tmp_path):
    code, printed = run_quick(name, save=tmp_path / "record.json")
    (row,) = load(tmp_path / "record.json").rows
    assert code == 0, printed
    assert row.status == TIMED
    assert list(row.ratios) == ["batch"]


@pytest.mark.thorough
def test_a_quick_run_saves_and_plots_whatever_the_settings_of_pytest(tmp_path):
    (tmp_path / "conftest.py").write_text("raise RuntimeError('not mine')")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --nonsense\n")
    saved, raw = tmp_path / "run.json", tmp_path / "raw.json"
    done = in_a_process(
        "bench", "lucid", "lucid_decode", "numpy_lucid", "lucid_backward", "--quick",
        "--backend", "reference", "--save", str(saved), "--plot", str(tmp_path / "plots"),
        "--benchmark-json", str(raw),
        folder=tmp_path, PYTEST_ADDOPTS="--nonsense",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    record = load(saved)
    assert [row.case for row in record.rows] == [
        "lucid", "lucid_backward", "numpy_lucid", "lucid_decode",
    ]  # fmt: skip
    for row in record.rows:
        assert row.status == TIMED
        assert row.backends
        assert row.error <= row.bound
        assert row.seconds["median"] > 0
        assert row.first_call_seconds > 0
        assert row.gemm_share > 0
        assert row.copy_share > 0
        assert row.ratios
        assert all(r["q1"] <= r["median"] <= r["q3"] for r in row.ratios.values())
    assert record.machine["versions"]["numpy"] == np.__version__
    assert {rate["library"] for rate in record.rates} == {"numpy", "torch"}
    assert (tmp_path / "plots" / "ratios.svg").exists()
    benchmarks = json.loads(raw.read_text())["benchmarks"]
    assert {each["group"] for each in benchmarks} == {
        f"lucid {work} t=48,h=4,d=8 float32" for work in ("forward", "forward_backward", "decode")
    }
    assert all(("row" in each["extra_info"]) != each["extra_info"].get("is_peer", False)
               for each in benchmarks)  # fmt: skip
    assert {each["params"]["backend"] for each in benchmarks} == {"reference", "sdpa", "base"}
    assert "UNSERIALIZABLE" not in raw.read_text()
    again = in_a_process("compare", str(saved), str(saved), folder=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "0 of 4 regressed" in again.stdout


@pytest.mark.thorough(but=("forward",))
@pytest.mark.parametrize("work", ["forward", "forward_backward"])
def test_a_wrong_result_is_reported_with_its_error_and_not_timed(rescaled, tmp_path, work):
    saved = tmp_path / "run.json"
    code, printed = run_quick(
        mechanisms=("softmax",), works=(work,), backends=("right", "wrong"), save=saved
    )
    right, wrong = load(saved).rows
    assert code == 1
    assert (right.status, right.asked) == (TIMED, "right")
    assert wrong.status == WRONG
    assert wrong.error == pytest.approx(0.01, rel=0.5)
    assert not wrong.seconds
    assert not wrong.ratios
    assert "a wrong result is not timed" in printed


def test_a_backend_without_support_gives_the_reason(rescaled):
    code, printed = run_quick("path", backends=("right",))
    assert code == 1
    assert "knows softmax only" in printed
    assert "nothing was measured, which counts as a failure" in printed


@pytest.mark.thorough
def test_neighbours_are_busy_only_during_the_run_and_are_recorded(tmp_path, monkeypatch):
    started, process = [], command.subprocess.Popen

    def starting(*arguments, **options):
        started.append(process(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(command.subprocess, "Popen", starting)
    code, _ = run_quick("numpy_lucid", neighbours=2, save=tmp_path / "run.json")
    assert code == 0
    assert load(tmp_path / "run.json").machine["neighbours"] == 2
    assert len([each for each in started if each.args[-1] == command.BUSY]) == 2
    assert all(each.poll() is not None for each in started)


def test_a_negative_number_of_neighbours_is_refused():
    with pytest.raises(ValueError, match="neighbours must be 0 or above; found -1"):
        run_quick("numpy_lucid", neighbours=-1)


@pytest.mark.thorough
def test_a_naive_reference_is_loaded_by_its_file_and_compared(monkeypatch, tmp_path):
    pytest.importorskip("torch")
    source = tmp_path / "fla" / "ops" / "kda" / "naive.py"
    source.parent.mkdir(parents=True)
    source.write_text(
        "import precondattn as pa\n"
        "def naive_chunk_kda(q, k, v, g, beta, scale):\n"
        "    return pa.kda(q, k, v, g=g, beta=beta, scale=scale), None\n"
    )

    class Installed:
        def locate_file(self, path):
            return tmp_path / path

    monkeypatch.setattr(project, "distribution", lambda name: Installed())
    monkeypatch.setattr(project, "version", lambda name: "0")
    code, printed = run_quick("kda")
    assert code == 0
    assert "naive_fla" in printed


def test_a_wrong_peer_gets_no_ratio(monkeypatch, tmp_path):
    from precondattn_conformance.bench import peers

    right = peers.sdpa()

    def wrong(q, k, v):
        return 1.01 * right(q, k, v)

    made = [p._replace(make=lambda m, b: peers.Computation("sdpa", peers.SOFTMAX, wrong))
            if p.name == "sdpa" else p for p in PEERS]  # fmt: skip
    monkeypatch.setattr(peers, "PEERS", tuple(made))
    saved = tmp_path / "run.json"
    code, _ = run_quick("softmax", save=saved)
    (row,) = load(saved).rows
    assert code == 0
    assert row.seconds
    assert not row.ratios
    assert "is off by" in row.absent_peers["sdpa"]


@pytest.mark.thorough(but=("7",))
@pytest.mark.parametrize("width", [1, 7, 256])
def test_a_window_is_compared_with_a_boolean_mask(width, tmp_path):
    # With 48 tokens, a window of 256 hides none; this is the other limit of the mask.
    options = {"mechanisms": (f"softmax[window={width}]",), "peers": ("masked_sdpa",)}
    assert run_quick(save=tmp_path / "run.json", **options)[0] == 0
    (row,) = load(tmp_path / "run.json").rows
    assert row.ratios["masked_sdpa"]["median"] > 0
    assert not row.absent_peers


@pytest.mark.parametrize("name", ["sdpa", "naive_lucid"])
@pytest.mark.parametrize("heads", [4, 1])
def test_peers_agree_with_the_mechanisms_they_are_compared_with(name, heads):
    (peer,) = (p for p in PEERS if p.name == name)
    of = peer.make(pa.Lucid(), None)
    sizes = layout(t=40, h=4, n=heads, d=8)
    expected = correct.oracle(str(of.mechanism), sizes, "float64", "torch")
    torch = libraries.named("torch")
    arrays = {n: torch.array(a, "float64") for n, a in expected.inputs.items()}
    result = forward_run(of, torch, arrays).call()["the output"]
    np.testing.assert_allclose(
        torch.numpy(result), expected.results["the output"], rtol=1e-9, atol=1e-11
    )


def test_a_fault_after_the_first_tokens_is_detected(monkeypatch):
    """The oracle computes the first tokens of a long call, and the last tokens with a cache."""
    monkeypatch.setattr(correct, "LARGEST", 0)
    monkeypatch.setattr(correct, "HEAD", 16)
    sizes = layout(t=100, h=2, d=4)
    expected = correct.oracle.__wrapped__("lucid", sizes, "float64", "numpy")
    assert not expected.is_whole
    library, of = libraries.named("numpy"), ours(pa.Lucid(), "reference")
    results = forward_run(of, library, expected.inputs).call()
    checked = correct.check(of, expected, library, "float64", results)
    assert checked.what == f"the first 16 tokens and the last {correct.TAIL}"
    results["the output"][:, 90] *= 1.001
    with pytest.raises(correct.WrongResultError, match="the last tokens"):
        correct.check(of, expected, library, "float64", results)


def test_the_last_tokens_may_lose_twice_what_the_definition_loses_in_float32(monkeypatch):
    monkeypatch.setattr(correct, "LARGEST", 0)
    monkeypatch.setattr(correct, "HEAD", 16)
    of, library = ours(pa.Lucid(), None), libraries.named("numpy")
    results = {}
    for dtype in ("float32", "float64"):
        expected = correct.oracle.__wrapped__("lucid", layout(t=100, h=2, d=4), dtype, "numpy")
        arrays = {name: array.astype(dtype) for name, array in expected.inputs.items()}
        results[dtype] = forward_run(of, library, arrays).call()
        checked = correct.check(of, expected, library, dtype, results[dtype])
        assert checked.bound == correct.bound(dtype, correct.KIND)  # The usual bound suffices here.
        results[dtype]["the output"][:, 90] *= 1 + 3 * checked.bound
        with pytest.raises(correct.WrongResultError, match="the last tokens"):
            correct.check(of, expected, library, dtype, results[dtype])
        monkeypatch.setattr(correct, "lost_by_definition", lambda *given: 4e-4)
        if dtype == "float32":
            assert correct.check(of, expected, library, dtype, results[dtype]).bound == 8e-4
    with pytest.raises(correct.WrongResultError, match="the last tokens"):  # Not used in float64.
        correct.check(of, expected, library, "float64", results["float64"])


@pytest.mark.parametrize("expression", ["lucid", "ccq", "retention", "mesa"])
def test_what_the_definition_loses_is_that_of_a_whole_call_of_one_head(monkeypatch, expression):
    monkeypatch.setattr(correct, "PART", 16)
    m = pa.parse(expression)
    inputs = correct.inputs_of(
        expression, layout(t=70, h=4, n=2, d=8)._replace(b=2), "float32", "numpy"
    )
    lost = correct.lost_by_definition(m, inputs, "float32")
    narrow = {name: array.astype("float32") for name, array in inputs.items()}
    if not m.numbers_heads:
        inputs, narrow = (correct._of_first_head(m, x) for x in (inputs, narrow))
    outs = [m(**x, backend="reference")[:, -correct.TAIL :] for x in (narrow, inputs)]
    whole = correct.error(*outs)
    assert whole / 3 < lost < 3 * whole


def test_gradients_of_a_long_call_are_checked_on_its_first_tokens(monkeypatch):
    from precondattn_conformance.bench.computation import backward_run

    monkeypatch.setattr(correct, "LARGEST", 0)
    monkeypatch.setattr(correct, "HEAD", 16)
    sizes = layout(t=40, h=2, d=4)
    expected = correct.oracle.__wrapped__("lucid", sizes, "float64", "numpy")
    library, of = libraries.named("numpy"), ours(pa.Lucid(), "reference")
    results = backward_run(of, library, expected.inputs, expected.cotangent).call()
    correct.check(of, expected, library, "float64", results)
    results["the gradient of k"][:, 30] += 1e-3
    with pytest.raises(correct.WrongResultError, match="the gradient of k"):
        correct.check(of, expected, library, "float64", results)


def test_calls_that_can_not_be_compared_with_the_oracle_are_not_measured(monkeypatch):
    monkeypatch.setattr(correct, "LARGEST", 0)
    monkeypatch.setattr(correct, "LARGEST_NOT_CAUSAL", 0)
    monkeypatch.setattr(correct, "HEAD", 16)
    for expression in ("softmax[causal=false,bias=true]", "softmax[bias=true]"):
        with pytest.raises(correct.UncheckedError, match="can not be compared with the oracle"):
            correct.oracle.__wrapped__(expression, layout(t=40), "float64", "numpy")


def test_without_causality_the_oracle_computes_the_first_queries_of_all_keys(monkeypatch):
    sizes, expression = layout(t=40, h=2, d=4), "lucid(softmax[causal=false])"
    whole = correct.oracle.__wrapped__(expression, sizes, "float64", "numpy")
    monkeypatch.setattr(correct, "LARGEST_NOT_CAUSAL", 0)
    monkeypatch.setattr(correct, "HEAD", 16)
    first = correct.oracle.__wrapped__(expression, sizes, "float64", "numpy")
    assert first.head == 16
    outs = [x.results.pop("the output")[:, :16] for x in (first, whole)]
    np.testing.assert_allclose(*outs, rtol=1e-9, atol=1e-9)
    assert {name: d.shape for name, d in first.results.items()} == {
        name: d.shape for name, d in whole.results.items()
    }


def test_ratios_are_of_times_measured_alternately(monkeypatch):
    """A machine that becomes ten times slower half way changes all times but no ratio."""
    now, ours_, pace = 0.0, [], 1.0

    def work(seconds):
        def call():
            nonlocal now
            now += seconds * pace

        return call

    turns = Turns({"peer": Run(work(2.0)), "slow": Run(work(8.0))})
    monkeypatch.setattr(paired.time, "perf_counter", lambda: now)
    turns()  # One warm-up round is not measured.
    for round_ in range(10):
        pace = 1.0 if round_ < 5 else 10.0
        turns()
        start = now
        work(4.0)()
        ours_.append(now - start)
    assert ratio(ours_, turns.times["peer"][1:]) == pytest.approx((2.0, 2.0, 2.0, 10))
    assert ratio(ours_, turns.times["slow"][1:]) == pytest.approx((0.5, 0.5, 0.5, 10))
    assert spread(ours_).q3 > 5 * spread(ours_).q1


def a_row(median=1.0, spread_=0.01, **changed):
    seconds = {"median": median, "q1": median - spread_, "q3": median + spread_, "rounds": 9}
    row = Row("lucid", "lucid", "forward", "torch", "cpu", "float32", {"t": 64}, "default")
    return replace(row, status=TIMED, seconds=seconds, **changed)


def beside(median, spread_=0.01, **peers):
    """A row whose ratio to `sdpa` has this median; its time is the same in every record."""
    ratio = {"median": median, "q1": median - spread_, "q3": median + spread_, "rounds": 9}
    return a_row(ratios={"sdpa": ratio, **peers})


def change(old, new):
    (found,) = changes(BenchRecord("", {}, rows=[old]), BenchRecord("", {}, rows=[new]), 0.1)
    return found


def verdict(old, new):
    return change(old, new).verdict


def test_compare_judges_ratios_beyond_their_noise():
    assert verdict(beside(1.0), beside(1.3)) == REGRESSED
    assert verdict(beside(1.3), beside(1.0)) == IMPROVED
    assert verdict(beside(1.0), beside(1.05)) == SAME
    assert verdict(beside(1.0, 0.2), beside(1.3, 0.2)) == SAME
    assert change(beside(1.0), beside(1.3)).text == "1.30 x the ratio to sdpa"
    base = {value: {"median": value, "q1": value, "q3": value, "rounds": 9} for value in (1.0, 2.0)}
    better_and_worse = beside(2.0, base=base[1.0]), beside(1.0, base=base[2.0])
    assert verdict(*better_and_worse) == REGRESSED


def test_compare_judges_peaks_and_results_of_rows_without_a_peer_too():
    assert verdict(a_row(), replace(a_row(), status=WRONG, seconds={})) == REGRESSED
    small = {"peak_tokens": [64, 128], "peak_bytes": [1e6, 2e6]}
    large = {"peak_tokens": [64, 128], "peak_bytes": [1e6, 4e6]}
    assert verdict(a_row(**small), a_row(**large)) == REGRESSED
    assert verdict(a_row(**small), a_row(**small)) == UNCOMPARED
    without_a_time = replace(a_row(**small), seconds={})
    assert verdict(without_a_time, without_a_time) == SAME
    result = changes(BenchRecord("", {}), BenchRecord("", {}, rows=[a_row()]), 0.1)
    assert [change.verdict for change in result] == [NEW]


def test_a_row_without_a_ratio_in_both_records_is_not_comparable_and_says_why():
    assert verdict(a_row(1.0), a_row(3.0)) == UNCOMPARED
    assert verdict(a_row(), beside(1.0)) == UNCOMPARED
    failed = a_row(ratios={"sdpa": {"error": 1.0}}, absent_peers={"sdpa": "it is off by 1"})
    lost = change(beside(1.0), failed)
    assert (lost.verdict, lost.text) == (UNCOMPARED, "no ratio to sdpa now: it is off by 1")


def compared(folder, old, new, threshold=0.1):
    """The exit code and the text of a comparison."""
    paths = folder / "old.json", folder / "new.json"
    for path, record in zip(paths, (old, new), strict=True):
        record.save(path)
    printed = io.StringIO()
    code = command.compare(*paths, threshold, Console(file=printed, width=200))
    return code, printed.getvalue()


def test_only_a_time_that_moved_is_shown_and_not_judged(tmp_path):
    slower = replace(beside(1.0), seconds=a_row(3.0).seconds)
    code, text = compared(
        tmp_path, BenchRecord("", {}, rows=[beside(1.0)]), BenchRecord("", {}, rows=[slower])
    )
    assert code == 0
    assert "sdpa 1.00 → 1.00" in text
    assert "3.00" in text
    assert "0 of 1 regressed by more than 10%: in the ratio to a peer" in text
    assert "times are not judged" in text
    assert "not comparable" not in text


def test_the_exit_code_of_compare_tells_whether_a_ratio_regressed(tmp_path):
    old = BenchRecord("", {"processor": "a"}, rows=[beside(1.0)])
    new = BenchRecord("", {"processor": "b"}, rows=[beside(2.0)])
    code, text = compared(tmp_path, old, new)
    assert code == 1
    assert "the machines differ in processor: a before, b now" in text
    assert compared(tmp_path, old, new, threshold=1.5)[0] == 0
    (tmp_path / "old.json").write_text("{}")
    with pytest.raises(ValueError, match="no record of format"):
        command.compare(tmp_path / "old.json", tmp_path / "new.json", 0.1, Console())


def test_rows_without_a_peer_are_counted(tmp_path):
    record = BenchRecord("", {}, rows=[a_row()])
    code, text = compared(tmp_path, record, record)
    assert code == 0
    assert "1 of 1 are not comparable by ratio: no peer was measured beside them" in text


def test_the_help_of_compare_says_that_times_are_not_judged(tmp_path):
    done = in_a_process("compare", "--help", folder=tmp_path, COLUMNS="200")
    assert "Times are shown, and not judged" in done.stdout


def test_another_version_of_a_peers_library_is_another_machine(tmp_path):
    """The package's own version is what two records compare."""
    old, new = (
        BenchRecord("", {"versions": {"torch": version, "precondattn": version}})
        for version in ("1", "2")
    )
    assert machines_differ(old, new) == ["torch: 1 before, 2 now"]


SIZES = {"b": 1, "t": 4, "s": 4, "h": 2, "n": 2, "u": 2, "d": 3, "e": 5}


def test_costs_are_those_computed_by_hand():
    softmax, lucid, delta = pa.Softmax(), pa.Lucid(), pa.Delta()
    # Two heads; N² = 16, d + e = 8, 3 d + 2 e = 19.
    assert flops(softmax, SIZES, "forward") == 2 * 16 * 8
    assert flops(softmax, SIZES, "forward_backward") == 2 * 16 * (8 + 19)
    assert flops(softmax, {**SIZES, "t": 1}, "decode") == 2 * (2 * 4 * 8)
    # A window of w tokens: 2 N w − w² in place of N². Without a mask it is 2 N².
    assert flops(pa.Softmax(window=2), SIZES, "forward") == 2 * (2 * 4 * 2 - 4) * 8
    assert flops(pa.Softmax(causal=False), SIZES, "forward") == 2 * 32 * 8
    # LUCID needs the same FLOPs again, once for each key/value head.
    assert flops(lucid, {**SIZES, "n": 1}, "forward") == (2 + 1) * 16 * 8
    assert flops(lucid, SIZES, "forward_backward") == 2 * 2 * 16 * (8 + 19)
    # The delta rule, in chunks of 64: N (6 d e + 4 C (d + e)).
    assert flops(delta, SIZES, "forward") == 2 * 4 * (6 * 15 + 4 * 64 * 8)
    assert flops(delta, SIZES, "decode") == 2 * 7 * 15


def test_bytes_are_those_computed_by_hand():
    # q and k have 24 elements each, v and o 40; y is written and read.
    assert moved_bytes(pa.Softmax(), SIZES, "forward", 4) == 4 * (24 + 24 + 40 + 40)
    assert moved_bytes(pa.Lucid(), SIZES, "forward", 4) == 4 * (24 + 24 + 40 + 40 + 2 * 40)
    # One token's q, k, v and o are a quarter of that; the cache contains four tokens of k and v.
    assert moved_bytes(pa.Softmax(), SIZES, "decode", 4) == 4 * (24 + 40 + 128 / 4)
    # A state is read and written: 2 heads of 3 × 5; then one token with its beta.
    assert moved_bytes(pa.Delta(), SIZES, "decode", 4) == 4 * (2 * 30 + (128 + 8) / 4)


def test_every_mechanism_has_a_cost():
    from precondattn_conformance.declared import expressions

    for expression in expressions(pieces=False):
        m = pa.parse(expression)
        known = layout(t=64, h=4, d=8).sizes
        shapes = {name: pattern.shape(known) for name, pattern in m.inputs.items()}
        sizes = m.inputs.sizes(expression, shapes)
        decode = ("decode",) if m.offers.causal else ()
        for work in ("forward", "forward_backward", *decode):
            assert flops(m, sizes, work) > 0, (expression, work)
            assert moved_bytes(m, sizes, work, 4) > 0, (expression, work)


def test_plots_are_written(tmp_path):
    peer = {"median": 2.0, "q1": 1.9, "q3": 2.2, "rounds": 9, "seconds": 0.5, "error": 1e-7}
    rows = [
        a_row(t / 64, sizes={"t": t}, ratios={"sdpa": peer}, peak_tokens=[t], peak_bytes=[64.0 * t])
        for t in (64, 128)
    ]
    written = plot.draw(BenchRecord("", {}, rows=rows), tmp_path)
    assert {path.name for path in written} == {
        f"{name}.{kind}" for name in ("ratios", "beside_plain") for kind in ("svg", "png")
    }
    assert all(path.stat().st_size > 1000 for path in written)
    assert not plot.draw(BenchRecord("", {}), tmp_path)


def test_peak_memory_is_that_of_the_call():
    """A call of the reference stores arrays of all pairs; at least one counts in the peak."""
    sizes = layout(t=512, h=8, d=4)
    call = MeasuredCall("softmax", sizes, "numpy", "float64", False, "reference")
    assert 8 * 512**2 * 8 < peak_bytes(call) < 30 * 8 * 512**2 * 8


def test_the_declared_cases_exist_and_have_unique_names():
    assert len({case.name for case in COMPARED}) == len(COMPARED)
    for case in COMPARED:
        pa.parse(case.mechanism)
        named = set(case.peers or ())
        assert {peer.name for peer in peers_of(case)} == named


def test_every_mechanism_has_a_forward_and_a_memory_case():
    cases = {case.name: case for case in declared()}
    assert set(cases) >= {case.name for case in COMPARED}
    for name in pa.mechanisms():
        assert (cases[name].mechanism, cases[name].work) == (name, "forward")
        assert cases[f"memory_{name}"].work == "memory"
    named = Selection(("gla", "memory_gla")).cases()
    assert [case.name for case in named] == ["gla", "memory_gla"]
    assert {case.name for case in Selection().cases()} <= {case.name for case in COMPARED}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"names": ("lucit",)}, "unknown case 'lucit'; the nearest are lucid"),
        ({"mechanisms": ("lucit",)}, "lucit"),
        ({"backends": ("nobody",)}, "unknown backend 'nobody'; known are"),
        ({"works": ("sideways",)}, "unknown work 'sideways'; known are forward"),
        ({"libraries": ("tensorflow",)}, "unknown array library 'tensorflow'"),
        ({"sizes": ("t=many",)}, "sizes are written as"),
        ({"sizes": ("h=8,n=3",)}, "h must be a multiple of n"),
        ({"dtype": "float8"}, "unknown dtype 'float8'"),
        ({"names": ("lucid",), "works": ("decode",)}, "no case is left"),
        ({"names": ("lucid",), "device": "nowhere"}, "torch has no device 'nowhere' here"),
        ({"rounds": 0}, "rounds must be 1 or above"),
    ],
)
def test_an_invalid_argument_is_refused_with_the_valid_choices(options, complaint):
    with pytest.raises(ValueError, match=complaint.replace("(", r"\(")):
        command.bench(console=Console(file=io.StringIO()), **options)


def test_an_invalid_argument_has_exit_code_2(tmp_path):
    done = in_a_process("bench", "lucit", folder=tmp_path)
    assert done.returncode == 2
    assert "unknown case 'lucit'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("module", "extra", "options"),
    [
        ("pytest_benchmark", "bench", {}),
        ("matplotlib", "bench", {"plot": Path("somewhere")}),
        ("torch", "torch", {}),
    ],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, module, extra, options):
    def is_another(package):
        return package != module and is_installed(package)

    monkeypatch.setattr(command, "is_installed", is_another)
    monkeypatch.setattr(libraries, "is_installed", is_another)
    with pytest.raises(ImportError, match=f"with its extra '{extra}'"):
        command.bench(names=("lucid",), console=Console(file=io.StringIO()), **options)


def test_the_performance_page_is_generated_from_the_saved_files():
    """The page equals the output of `docs/make_performance.py`."""
    maker = runpy.run_path(str(DOCS / "make_performance.py"))
    assert maker["PAGE"].read_text(encoding="utf-8") == maker["page"](maker["load_records"]())
    assert "Nothing has been measured yet" in maker["page"]({})
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
    draw_one(curves_beside_plain, BenchRecord("2026-01-01", {}, rows=rows), tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").read_text().startswith("<?xml")


def test_given_sizes_give_a_curve():
    sizes = ("t=16,h=2", "t=32,h=2,n=1")
    cases = Selection(mechanisms=("lucid",), sizes=sizes, works=("forward",)).cases()
    assert [(c.layout.t, c.layout.s, c.layout.h, c.layout.n) for c in cases] == [
        (16, 16, 2, 2),
        (32, 32, 2, 1),
    ]
