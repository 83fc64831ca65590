"""The ledger, the performance page and tuned configurations, made from a device's results."""

import json
import runpy
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from precondattn.kernel_backend.configurations import Key
from precondattn_conformance.bench.record import BenchRecord, Row
from precondattn_gpu import ledger, pages, winners
from precondattn_gpu.results import Results
from precondattn_gpu.task import TaskOutcome

DOCS = Path(__file__).parents[2] / "docs"
MACHINE = {"device": "NVIDIA H200", "python": "3.12.3", "versions": {"torch": "2.11.0"}}
KERNEL = {
    "kernel": "update",
    "seconds": 0.002,
    "tensor_share": 0.4,
    "bandwidth_share": 0.1,
    "stalls": {"wait": 1.5},
}

GRADIENT = KERNEL | {"kernel": "key_gradient", "seconds": 0.0015, "bandwidth_share": 0.9}
CALL = {"backend": "triton", "mechanism": "lucid_solve", "width": 128, "tokens": 8192}


@pytest.fixture
def measured(tmp_path):
    """A folder with the results of one device."""
    row = Row("forward_lucid", "lucid", "forward", "torch", "cuda (NVIDIA H200)", "bfloat16",
              {"t": 8192}, "triton,torch", ["triton", "torch"], "timed",
              seconds={"median": 0.00321, "q1": 0.003, "q3": 0.004, "rounds": 20})  # fmt: skip
    computer = {"processor": "a processor", "cores": 16, "threads": 16, "versions": {}}
    record = BenchRecord("2027-01-01", computer, [], [row])
    record.save(tmp_path / "record.json")
    saved = json.loads((tmp_path / "record.json").read_text())
    outcomes = {
        "alive": {
            "triton lucid bfloat16 64": TaskOutcome("passed"),
            "cupy laser float16 64": TaskOutcome("wrong", "off | by 3\nmore"),
        },
        "headline": {"triton lucid": TaskOutcome("passed", data={"record": saved})},
        "profile": {
            "both": TaskOutcome("passed", data={
                **CALL, "work": "forward_backward", "kernels": [KERNEL] * 4 + [GRADIENT]}),
            "forward": TaskOutcome("passed", data={
                **CALL, "work": "forward", "kernels": [KERNEL] * 2}),
        },
        "tuning": {
            "lucid_update 128": TaskOutcome("passed", data={
                "kernel": "lucid_update", "width": 128, "winner": [64, 64, 4, 3]}),
            "laser_forward 128": TaskOutcome("passed", data={
                "kernel": "laser_forward", "width": 128, "winner": None}),
        },
    }  # fmt: skip
    replays = {"forward_lucid": {"precondattn": {"median": 0.0025}, "flash_sdpa": "no graph"}}
    outcomes["roof"] = {"rates": TaskOutcome("passed", "790 TFLOP/s in a product, 4.30 TB/s")}
    outcomes["alive_bundled"] = {"triton lucid bfloat16 64": TaskOutcome("wrong", "off by 2")}
    outcomes["first_headline"] = {
        "first": TaskOutcome("passed", data={"record": saved, "replays": replays})
    }
    for stage, tasks in outcomes.items():
        results = Results(stage, MACHINE)
        for name, outcome in tasks.items():
            results.add(name, outcome, 1.0)
        results.save(tmp_path / "gpu" / "nvidia_h200")
    return tmp_path / "gpu"


def test_the_performance_page_shows_the_headline(measured):
    maker = runpy.run_path(str(DOCS / "make_performance.py"))
    text = maker["page"](pages.records(measured))
    assert "## nvidia_h200_headline" in text
    assert "3.21 ms" in text


def test_winners_become_configurations_of_the_device(measured, tmp_path, monkeypatch):
    from precondattn_triton import configurations

    results = Results.load(measured / "nvidia_h200" / "tuning.json")
    path = winners.write(results, tmp_path / "tuned")
    assert path.name == "nvidia_h200.json"
    monkeypatch.setattr(configurations.REGISTRY, "tuned", {})
    monkeypatch.setattr(configurations, "TUNED", configurations.REGISTRY.tuned)
    configurations.load_tuned(tmp_path / "tuned")
    key = Key("lucid_update", 128, True)
    expected = configurations.Configuration(64, 64, 4, 3)
    assert {"NVIDIA H200": {key: expected}} == configurations.TUNED
    assert configurations.REGISTRY.find(*key, "NVIDIA H200") == expected
    assert configurations.REGISTRY.find(*key, "NVIDIA H100") == configurations.UNTUNED[key]


def entry(**changed) -> dict:
    known = ledger.LedgerEntry(
        "laser:LaserKernels", "vjp", "bfloat16", 128, "9.0", "ptxas 13.1", "abc"
    )
    return known._replace(**changed)._asdict()


def test_what_agreed_is_in_the_ledger_and_what_also_disagreed_is_not(tmp_path, monkeypatch):
    results, bundled = Results("alive", MACHINE), Results("alive_bundled", MACHINE)

    def add(to, name, status, *entries, backend="triton"):
        to.add(name, TaskOutcome(status, data={"backend": backend, "ledger": list(entries)}), 1.0)

    add(results, "good", "passed", entry(), entry(verb="forward"))
    add(results, "disagrees", "wrong", entry(verb="forward"))
    add(results, "other", "passed", entry(verb="extend"))
    add(results, "crashes", "crashed", entry(verb="extend"))
    add(results, "declined", "unsupported", entry())
    add(results, "of cupy", "passed", entry(assembler="NVRTC 13.0"), backend="cupy")
    add(bundled, "good", "wrong", entry(assembler="ptxas 12.8"))
    for each in (results, bundled):
        each.save(tmp_path / "gpu" / "nvidia_h200")
    shown = ledger.shown(tmp_path / "gpu")
    assert [each._asdict() for each in shown["triton"]] == [entry()]
    assert [each.assembler for each in shown["cupy"]] == ["NVRTC 13.0"]
    assert shown["pallas"] == []
    package = tmp_path / "precondattn_triton"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setattr(ledger, "find_spec", lambda name: _spec(package))
    path = ledger.write("triton", shown["triton"])
    assert path == package / "ledger.json"
    assert json.loads(path.read_text()) == [entry()]


def _spec(package):
    return spec_from_file_location(package.name, package / "__init__.py")
