"""What a call asks of the host and of the device, counted without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def found():
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernel_tools.calls_on_absent_gpu"],
        cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.thorough
def test_a_cuda_graph_can_capture_every_call_of_the_headlines(found):
    """None of them reads an entry on the host or copies to the device, eager or captured.

    At most 12 operators of PyTorch are in a forward pass beside the kernels.
    """
    assert len(found["eager"]) == 17
    assert found["captured"].keys() > found["eager"].keys()
    assert len(found["masked"]) == 12
    for name, (launches, operators) in found["eager"].items():
        assert launches > 0
        assert sum(operators.values()) <= 10 or name.split()[1] != "step", (name, operators)
        assert operators.get("cumprod", 0) <= 1
        assert not operators.keys() & {"isfinite", "mm", "bmm", "addmm", "baddbmm"}
