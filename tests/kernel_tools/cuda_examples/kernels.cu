// Small kernels that are right, for the tests of how CUDA kernels are checked.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "convert.cuh"

// y = xᵀ, by tiles; the grid is (columns, rows) / TILE.
template <class T, int TILE>
__global__ void transpose(const T* __restrict__ x, T* __restrict__ y, int rows, int columns) {
  __shared__ T tile[TILE][TILE + 1];
  const int column = blockIdx.x * TILE + threadIdx.x, row = blockIdx.y * TILE + threadIdx.y;
  if (row < rows && column < columns) tile[threadIdx.y][threadIdx.x] = x[row * columns + column];
  __syncthreads();
  const int to_column = blockIdx.y * TILE + threadIdx.x, to_row = blockIdx.x * TILE + threadIdx.y;
  if (to_row < columns && to_column < rows)
    y[to_row * rows + to_column] = tile[threadIdx.x][threadIdx.y];
}

// y = Σ x, by one block: lanes by shuffles, warps through dynamic shared memory.
template <class T>
__global__ void total(const T* __restrict__ x, float* __restrict__ y, int count) {
  extern __shared__ float of_warps[];
  float sum = 0.0f;
  for (int i = threadIdx.x; i < count; i += blockDim.x) sum += to_float(x[i]);
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x < 32) {
    const int warps = blockDim.x / 32;
    sum = threadIdx.x < warps ? of_warps[threadIdx.x] : 0.0f;
    for (int down = 16; down > 0; down /= 2) sum += __shfl_down_sync(0xffffffffu, sum, down);
    if (threadIdx.x == 0) *y = sum;
  }
}

// One tile of c += a b. Where there are tensor cores, only this function changes.
template <class T, int TILE>
__device__ __forceinline__ float product_of_tiles(const T (&a)[TILE][TILE],
                                                  const T (&b)[TILE][TILE], int row, int column) {
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < TILE; ++k) sum += to_float(a[row][k]) * to_float(b[k][column]);
  return sum;
}

// c = a b, of any sizes; the grid is (columns, rows) / TILE.
template <class T, int TILE>
__global__ void product(const T* __restrict__ a, const T* __restrict__ b, T* __restrict__ c,
                        int rows, int inner, int columns) {
  __shared__ __align__(16) T tile_a[TILE][TILE], tile_b[TILE][TILE];
  const int row = blockIdx.y * TILE + threadIdx.y, column = blockIdx.x * TILE + threadIdx.x;
  float sum = 0.0f;
  for (int first = 0; first < inner; first += TILE) {
    const int k = first + threadIdx.x, l = first + threadIdx.y;
    tile_a[threadIdx.y][threadIdx.x] =
        row < rows && k < inner ? a[row * inner + k] : from_float<T>(0.0f);
    tile_b[threadIdx.y][threadIdx.x] =
        column < columns && l < inner ? b[l * columns + column] : from_float<T>(0.0f);
    __syncthreads();
    sum += product_of_tiles<T, TILE>(tile_a, tile_b, threadIdx.y, threadIdx.x);
    __syncthreads();
  }
  if (row < rows && column < columns) c[row * columns + column] = from_float<T>(sum);
}

// Running sums in a warp, with __syncwarp where a block of one warp needs no barrier.
extern "C" __global__ void running_sum(const float* x, float* y) {
  __shared__ volatile float sums[32];
  const int lane = threadIdx.x;
  float sum = x[lane];
  for (int back = 1; back < 32; back *= 2) {
    __syncwarp();
    sums[lane] = sum;
    __syncwarp();
    if (lane >= back) sum += sums[lane - back];
  }
  y[lane] = sum;
}

// What a warp makes of its lanes.
extern "C" __global__ void votes(const int* x, unsigned* y) {
  const int value = x[threadIdx.x];
  unsigned* to = y + threadIdx.x * 8;
  to[0] = __ballot_sync(0xffffffffu, value > 2);
  to[1] = __any_sync(0xffffffffu, value == 5);
  to[2] = __all_sync(0xffffffffu, value >= 0);
  to[3] = __reduce_add_sync(0xffffffffu, value);
  to[4] = __reduce_max_sync(0xffffffffu, value);
  to[5] = __match_any_sync(0xffffffffu, value);
  to[6] = __shfl_up_sync(0xffffffffu, value, 1, 8);
  to[7] = __syncthreads_count(value == 1);
}

// The sums of blocks, added up by whichever block is the last.
extern "C" __global__ void grid_total(const float* x, float* of_blocks, unsigned* ticket, float* y) {
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    float sum = 0.0f;
    for (int i = 0; i < 8; ++i) sum += x[blockIdx.x * 8 + i];
    of_blocks[blockIdx.x] = sum;
    __threadfence();
    is_last = atomicAdd(ticket, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (is_last && threadIdx.x == 0) {
    __threadfence();
    float sum = 0.0f;
    for (int block = 0; block < gridDim.x; ++block) sum += of_blocks[block];
    *y = sum;
  }
}

// Running sums: a block waits for the one before it, by tickets in the order in which they start.
extern "C" __global__ void chain(const float* x, float* y, unsigned* ticket,
                                 volatile unsigned* is_ready) {
  __shared__ unsigned block;
  if (threadIdx.x == 0) block = atomicAdd(ticket, 1u);
  __syncthreads();
  if (block > 0 && threadIdx.x == 0) {
    while (!is_ready[block - 1]) {
    }
    __threadfence();
  }
  __syncthreads();
  const int i = block * blockDim.x + threadIdx.x;
  y[i] = x[i] + (block > 0 ? y[i - blockDim.x] : 0.0f);
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_ready[block] = 1;
  }
}

// Each thread says where it is, and adds itself up.
extern "C" __global__ void places(int* y, int* count) {
  const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  y[block * blockDim.x * blockDim.y * blockDim.z + thread] = block * 100 + thread;
  atomicAdd(count, 1);
}

// The order in which threads and blocks run.
extern "C" __global__ void turns(int* y, int* turn) {
  y[atomicAdd(turn, 1)] = blockIdx.x * blockDim.x + threadIdx.x;
}

// Rounding of float16 and bfloat16, and of what is calculated with them.
template <class T>
__global__ void arithmetic(const T* x, const T* z, const float* wide, T* y, int count) {
  const int i = threadIdx.x;
  y[i] = x[i] * z[i];
  y[count + i] = x[i] + z[i];
  y[2 * count + i] = from_float<T>(wide[i]);
}
