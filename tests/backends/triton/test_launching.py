"""A kept kernel is the one that Triton would choose; no kernel is compiled here."""

from typing import NamedTuple

import pytest
import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import precondattn_triton.launching as launching
from precondattn_triton.launching import launch


class StandInDriver:
    device = 0

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return 10 + device

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


class StandInKernel:
    function, packed_metadata = 7, ()

    def __init__(self):
        self.calls = []

    def launch_metadata(self, *_):
        return None

    def run(self, *arguments):
        self.calls.append(arguments)


def body(x, y, count, scale, WIDTH, FLAG=False):
    pass


body.__annotations__ = {"WIDTH": "tl.constexpr", "FLAG": "tl.constexpr"}


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(driver, "_active", StandInDriver())
    monkeypatch.setattr(launching, "_compiled", {})

    def compiled(self, key, signature, device, *_):
        self.device_caches[device][0][key] = StandInKernel()
        return self.device_caches[device][0][key]

    monkeypatch.setattr(JITFunction, "_do_compile", compiled)
    return JITFunction(body)


class StridedArray(NamedTuple):
    array: object
    step: object


ARRAY = torch.zeros(64)
UNALIGNED = ARRAY[1:]
CALLS = [
    ((ARRAY, ARRAY, 5, 1.0), {"WIDTH": 16}),
    ((ARRAY, UNALIGNED, 5, 1.0), {"WIDTH": 16}),
    ((UNALIGNED, ARRAY, 5, 1.0), {"WIDTH": 16}),
    ((ARRAY.half(), ARRAY, 5, 1.0), {"WIDTH": 16}),
    ((ARRAY, None, 5, 1.0), {"WIDTH": 16}),
    ((ARRAY, (ARRAY, 5), 5, 1.0), {"WIDTH": 16}),
    ((ARRAY, StridedArray(ARRAY, 5), 5, 1.0), {"WIDTH": 16}),
    ((ARRAY, StridedArray(ARRAY, 16), 5, 1.0), {"WIDTH": 16}),
    ((ARRAY, StridedArray(UNALIGNED, 5), 5, 1.0), {"WIDTH": 16}),
    ((ARRAY, ARRAY, 1, 1.0), {"WIDTH": 16}),
    ((ARRAY, ARRAY, 16, 1.0), {"WIDTH": 16}),
    ((ARRAY, ARRAY, 0, 1.0), {"WIDTH": 16}),
    ((ARRAY, ARRAY, 2**63, 1.0), {"WIDTH": 16}),
    ((ARRAY, ARRAY, True, 1.0), {"WIDTH": 16}),
    ((ARRAY, ARRAY, 5, 2), {"WIDTH": 16}),
    ((ARRAY, ARRAY, 7, 2.5), {"WIDTH": 16}),
    ((ARRAY, ARRAY, 5, 1.0), {"WIDTH": 32}),
    ((ARRAY, ARRAY, 5, 1.0), {"WIDTH": 16, "FLAG": True}),
    ((ARRAY, ARRAY, 5, 1.0), {"WIDTH": 16, "num_warps": 8}),
    ((ARRAY, ARRAY, 5, 1.0), {"WIDTH": 16, "num_stages": 1}),
]


def test_a_kept_kernel_is_the_one_that_triton_would_choose(kernel):
    for device in (0, 1):
        driver.active.device = device
        chosen = [kernel[(2, 3)](*arguments, **constants) for arguments, constants in CALLS]
        for _ in range(2):  # The second time, what was kept is launched.
            for compiled, (arguments, constants) in zip(chosen, CALLS, strict=True):
                before = len(compiled.calls)
                launch(kernel, (2, 3), *arguments, **constants)
                assert len(compiled.calls) == before + 1
    assert len(launching._compiled) == 2 * (len(CALLS) - 2)  # 7 is like 5, and 0 like 16.


def test_it_launches_with_the_grid_the_stream_and_the_constants_in_order(kernel):
    for _ in range(2):
        launch(kernel, (2, 3), ARRAY, None, 5, 1.0, FLAG=True, WIDTH=16, num_warps=8)
    compiled = kernel[(2, 3)](ARRAY, None, 5, 1.0, FLAG=True, WIDTH=16, num_warps=8)
    by_triton, kept = (compiled.calls[i] for i in (0, 1))
    assert kept[:6] == by_triton[:6] == (2, 3, 1, 10, 7, ())
    assert kept[9:] == by_triton[9:] == (ARRAY, None, 5, 1.0, 16, True)


def test_whatever_observes_launches_sees_all_of_them(kernel, monkeypatch):
    launch(kernel, (1,), ARRAY, ARRAY, 5, 1.0, WIDTH=16)
    seen = []
    kernel.add_pre_run_hook(lambda *_, **__: seen.append("hook"))
    launch(kernel, (1,), ARRAY, ARRAY, 5, 1.0, WIDTH=16)
    kernel.pre_run_hooks.clear()
    monkeypatch.setattr(JITFunction, "run", lambda *_, **__: seen.append("run"))
    launch(kernel, (1,), ARRAY, ARRAY, 5, 1.0, WIDTH=16)
    assert seen == ["hook", "run"]


def test_exactly_the_constants_are_named(kernel):
    with pytest.raises(TypeError, match="must be named"):
        launch(kernel, (1,), ARRAY, ARRAY, 5, scale=1.0, WIDTH=16)
    with pytest.raises(TypeError, match="must be named"):
        launch(kernel, (1,), ARRAY, ARRAY, 5, 1.0, 16)
