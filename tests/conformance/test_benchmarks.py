"""Benchmarks: refusals, saved files, arithmetic. No test asserts a time."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import precondattn as pa
from precondattn.backend import Backend
from precondattn.command_line.commands import app
from precondattn.dispatch.discovery import register_backend
from precondattn.installed import is_installed
from precondattn.method_backend import MethodRunner
from precondattn_conformance import libraries
from precondattn_conformance.bench import command, correct, paired, peers
from precondattn_conformance.bench.cases import COMPARED, declared, layout
from precondattn_conformance.bench.computation import backward_run, forward_run, ours
from precondattn_conformance.bench.paired import Run, Turns, ratio, spread
from precondattn_conformance.bench.peers import PEERS, peers_of
from precondattn_conformance.bench.record import TIMED, WRONG, load
from precondattn_conformance.bench.selection import Selection
from precondattn_conformance.memory import MeasuredCall, peak_bytes
from precondattn_conformance.peers import project


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
    right = peers.sdpa()

    def wrong(q, k, v):
        return 1.01 * right(q, k, v)

    made = [
        p._replace(make=lambda m, b: peers.Computation("sdpa", peers.SOFTMAX, wrong))
        for p in PEERS
        if p.name == "sdpa"
    ]
    monkeypatch.setattr(peers, "PEERS", tuple(made))
    saved = tmp_path / "run.json"
    code, _ = run_quick("softmax", save=saved)
    (row,) = load(saved).rows
    assert code == 0
    assert row.seconds
    assert not row.ratios
    assert "is off by" in row.absent_peers["sdpa"]


@pytest.mark.parametrize(("name", "heads"), [("sdpa", 1), ("naive_lucid", 4)])
def test_peers_agree_with_the_mechanisms_they_are_compared_with(name, heads):
    (peer,) = (p for p in PEERS if p.name == name)
    of = peer.make(pa.Lucid(), None)
    sizes = layout(t=40, h=4, n=heads, d=8)
    expected = correct.oracle(str(of.mechanism), sizes, "float64")
    torch = libraries.named("torch")
    arrays = {n: torch.array(a, "float64") for n, a in expected.inputs.items()}
    result = forward_run(of, torch, arrays).call()["the output"]
    np.testing.assert_allclose(
        torch.numpy(result), expected.results["the output"], rtol=1e-9, atol=1e-11
    )


@pytest.fixture
def few_first_tokens(monkeypatch):
    """The oracle computes 16 tokens of a call, and continues its cache."""
    for name, value in {"LARGEST": 0, "LARGEST_NOT_CAUSAL": 0, "HEAD": 16}.items():
        monkeypatch.setattr(correct, name, value)


@pytest.mark.parametrize(
    ("t", "name", "at", "what"),
    [
        (100, "the output", 90, "the last tokens"),
        (100, "the output", 9, "the output"),
        (40, "the gradient of k", 30, "the gradient of k"),
    ],
)
@pytest.mark.usefixtures("few_first_tokens")
def test_a_fault_anywhere_in_a_long_call_is_detected(t, name, at, what):
    expected = correct.oracle.__wrapped__("lucid", layout(t=t, h=2, d=4), "float64")
    library, of = libraries.named("numpy"), ours(pa.Lucid(), "reference")
    if name == "the output":
        results = forward_run(of, library, expected.inputs).call()
    else:
        results = backward_run(of, library, expected.inputs, expected.cotangent).call()
    checked = correct.check(of, expected, library, "float64", results)
    last = f" and the last {correct.TAIL}" if len(results) == 1 else ""
    assert checked.what == f"the first 16 tokens{last}"
    results[name][:, at] += 1e-3
    with pytest.raises(correct.WrongResultError, match=what):
        correct.check(of, expected, library, "float64", results)


@pytest.mark.usefixtures("few_first_tokens")
def test_the_last_tokens_may_lose_twice_what_the_definition_loses_in_float32(monkeypatch):
    of, library = ours(pa.Lucid(), None), libraries.named("numpy")
    results = {}
    for dtype in ("float32", "float64"):
        expected = correct.oracle.__wrapped__("lucid", layout(t=100, h=2, d=4), dtype)
        arrays = {name: array.astype(dtype) for name, array in expected.inputs.items()}
        results[dtype] = forward_run(of, library, arrays).call()
        checked = correct.check(of, expected, library, dtype, results[dtype])
        assert checked.bound == correct.bound(dtype, correct.KIND)  # The usual bound suffices here.
        results[dtype]["the output"][:, 90] *= 1 + 3 * checked.bound
        with pytest.raises(correct.WrongResultError, match="the last tokens"):
            correct.check(of, expected, library, dtype, results[dtype])
        monkeypatch.setattr(correct, "lost_by_definition", lambda *arguments: 4e-4)
        if dtype == "float32":
            assert correct.check(of, expected, library, dtype, results[dtype]).bound == 8e-4
    with pytest.raises(correct.WrongResultError, match="the last tokens"):  # Not used in float64.
        correct.check(of, expected, library, "float64", results["float64"])


@pytest.mark.parametrize("expression", ["lucid", "ccq", "retention"])
def test_what_the_definition_loses_is_that_of_a_whole_call(monkeypatch, expression):
    monkeypatch.setattr(correct, "PART", 16)
    m, sizes = pa.parse(expression), layout(t=70, h=4, n=2, d=8)._replace(b=2)
    wide = correct.inputs_of(expression, sizes, "float32")
    narrow = {name: array.astype("float32") for name, array in wide.items()}
    outs = [m(**x, backend="reference")[:, -correct.TAIL :] for x in (narrow, wide)]
    whole = correct.error(*outs)
    assert whole / 3 < correct.lost_by_definition(m, wide, "float32") < 3 * whole


@pytest.mark.usefixtures("few_first_tokens")
@pytest.mark.parametrize("expression", ["softmax[causal=false,bias=true]", "softmax[bias=true]"])
def test_a_call_that_can_not_be_compared_with_the_oracle_is_not_measured(expression):
    with pytest.raises(correct.UncheckedError, match="can not be compared with the oracle"):
        correct.oracle.__wrapped__(expression, layout(t=40), "float64")


def test_without_causality_the_oracle_computes_the_first_queries_of_all_keys(request):
    call = ("lucid(softmax[causal=false])", layout(t=40, h=2, d=4), "float64")
    whole = correct.oracle.__wrapped__(*call)
    request.getfixturevalue("few_first_tokens")
    few = correct.oracle.__wrapped__(*call)
    assert few.head == 16
    outs = [x.results["the output"][:, :16] for x in (few, whole)]
    np.testing.assert_allclose(*outs, rtol=1e-9, atol=1e-9)
    assert {n: d.shape for n, d in few.results.items() if n != "the output"} == {
        n: d.shape for n, d in whole.results.items() if n != "the output"
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
        ({"backends": ("nobody",)}, "unknown backend 'nobody'; known are"),
        ({"works": ("sideways",)}, "unknown work 'sideways'; known are forward"),
        ({"sizes": ("t=many",)}, "sizes are written as"),
        ({"sizes": ("h=8,n=3",)}, "h must be a multiple of n"),
        ({"dtype": "float8"}, "unknown dtype 'float8'"),
        ({"names": ("lucid",), "works": ("decode",)}, "no case is left"),
        ({"names": ("lucid",), "device": "nowhere"}, "torch has no device 'nowhere' here"),
        ({"rounds": 0}, "rounds must be 1 or above"),
        ({"neighbours": -1}, "neighbours must be 0 or above; found -1"),
    ],
)
def test_an_invalid_argument_is_refused_with_the_valid_choices(options, complaint):
    with pytest.raises(ValueError, match=complaint.replace("(", r"\(")):
        command.bench(console=Console(file=io.StringIO()), **options)


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


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("bench", "lucit"), 2, "unknown case 'lucit'"),
        (("compare", "--help"), 0, "Times are shown, and not judged"),
    ],
)
def test_what_the_command_line_says(arguments, code, says):
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert done.exit_code == code
    assert says in " ".join(done.output.split())
