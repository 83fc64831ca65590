"""The CUDA simulator builds and launches modules, and refuses invalid ones."""

import shutil

import numpy as np
import pytest

from precondattn_kernel_tools import cuda_toolkit
from precondattn_kernel_tools.cuda_simulator import (
    CompilationError,
    MissingToolError,
    SimulatedModule,
    compilation,
)
from tests.kernel_tools.cuda_examples.launches import faults, kernels, normal, unwritten
from tests.kernel_tools.toolchain import needs_simulator


@needs_simulator
@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"grid": (0,)}, ValueError, r"grid has to be from 1 to .* not \(0,\)"),
        ({"block": (65, 16)}, ValueError, "block has 1040 threads, of 1024 at most"),
        ({"shared_mem": 50000}, ValueError, "shared_mem has to be at most 49152 bytes, not 50000"),
        ({"args": ()}, TypeError, "takes 3 arguments, and args has 0"),
        ({0: np.zeros(64)}, TypeError, r"args\[0\] .* floating-point of 32 bits, .* float64"),
        ({1: np.frombuffer(b"0" * 256, np.float32)}, ValueError, r"args\[1\] .* read-only"),
        ({2: 64}, TypeError, r"args\[2\] .* signed of 32 bits, and a value of int64 is given"),
    ],
)
def test_an_invalid_launch_is_refused_by_name(change, kind, says):
    args = [normal(64), unwritten(64), np.int32(64)]
    launch = {"grid": (1,), "block": (64,), "args": args, "shared_mem": 0}
    for name, value in change.items():
        if isinstance(name, int):
            args[name] = value
        else:
            launch[name] = value
    with pytest.raises(kind, match=says):
        faults().get_function("asserts")(**launch)


@needs_simulator
def test_shared_memory_has_a_limit_that_can_be_raised():
    function = kernels().get_function("total<float>")
    args, large = (normal(64), unwritten(1), np.int32(64)), 100 << 10
    with pytest.raises(ValueError, match="max_dynamic_shared_size_bytes can be raised"):
        function((1,), (32,), args, shared_mem=large)
    function.max_dynamic_shared_size_bytes = large
    function((1,), (32,), args, shared_mem=large)
    with pytest.raises(ValueError, match="at most 232448, not 300000"):
        function.max_dynamic_shared_size_bytes = 300000


@needs_simulator
@pytest.mark.parametrize(
    ("source", "options", "kind", "says"),
    [
        ('extern "C" __global__ void k() { nothing; }', {}, CompilationError, "kernel.cu:1:.*noth"),
        ("__global__ void k() {}", {}, CompilationError, "has no kernel"),
        (
            '\n__device__ void k() { asm volatile("exit;"); }',
            {},
            CompilationError,
            "line 2 has inline PTX, which is not simulated",
        ),
        (
            'extern "C" __global__ void k() { __shared__ float x = 1; }',
            {},
            CompilationError,
            "a declaration in shared memory is not understood: __shared__ float x = 1",
        ),
        ("", {"name_expressions": ["k<int>"]}, CompilationError, "k"),
        ("", {"options": ["-O3"]}, ValueError, "options has '-O3'"),
        ("", {"name_expressions": "k"}, TypeError, "have to be sequences"),
        (b"", {}, TypeError, "source has to be text or a Path, not bytes"),
    ],
)
def test_invalid_source_is_refused(source, options, kind, says):
    with pytest.raises(kind, match=says):
        SimulatedModule(source, **options)


def test_a_missing_tool_is_named_with_its_extra(monkeypatch):
    compilation._compiler.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(MissingToolError, match=r"g\+\+ is needed"):
        SimulatedModule("")
    monkeypatch.undo()
    cuda_toolkit.include_folder.cache_clear()
    monkeypatch.setattr(cuda_toolkit, "_folders", lambda name: iter(()))
    with pytest.raises(MissingToolError, match=r"cuda_fp16.h .* pip install 'precondattn.kernels"):
        SimulatedModule("")
    cuda_toolkit.include_folder.cache_clear()
