"""Checking GPU kernels, also where there is no GPU.

triton_interpreter  Triton kernels on a CPU, with the arithmetic of a GPU: what do they compute?
triton_memory       what they read and write there, and which program does
triton_compiler     Triton kernels for a GPU that is not there: do they compile, and do they fit?
triton_launches     what a package would launch, noted and not run, to be compiled
pallas_compiler     Pallas kernels for GPUs and TPUs that are not there, by the same questions
pallas_interpreter  Pallas kernels for a TPU on a CPU: races, and memory that nobody wrote
tpu_compiler        Pallas kernels for a TPU by its own compiler, where that is installed
cuda_simulator      CUDA kernels on a CPU: every thread, barrier and access is watched
cuda_compiler       CUDA kernels for a GPU that is not there, as CuPy compiles them
cuda_toolkit        where CUDA's headers and its compiler are
nvrtc               that compiler, called as a library
ahead_of_time       the command line of these compilers, their processes and reports
triton_code         a Triton kernel's code as a text, by which a saved report is known to hold
resources           what a compiled kernel takes of a multiprocessor, and whether it is too much

None is imported before it is used, and what it needs is needed only then.
"""
