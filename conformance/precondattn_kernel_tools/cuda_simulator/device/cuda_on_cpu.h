// CUDA C++ for g++: the builtins that a kernel uses without an include.
//
// The types, among them float16 and bfloat16, are those of CUDA's own headers, whose code for the
// host rounds as a GPU does. `PRECONDATTN_SIMULATED` is defined, for kernels that use plain C++
// in place of tensor cores or PTX. `__shared__` declarations are rewritten before compilation.
#pragma once
// C++'s headers that end in .h: abs, exp and isnan are global, with an overload for float.
#include <limits.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <type_traits>

#define PRECONDATTN_SIMULATED 1
// CUDA's headers define this for their own compiler; without it they warn or hide functions.
#define __CUDA_ARCH_LIST__ 800
#include <vector_types.h>
#include <vector_functions.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>

#undef __host__
#undef __device__
#undef __global__
#undef __constant__
#undef __shared__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __grid_constant__
#undef __align__
#define __host__
#define __device__
#define __constant__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
// `__global__` and `__shared__` are kept here: the preprocessed text is searched for them.

#include "interface.h"
#include "threads.h"
#include "warps.h"
#include "atomics.h"
#include "arithmetic.h"
#include "entry.h"
