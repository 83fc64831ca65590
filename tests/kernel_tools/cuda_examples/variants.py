"""Variants of the example kernels, some of which fail to compile or to fit."""

from pathlib import Path

from precondattn_kernel_tools.cuda_compiler import Variant

KERNELS = Path(__file__).parent / "kernels.cu"

SPILLS = """
extern "C" __global__ void __launch_bounds__(1024) spills(const float* x, float* y) {
  float kept[128];
  for (int i = 0; i < 128; ++i) kept[i] = x[i * blockDim.x + threadIdx.x];
  __syncthreads();
  for (int i = 0; i < 128; ++i) y[i * blockDim.x + threadIdx.x] = kept[127 - i] * kept[i];
}
"""
WIDE = SPILLS.replace("__launch_bounds__(1024)", "")
UNKNOWN = "template <class T> __global__ void k(T* x) {\n  *x = INFINITY;\n}\n"
LARGE = """
extern "C" __global__ void k(float* y) {
  __shared__ float x[16384];
  for (int i = threadIdx.x; i < 16384; i += blockDim.x) x[i] = y[i];
  __syncthreads();
  y[threadIdx.x] = x[16383 - threadIdx.x];
}
"""


def variants(target):
    for dtype in ("__half", "__nv_bfloat16", "float", "double"):
        for tile in (8, 16):
            name = f"product<{dtype}, {tile}>"
            yield Variant(name, KERNELS, name)
    yield Variant("grid total", KERNELS, "grid_total")
    yield Variant("spills", SPILLS, "spills")
    yield Variant("may spill", SPILLS, "spills", spill_limit=2048)
    yield Variant("too many registers", WIDE, "spills", threads=1024)
    yield Variant("few threads", WIDE, "spills", threads=128)
    yield Variant("has no such name", UNKNOWN, "k<float>")
    yield Variant("has no such file", KERNELS.with_name("absent.cu"), "k")
    yield Variant("has no such kernel", KERNELS, "product<float, 8, 8>")
    yield Variant("has no such option", UNKNOWN, "k<float>", ("-DINFINITY=1", "--absent"))
    yield Variant("is given it", UNKNOWN, "k<float>", ("-DINFINITY=1",))
    yield Variant("static is too large", LARGE, "k")
    dynamic = 99 << 10 if target == "sm_80" else 228 << 10
    yield Variant("dynamic", KERNELS, "total<float>", dynamic_shared_bytes=dynamic)
