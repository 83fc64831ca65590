"""What the default backends ask of an accelerator: few launches, little memory, and no wait."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ compiles the device")

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "measurements" / "launches" / "torch.json"
NUMBER_OF_SEGMENTS = {f"{name}, segment_ids" for name in ("channel", "cross_covariance", "nystrom")}
"""These compute one segment after the other, and so read how many there are."""
INDICES = {f"windowed, {work}" for work in ("no mask", "lengths", "key_mask")}
"""The order of tokens in windows is copied to the device."""


def printed(module, *arguments):
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.thorough
def test_a_call_has_no_more_launches_and_bytes_than_are_recorded():
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    found = printed("tests.kernel_tools.launches_on_absent_gpu")
    assert found.keys() == recorded.keys()
    for name, rows in recorded.items():
        for now, before in zip(found[name], rows, strict=True):
            assert now[0] <= before[0], (name, rows)
            assert now[1] <= before[1], (name, rows)


@pytest.mark.thorough(but=("gated_delta",))
@pytest.mark.parametrize("names", ["gated_delta", "all"])
def test_no_call_waits_for_the_device(names):
    waits = printed("tests.kernel_tools.waits_on_absent_gpu", *([names] if names != "all" else ()))
    assert waits.keys() == (NUMBER_OF_SEGMENTS | INDICES if names == "all" else set())
