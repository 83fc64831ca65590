// Small kernels that are wrong, each in one way. "here" marks the lines that the errors have to name.

#define FAULT extern "C" __global__ void

FAULT missing_barrier(const float* x, float* y, int n) {
  __shared__ float row[64];
  row[threadIdx.x] = x[threadIdx.x];  // here missing_barrier
  y[threadIdx.x] = row[n - 1 - threadIdx.x];  // here missing_barrier
}

// The barrier behind the last use of the row is missing, in a loop.
FAULT missing_second_barrier(const float* x, float* y, int n) {
  __shared__ float row[64];
  for (int i = 0; i < 2; ++i) {
    row[threadIdx.x] = x[threadIdx.x] + i;  // here missing_second_barrier
    __syncthreads();
    y[threadIdx.x] = row[n - 1 - threadIdx.x];  // here missing_second_barrier
  }
}

FAULT missing_syncwarp(const float* x, float* y, int n) {
  __shared__ volatile float row[64];
  row[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  if (threadIdx.x < 32) {
    row[threadIdx.x] = row[threadIdx.x] + row[threadIdx.x + 16];  // here missing_syncwarp
    y[threadIdx.x] = row[threadIdx.x];
  }
}

FAULT two_write(const float* x, float* y, int n) {
  y[threadIdx.x / 2] = x[threadIdx.x];  // here two_write
}

FAULT two_blocks_write(const float* x, float* y, int n) {
  y[threadIdx.x] += x[threadIdx.x];  // here two_blocks_write
}

FAULT missing_fence(const float* x, float* y, int n) {
  __shared__ float before;
  if (threadIdx.x) return;
  y[blockIdx.x] = x[blockIdx.x];  // here missing_fence
  before = atomicExch(y + 8, 1.0f);
  if (before == 1.0f) y[9] = y[0] + y[1];  // here missing_fence
}

FAULT divergent_barrier(const float* x, float* y, int n) {
  if (threadIdx.x < 40)
    __syncthreads();  // here divergent_barrier
  else
    __syncthreads();  // here divergent_barrier
}

FAULT barrier_after_return(const float* x, float* y, int n) {
  if (threadIdx.x >= 40) return;
  y[threadIdx.x] = x[threadIdx.x];
  __syncthreads();  // here barrier_after_return
}

FAULT uneven_loop(const float* x, float* y, int n) {
  for (int i = 0; i < 2 + threadIdx.x / 32; ++i)
    __syncthreads();  // here uneven_loop
}

FAULT barrier_in_a_part_of_a_warp(const float* x, float* y, int n) {
  if (threadIdx.x % 32 < 7) __syncthreads();  // here barrier_in_a_part_of_a_warp
  __syncwarp();  // here barrier_in_a_part_of_a_warp
}

FAULT read_behind(const float* x, float* y, int n) {
  y[threadIdx.x] = x[threadIdx.x + 1];  // here read_behind
}

FAULT read_before(const float* x, float* y, int n) {
  y[threadIdx.x] = x[(int)threadIdx.x - 2];  // here read_before
}

FAULT read_far(const float* x, float* y, int n) {
  y[threadIdx.x] = x[threadIdx.x + (1 << 18)];  // here read_far
}

__device__ void put(float* y, int i, float value) {
  y[i] = value;  // here write_behind
}

FAULT write_behind(const float* x, float* y, int n) {
  put(y, 2 * threadIdx.x, x[threadIdx.x]);  // here write_behind
}

FAULT update_behind(const float* x, float* y, int n) {
  atomicAdd(y + n, 1.0f);  // here update_behind
}

FAULT copy_behind(const float* x, float* y, int n) {
  if (threadIdx.x == 0) memcpy(y, x, 4 * n + 4);  // here copy_behind
}

FAULT null_pointer(const float* x, float* y, int n) {
  const float* nothing = n ? nullptr : x;
  y[threadIdx.x] = nothing[threadIdx.x];  // here null_pointer
}

FAULT shared_behind(const float* x, float* y, int n) {
  __shared__ float row[64], next[64];
  float* to = row;
  next[threadIdx.x] = 0.0f;
  to[threadIdx.x + 8] = x[threadIdx.x];  // here shared_behind
}

FAULT dynamic_behind(const float* x, float* y, int n) {
  extern __shared__ float rows[];
  rows[threadIdx.x] = x[threadIdx.x];  // here dynamic_behind
}

FAULT row_behind(const float* x, float* y, int n) {
  __shared__ float tile[8][9];
  tile[threadIdx.x / 16][threadIdx.x % 16] = x[threadIdx.x];  // here row_behind
}

FAULT local_behind(const float* x, float* y, int n) {
  float kept[4];
  for (int i = 0; i < 4; ++i) kept[i] = x[i];
  y[threadIdx.x] = kept[threadIdx.x];  // here local_behind
}

FAULT misaligned(const float* x, float* y, int n) {
  const float4 four = *reinterpret_cast<const float4*>(x + 1);  // here misaligned
  if (blockIdx.x == 0) y[threadIdx.x] = four.x + four.w;
}

FAULT misaligned_in_shared(const float* x, float* y, int n) {
  __shared__ float row[64];
  if (threadIdx.x == 0)
    *reinterpret_cast<float4*>(row) = make_float4(1, 2, 3, 4);  // here misaligned_in_shared
}

FAULT uninitialized(const float* x, float* y, int n) {
  __shared__ float row[64];
  if (threadIdx.x < 63) row[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = row[threadIdx.x];  // here uninitialized
}

FAULT uninitialized_sum(const float* x, float* y, int n) {
  __shared__ float sum;
  atomicAdd(&sum, x[threadIdx.x]);  // here uninitialized_sum
}

// What the block before left in shared memory is not there.
FAULT left_from_another_block(const float* x, float* y, int n) {
  __shared__ float row[64];
  if (blockIdx.x == 0) row[threadIdx.x] = x[threadIdx.x];
  if (blockIdx.x == 1) y[threadIdx.x] = row[threadIdx.x];  // here left_from_another_block
}

FAULT mask_without_itself(const float* x, float* y, int n) {
  y[threadIdx.x] = __shfl_sync(0x0000ffffu, x[threadIdx.x], 0);  // here mask_without_itself
}

FAULT mask_without_the_source(const float* x, float* y, int n) {
  if (threadIdx.x < 16)
    y[threadIdx.x] = __shfl_xor_sync(0xffffu, x[threadIdx.x], 16);  // here mask_without_the_source
}

FAULT lane_returned(const float* x, float* y, int n) {
  if (threadIdx.x % 32 >= 20) return;
  y[threadIdx.x] = __shfl_down_sync(0xffffffffu, x[threadIdx.x], 1);  // here lane_returned
}

FAULT lane_elsewhere(const float* x, float* y, int n) {
  float value = x[threadIdx.x];
  if (threadIdx.x % 2)
    value = __shfl_sync(0xffffffffu, value, 0);  // here lane_elsewhere
  else
    value = __shfl_sync(0xffffffffu, value, 1);  // here lane_elsewhere
  y[threadIdx.x] = value;
}

FAULT masks_that_differ(const float* x, float* y, int n) {
  const unsigned mask = threadIdx.x % 2 ? 0xffffffffu : 0x55555555u;
  if (threadIdx.x % 32 != 4) __syncwarp(mask);  // here masks_that_differ
  else __syncthreads();  // here masks_that_differ
}

FAULT waits_for_ever(const float* x, float* y, int n) {
  volatile float* flags = y;
  while (flags[(threadIdx.x + 1) % n] != 1.0f) {  // here waits_for_ever
  }
  flags[threadIdx.x] = 1.0f;
}

FAULT divides_by_zero(const float* x, float* y, int n) {
  y[threadIdx.x] = n / (int)threadIdx.x;  // here divides_by_zero
}

FAULT overflows(const float* x, float* y, int n) {
  y[threadIdx.x] = (1 << 26) * n;  // here overflows
}

FAULT asserts(const float* x, float* y, int n) {
  assert(threadIdx.x < 63);  // here asserts
}

__device__ float deep(const float* x, int n) {
  volatile float kept[1024];
  kept[n % 1024] = x[0];
  return n == 0 ? kept[0] : deep(x, n - 1) + kept[n % 1024];
}

FAULT needs_much_stack(const float* x, float* y, int n) { y[threadIdx.x] = deep(x, n); }

// No error, and no number that looks right.
extern "C" __global__ void uninitialized_local(const float* x, float* y, int n) {
  float sum;
  for (int i = 0; i < n; ++i) sum += x[i];
  y[threadIdx.x] = sum;
}
