"""Real launches find their kernels in a cache of Triton that was filled without a GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from precondattn_kernel_tools.triton_cache import moved

KERNELS = Path(__file__).with_name("triton_examples") / "kernels.py"

FILLS = """
import sys, tempfile
from pathlib import Path
import torch
import kernels
from precondattn_kernel_tools.triton_cache import filled
from precondattn_kernel_tools.triton_host_code import HostCode

cache = Path(sys.argv[1])
x, unaligned = torch.empty(64, device="meta"), torch.empty(65, device="meta")[1:]
with tempfile.TemporaryDirectory() as empty:
    host = HostCode(Path(empty))
    with filled(cache, "sm_90", host_code=host.launcher) as of:
        host.driver()
        kernels.scale[(1,)](x, x, 64, 2.0, BLOCK=16)
    with filled(cache, "sm_90", until=0.0) as late:
        kernels.scale[(1,)](unaligned, x, 64, 2.0, BLOCK=16)
print(len(of.compiled), len(of.found), dict(late.left), len(late.compiled))
modules = [path.name for name in host.folders for path in (cache / name).iterdir()]
print(*(name.partition(".")[0] for name in modules))
"""

LAUNCHES = """
import sys
import torch
import triton
import kernels
from precondattn_kernel_tools.triton_cache import StubDriver
from triton.runtime.driver import driver

class Utilities:
    def get_device_properties(self, device): return {"max_shared_mem": 1 << 20}
    def load_binary(self, *binary): return 0, 0, 32, 0, 1024

class Driver(StubDriver):
    utils = Utilities()
    def launcher_cls(self, source, metadata): return lambda *launch: ran.append(source.name)

ran, hits = [], []
driver.set_active(Driver("sm_90"))
triton.knobs.cache.dir = sys.argv[1]
triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
x = torch.ones(65)
kernels.scale[(2,)](x, x, 96, 3.0, BLOCK=16)
kernels.scale[(2,)](x[1:], x, 96, 3.0, BLOCK=16)
print(ran, hits)
"""


def process(program, kernels, cache):
    """The output of a process without the interpreter, given the folder of the kernels' module."""
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(kernels), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program, cache],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.thorough
def test_a_real_launch_finds_in_a_moved_cache_what_meta_tensors_compiled(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        shutil.copy(KERNELS, folder)
    counts, modules = process(FILLS, here, here / "cache")
    assert counts == "1 0 {'scale': 1} 0", "one was compiled, and none after the end of the time"
    assert "cuda_utils" in modules.split()
    shutil.move(here / "cache", there / "cache")
    assert moved(there / "cache", there / "cache") == 1
    # The first launch has another address, grid, size and factor. The second has an address for
    # which Triton needs another kernel.
    (result,) = process(LAUNCHES, there, there / "cache")
    assert result == "['scale', 'scale'] [True, False]"
