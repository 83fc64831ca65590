"""The warning of an assembler with a known fault on Hopper, with a stub of the GPU and of ptxas."""

import warnings
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

import torch
import triton

from precondattn_triton import backend, target


class Tool:
    """Triton's knob, which starts ptxas to ask for its version."""

    def __init__(self, version):
        self.version, self.asked = version, 0

    def __call__(self):
        self.asked += 1
        return SimpleNamespace(path="/triton/ptxas", version=self.version)


@pytest.fixture
def warned(monkeypatch):
    """A function that returns the warnings of two calls, for a capability and a ptxas version."""

    def calls(capability, version):
        tool = Tool(version)
        nvidia = type("Nvidia", (), {"ptxas": property(lambda _: tool())})()
        monkeypatch.setattr(triton, "knobs", SimpleNamespace(nvidia=nvidia))
        monkeypatch.setattr(backend, "is_interpreting", lambda: False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        target._is_hopper.cache_clear()
        target._warn.cache_clear()
        array = SimpleNamespace(is_cuda=True, device=torch.device("cuda:0"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                with backend._on_device({"q": array}):
                    pass
        return [str(each.message) for each in caught], tool.asked

    yield calls
    target._is_hopper.cache_clear()
    target._warn.cache_clear()


@pytest.mark.parametrize(
    ("capability", "version", "is_warned", "asked"),
    [
        ((9, 0), "13.1", True, 1),
        ((9, 0), "13.3", False, 1),
        ((9, 0), "13.10", False, 1),
        ((10, 0), "12.8", False, 0),
    ],
)
def test_an_old_assembler_on_hopper_is_warned_of_once(
    warned, capability, version, is_warned, asked
):
    """The warning says what to set. On other GPUs the assembler is not asked for its version."""
    messages, times = warned(capability, version)
    assert (len(messages), times) == (int(is_warned), asked)
    for message in messages:
        assert f"ptxas {version} (/triton/ptxas)" in message
        assert "set TRITON_PTXAS_PATH to the ptxas of CUDA 13.3 or newer" in message


@pytest.mark.parametrize(("current", "is_enabled"), [(0, False), (0, True), (1, False), (1, True)])
def test_kernels_are_launched_on_the_device_of_the_inputs_without_recording(
    monkeypatch, current, is_enabled
):
    entered = []
    monkeypatch.setattr(backend, "is_interpreting", lambda: False)
    monkeypatch.setattr(target, "warn_of_old_assembler", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", lambda to: entered.append(to) or torch.no_grad())
    array = SimpleNamespace(is_cuda=True, device=torch.device("cuda:0"))
    with torch.set_grad_enabled(is_enabled):
        with backend._on_device({"q": array}):
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled() == is_enabled
    assert entered == [array.device] * (current != 0)
