"""The sample of mutants that the tests have to detect: how it is drawn, planted and recorded."""

import json
import subprocess
import sys

import pytest

from tests.mutation import cover, draw, kill


def test_the_sample_is_the_same_each_time_and_no_file_gives_two():
    sample = draw.draw(40, seed=3, most_of_jax=5)
    assert sample == draw.draw(40, seed=3, most_of_jax=5)
    assert len({drawn.file for drawn in sample}) == 40
    assert sum(drawn.is_of_jax for drawn in sample) <= 5
    assert all(drawn.is_there for drawn in sample)


def test_cheap_tests_of_different_files_come_first_and_each_test_once():
    seconds = {f"{file}.py::test_{i}": 0.1 * (i + 1) for file in "abc" for i in range(20)}
    batches = list(kill.batches(list(seconds), seconds))
    assert {test.partition("::")[0] for test in batches[0][:3]} == {"a.py", "b.py", "c.py"}
    assert sorted(test for batch in batches for test in batch) == sorted(seconds)


def run(tmp_path, task, code):
    file = tmp_path / "task.json"
    file.write_text(json.dumps(task))
    environment = cover.environment(file) | {"PYTEST_CURRENT_TEST": "a.py::test (call)"}
    said = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    return said.stdout.strip()


CODE = "import numpy as np; from precondattn.arrays import upcast; print(upcast(np.ones(1)).dtype)"


def test_a_mutant_is_planted_in_a_process_and_no_file_is_written(tmp_path):
    *_, in_half = (
        mutant
        for mutant in draw.python_mutants((draw.ROOT / "precondattn/arrays.py").read_text())
        if mutant.function == "upcast" and mutant.kind == "comparison"
    )
    drawn = draw.DrawnMutant("precondattn/arrays.py", in_half.key, in_half.kind)
    mutant, before = drawn.mutant(), (draw.ROOT / drawn.file).read_text()
    plant = {"module": drawn.module, "start": mutant.start, "stop": mutant.stop, "new": mutant.new}
    assert run(tmp_path, {"plant": plant}, CODE) == "float32"
    assert (draw.ROOT / drawn.file).read_text() == before


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is new in Python 3.12")
def test_a_line_that_is_executed_is_noted_with_the_test(tmp_path):
    text = (draw.ROOT / "precondattn/arrays.py").read_text()
    line = next(i for i, each in enumerate(text.splitlines(), 1) if "in HALF:" in each)
    note = {"precondattn.arrays": {line: [7], 1: [8]}}
    run(tmp_path, {"note": note, "folder": str(tmp_path)}, CODE)
    sample = [None] * 9
    assert cover.covering(sample, tmp_path)[7] == ["a.py::test"]
