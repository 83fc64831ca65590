"""Pytest marks of tests that need a tool that may be missing: g++, CUDA's headers, NVRTC."""

import shutil

import pytest

from precondattn_kernel_tools import cuda_toolkit


def missing(*tools):
    """The reason why the first missing tool is missing, or an empty string."""
    try:
        for tool in tools:
            tool()
    except cuda_toolkit.MissingToolError as reason:
        return str(reason)
    return ""


def compiler():
    if shutil.which("g++") is None:
        raise cuda_toolkit.MissingToolError("g++ is not installed")


def needs(*tools):
    reason = missing(*tools)
    return pytest.mark.skipif(bool(reason), reason=reason or "nothing is missing")


needs_simulator = needs(cuda_toolkit.include_folder, compiler)
needs_nvrtc = needs(cuda_toolkit.nvrtc_library, cuda_toolkit.include_folder)
