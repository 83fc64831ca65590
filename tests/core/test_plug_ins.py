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
CALLS_AT_IMPORT = f"""
import time
import numpy as np
{A_BACKEND}
time.sleep(0.3)
class Other(Mine):
    name = "other"

pa.register_backend(Other)
q = np.ones((1, 3, 1, 2))
pa.lucid(q, q, q, backend="portable")
pa.parse("lucid(laser)")
Named = Mine
"""
INTERRUPTED = f"""
import sys
if not hasattr(sys, "interrupted"):
    sys.interrupted = True
    raise KeyboardInterrupt
{A_BACKEND}
"""
TOY = """
import time
from dataclasses import dataclass
import precondattn as pa
time.sleep(0.2)

@dataclass(frozen=True)
class Toy(pa.Softmax):
    name = "toy"
"""
EXITS = "import sys\nsys.exit('no licence [/red]')\n"
FRAMEWORK = "import time\ntime.sleep(0.5)\nclass Tensor: ...\ntime.sleep(0.5)\n"
MINE, OURS = "[precondattn.backends]\nmine = mine:Mine\n", "[precondattn.mechanisms]\nours = ours:"
NAMED = "[precondattn.backends]\nmine = mine:Named\n"

FIRST_CALLS = """
results = in_threads(16, lambda: pa.Lucid().explain(q, k, v).backends)
assert results == [("portable", "portable")] * 16, results
instances = in_threads(4, lambda: pa.Lucid().explain(q, k, v).plan.calls[0].backend)
assert len(set(map(id, instances))) == 1

# Threads that fill the table of signatures take no entries from each other.
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
FIRST_NAMES = """
def first():
    by_name = pa.Lucid().explain(q, k, v, backend="portable").backends
    return by_name, type(pa.parse("toy")).__name__

results = in_threads(8, first)
assert results == [(("portable", "portable"), "Toy")] * 8, results
assert pa.mechanisms()["toy"] is type(pa.parse("toy"))
"""
BROKEN = """
from precondattn.algebra import registry
assert pa.Lucid().explain(q, k, v).backends == ("portable", "portable")
pa.mechanisms()
why = "SystemExit: no licence [/red]"
assert (dict(discover().broken), dict(registry.broken)) == ({"mine": why}, {"ours": why})
"""
AFTER_AN_INTERRUPT = """
try:
    pa.lucid(q, k, v)
    raise AssertionError("not interrupted")
except KeyboardInterrupt:
    pass
assert pa.Lucid().explain(q, k, v, backend="portable").backends == ("portable", "portable")
assert "mine" in [backend.name for backend in discover().backends]
"""
CALLS_THE_LIBRARY = """
found = discover()
assert found.broken == (), found.broken
assert {"mine", "other"} < {backend.name for backend in found.backends}
assert discover() is found
"""
WHILE_ANOTHER_THREAD_IMPORTS = """
def imports():
    import mine

threads = [threading.Thread(target=imports, daemon=True)]
threads += [threading.Thread(target=lambda: pa.lucid(q, k, v), daemon=True) for _ in range(4)]
for thread in threads:
    thread.start()
    time.sleep(0.05)
for thread in threads:
    thread.join(60)
    assert not thread.is_alive()
"""
WHILE_A_FRAMEWORK_IS_IMPORTED = """
import array_api_strict
thread = threading.Thread(target=lambda: __import__("torch"))
thread.start()
while "torch" not in sys.modules:
    time.sleep(0.001)
while thread.is_alive():
    for x in (q, array_api_strict.asarray(q)):
        pa.lucid(x, x, x)
        pa.Lucid()(x, x, x)
"""


@pytest.mark.thorough(but=("first calls", "first names", "broken", "interrupted", "in threads"))
@pytest.mark.parametrize(
    ("program", "entries", "modules"),
    [
        pytest.param(FIRST_CALLS, "", {}, id="first calls"),
        pytest.param(
            FIRST_NAMES,
            "[precondattn.mechanisms]\ntoy = toy:Toy\n",
            {"toy": TOY},
            id="first names",
        ),
        pytest.param(BROKEN, f"{MINE}{OURS}Toy\n", {"mine": EXITS, "ours": EXITS}, id="broken"),
        pytest.param(AFTER_AN_INTERRUPT, MINE, {"mine": INTERRUPTED}, id="interrupted"),
        *(
            pytest.param(first + CALLS_THE_LIBRARY, NAMED, {"mine": CALLS_AT_IMPORT}, id=name)
            for name, first in (
                ("by a call", "pa.lucid(q, k, v)"),
                ("by an import", "import mine"),
                ("in threads", WHILE_ANOTHER_THREAD_IMPORTS),
            )
        ),
        pytest.param(WHILE_A_FRAMEWORK_IS_IMPORTED, "", {"torch": FRAMEWORK}, id="a framework"),
    ],
)
def test_in_a_new_process(tmp_path: Path, program, entries, modules):
    """The program runs beside these modules, which are installed with their entry points."""
    pytest.importorskip("array_api_strict")
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    metadata = tmp_path / "mine-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(entries)
    done = subprocess.run(
        [sys.executable, "-c", CALL + program],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
