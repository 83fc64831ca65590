"""The ledger of a backend, made from a device's results."""

import json
from importlib.util import spec_from_file_location

from precondattn_gpu import ledger
from precondattn_gpu.results import Results
from precondattn_gpu.task import TaskOutcome

MACHINE = {"device": "NVIDIA H200", "python": "3.12.3", "versions": {"torch": "2.11.0"}}


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
