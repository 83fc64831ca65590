"""What a call asks of the host and of the device, counted without a GPU."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.kernel_tools.headline_calls import CALLS, STEP


@pytest.fixture(scope="module")
def found():
    if shutil.which("g++") is None:
        pytest.skip("g++ compiles the absent device")
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernel_tools.calls_on_absent_gpu"],
        cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_cuda_graph_can_capture_every_call_of_the_headlines(found):
    """None of them reads an entry on the host or copies to the device, eager or captured."""
    names = {call.name for call in CALLS}
    assert found["eager"].keys() == names
    assert found["captured"].keys() > names
    assert len(found["masked"]) == 12
    assert len(found["refused"]) == 8, found["refused"]


@pytest.mark.slow
def test_few_operators_of_pytorch_are_around_the_kernels(found):
    """At most 12 in a forward pass for each input that is examined for NaN, and for the output."""
    for call in CALLS:
        launches, operators = found["eager"][call.name]
        assert launches > 0
        if call.work == STEP:
            assert sum(operators.values()) <= 10, (call.name, operators)
        assert operators.get("cumprod", 0) <= 1
        assert "isfinite" not in operators
        assert not operators.keys() & {"mm", "bmm", "addmm", "baddbmm"}
