"""Tools that check GPU kernels, with or without a GPU.

triton_interpreter  Triton kernels on a CPU, with the arithmetic of a GPU
triton_memory       loads and stores in this interpreter: bounds, and races between programs
triton_compiler     Triton kernels compiled without a GPU: registers, spills, shared memory
triton_launches     the launches of a package, recorded and not run, to be compiled
pallas_compiler     Pallas kernels compiled without a GPU, or lowered without a TPU
pallas_interpreter  Pallas kernels for a TPU on a CPU: races, and reads of uninitialised memory
cuda_simulator      CUDA kernels on a CPU: every thread, barrier and access is checked
cuda_compiler       CUDA kernels compiled without a GPU, by NVRTC as in CuPy
cuda_toolkit        finds CUDA's headers and NVRTC
nvrtc               NVRTC, called as a library
ahead_of_time       the command line of these compilers, their processes and reports
triton_code         a Triton kernel's code as a text, for deciding whether a saved report is valid
resources           the resources of a compiled kernel, and whether they are too many

Each module is imported separately, and requires only its own dependencies.
"""

from typing import Any

Foreign = Any
"""The type of objects of Triton and JAX, whose own types a type checker does not see."""
