"""Triton's cache filled for the first runs: the calls and the kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from precondattn_gpu import shipped, warm_calls
from precondattn_gpu.first_headline import HEADLINES


@pytest.mark.thorough
def test_what_is_compiled_for_a_call_is_what_the_call_launches():
    script = Path(__file__).with_name("launched_warm.py")
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, script],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "37 kernels, different: []"


def test_every_shipped_call_and_every_headline_is_compiled_in_the_order_of_the_first_run():
    works = warm_calls.works()
    timed = [each for each in HEADLINES if each.backend == "triton"]
    assert len(works) == len(shipped.calls("triton")) + len(timed)
    names = [work.name for work in works]
    assert len(set(names)) == len(names)
    orders = [(work.dtype, max(work.layout.d, work.layout.e)) for work in works]
    first = [order == ("bfloat16", 128) for order in orders]
    assert first == sorted(first, reverse=True)
    assert [work.layout.t for work in works if work.is_step and work.layout.t > 1024] == [32769]


def test_a_windowed_call_has_the_tokens_of_its_grid():
    listed = "windowed[size=7,shift=3,grid=64/64,bias=true]"
    call = shipped.ShippedCall("triton", listed, "bfloat16", 128, 128)
    assert (call.expression, call.tokens) == (listed.replace("64/64", "16/16"), 16 * 16)
    assert listed in call.name
