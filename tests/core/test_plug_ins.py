"""Plug-ins and threads: the first calls of a process, and plug-ins that do odd things at import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CALL = """
import sys, threading, time
import numpy as np
import precondattn as pa
from precondattn.dispatch.discovery import discover

q, k, v = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 4))


def in_threads(count, function):
    barrier, results = threading.Barrier(count), []

    def one():
        barrier.wait()
        try:
            results.append(function())
        except BaseException as error:
            results.append(repr(error))

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
"""

A_BACKEND = """
import precondattn as pa

class Mine(pa.Backend):
    name = "mine"
    def prepare(self, piece, request):
        return "supports nothing"
"""


def run(folder: Path, program: str, entries: str = "", **modules: str) -> str:
    """What the program prints in a new process, with these modules and their entry points."""
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    metadata = folder / "mine-0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(entries)
    done = subprocess.run(
        [sys.executable, "-c", CALL + program],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


MINE = "[precondattn.backends]\nmine = mine:Mine\n"


@pytest.mark.parametrize("named", [{}, {"backend": "portable"}])
def test_the_first_calls_of_a_process_find_all_backends_in_every_thread(tmp_path, named):
    program = f"""
results = in_threads(16, lambda: pa.Lucid().explain(q, k, v, **{named}).backends)
assert results == [("portable", "portable")] * 16, results
instances = in_threads(4, lambda: pa.Lucid().explain(q, k, v).plan.calls[0].backend)
assert len(set(map(id, instances))) == 1
"""
    run(tmp_path, program)


def test_the_first_expressions_of_a_process_find_a_third_party_mechanism_in_every_thread(tmp_path):
    program = """
results = in_threads(8, lambda: type(pa.parse("toy")).__name__)
assert results == ["Toy"] * 8, results
"""
    module = """
import time
from dataclasses import dataclass
import precondattn as pa
time.sleep(0.2)

@dataclass(frozen=True)
class Toy(pa.Softmax):
    name = "toy"
"""
    run(tmp_path, program, "[precondattn.mechanisms]\ntoy = toy:Toy\n", toy=module)


@pytest.mark.parametrize("group", ["backends", "mechanisms"])
def test_a_plug_in_that_exits_at_import_is_broken_and_breaks_nothing_else(tmp_path, group):
    program = """
from precondattn.algebra import registry
assert pa.Lucid().explain(q, k, v).backends == ("portable", "portable")
pa.mechanisms()
print({**dict(discover().broken), **registry.broken})
"""
    entries = f"[precondattn.{group}]\nmine = mine:Mine\n"
    module = "import sys\nsys.exit('no licence [/red]')\n"
    printed = run(tmp_path, program, entries, mine=module)
    assert printed == "{'mine': 'SystemExit: no licence [/red]'}"


def test_an_interrupt_during_a_plug_ins_import_ends_the_call_and_the_next_one_loads_it(tmp_path):
    program = """
try:
    pa.lucid(q, k, v)
    raise AssertionError("not interrupted")
except KeyboardInterrupt:
    pass
assert pa.Lucid().explain(q, k, v, backend="portable").backends == ("portable", "portable")
assert "mine" in [backend.name for backend in discover().backends]
"""
    module = f"""
import sys
if not hasattr(sys, "interrupted"):
    sys.interrupted = True
    raise KeyboardInterrupt
{A_BACKEND}
"""
    run(tmp_path, program, MINE, mine=module)


CALLS_AT_IMPORT = f"""
import numpy as np
{A_BACKEND}
class Other(Mine):
    name = "other"

pa.register_backend(Other)
q = np.ones((1, 3, 1, 2))
pa.lucid(q, q, q, backend="portable")
pa.parse("lucid(laser)")
Named = Mine
"""


@pytest.mark.parametrize("first", ["pa.lucid(q, k, v)", "import mine"])
def test_a_plug_in_may_call_the_library_at_import(tmp_path, first):
    program = f"""
{first}
found = discover()
assert found.broken == (), found.broken
assert {{"mine", "other"}} < {{backend.name for backend in found.backends}}
assert discover() is found
"""
    entries = "[precondattn.backends]\nmine = mine:Named\n"
    run(tmp_path, program, entries, mine=CALLS_AT_IMPORT)


def test_a_plug_in_imported_by_one_thread_and_a_first_call_in_another_do_not_wait_for_each_other(
    tmp_path,
):
    program = """
def imports():
    import mine

threads = [threading.Thread(target=imports, daemon=True)]
threads += [
    threading.Thread(target=lambda: pa.lucid(q, k, v), daemon=True) for _ in range(4)
]
for thread in threads:
    thread.start()
    time.sleep(0.05)
for thread in threads:
    thread.join(60)
    assert not thread.is_alive()
found = discover()
assert found.broken == (), found.broken
assert {"mine", "other"} < {backend.name for backend in found.backends}
"""
    entries = "[precondattn.backends]\nmine = mine:Named\n"
    module = CALLS_AT_IMPORT.replace("class Other", "import time\ntime.sleep(0.5)\nclass Other")
    run(tmp_path, program, entries, mine=module)


FRAMEWORK = """
import time
time.sleep(0.5)
class Tensor: ...
time.sleep(0.5)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("asarray", ["np.asarray", "array_api_strict.asarray"])
def test_calls_work_while_another_thread_imports_a_framework(tmp_path, asarray):
    pytest.importorskip("array_api_strict")
    program = f"""
import array_api_strict
thread = threading.Thread(target=lambda: __import__("torch"))
thread.start()
while "torch" not in sys.modules:
    time.sleep(0.001)
x = {asarray}(q)
while thread.is_alive():
    pa.lucid(x, x, x)
    pa.Lucid()(x, x, x)
"""
    run(tmp_path, program, torch=FRAMEWORK)


def test_threads_that_fill_the_table_of_signatures_do_not_take_entries_from_each_other(tmp_path):
    program = """
from precondattn.execution import preparation
preparation.KEPT_SIGNATURES = 1
sys.setswitchinterval(1e-6)

m, x = pa.Lucid(), np.ones((1, 1, 1, 2))
caches = [m.init_cache(x, x, x, capacity=tokens) for tokens in range(1, 5)]

def check():
    for _ in range(100):
        for cache in caches:
            m.extend(cache, x, x, x)

assert in_threads(4, check) == [None] * 4
"""
    run(tmp_path, program)
