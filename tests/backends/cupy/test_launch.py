"""Launches of CUDA kernels: sources, arguments, and refusals."""

import re

import numpy as np
import pytest

from precondattn.kernel_backend.kernel_table import recurrences_in
from precondattn_cupy import launch, variants
from precondattn_cupy.backend import KERNELS
from precondattn_cupy.configurations import Configuration, configuration, forced, padded_width
from precondattn_cupy.launch import FOLDER, source

ARRAYS = (np.ones(8, np.float32), np.empty(8, np.float32), 1, 8, 0.0)


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.cu")))
def test_a_source_contains_each_header_once(name):
    text = source(name)
    assert '#include "' not in text
    defined = re.findall(r"__device__ __forceinline__ float wide\(float x\)", text)
    assert len(defined) == 1


@pytest.mark.parametrize("grid", [(0,), (2**31,), (1, 65536), (1, 1, 65536), (1, -1)])
def test_a_grid_that_no_gpu_supports_is_refused(grid):
    with pytest.raises(ValueError, match="a grid has from 1"):
        launch.launch("unit_rows", "unit_rows<float>", grid, 32, ARRAYS)


def test_an_integer_of_more_than_32_bits_is_refused():
    with pytest.raises(ValueError, match="32 bits; found 2147483648"):
        launch.launch("unit_rows", "unit_rows<float>", (1,), 32, (*ARRAYS[:2], 2**31, 8, 0.0))


def test_shared_memory_is_limited_by_the_device(monkeypatch):
    monkeypatch.setenv(launch.SIMULATE, "0")
    monkeypatch.setattr(launch, "_device", lambda: 0)
    monkeypatch.setattr(launch, "_shared_limit", lambda device: 50 << 10)
    with pytest.raises(MemoryError, match=r"needs 52224 bytes .* device 0 has 51200"):
        launch.launch("unit_rows", "unit_rows<float>", (1,), 32, ARRAYS, 51 << 10)


def test_configurations():
    assert [padded_width(width) for width in (1, 16, 17, 128, 300)] == [16, 16, 32, 128, 512]
    with pytest.raises(ValueError, match="at most 512"):
        padded_width(513)
    with forced(example=Configuration(32, 16)):
        assert configuration("example", 64, half=True).threads == 64
    with pytest.raises(KeyError):
        configuration("example", 64, half=True)


def test_every_kernel_of_a_source_has_a_variant():
    """Only kernels that are compiled ahead of time are known to compile."""
    listed = {variant.name.partition("<")[0] for variant in variants.variants("sm_80")}
    kernel = r"__global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\("
    defined = set()
    for path in FOLDER.glob("*.cu"):
        defined |= set(re.findall(kernel, path.read_text(encoding="utf-8")))
    assert defined
    assert listed == defined


def test_every_recurrence_launches_only_kernels_that_have_a_variant():
    listed = {variant.name for variant in variants.variants("sm_80")}
    for leaf in recurrences_in(KERNELS):
        for is_step in (False, True):
            launched = variants.launches(leaf.name, "bfloat16", 64, 64, is_step)
            assert {each.kernel for each in launched} <= listed, leaf
