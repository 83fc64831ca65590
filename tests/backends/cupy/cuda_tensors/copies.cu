// Rows of 16 bytes, copied while a thread does something else; `READS_EARLY` does so before they arrive.
#include "copies.cuh"

template <bool READS_EARLY>
__global__ void copied(const float* from, const unsigned char* is_there, float* to) {
  __shared__ __align__(16) float rows[4 * 32];
  Copies copies;
  copies.add(rows + 4 * threadIdx.x, from + 4 * threadIdx.x, is_there[threadIdx.x]);
  if (!READS_EARLY) copies.wait();
  __syncthreads();
  // Another thread's row.
  for (int i = 0; i < 4; ++i)
    to[4 * threadIdx.x + i] = rows[4 * ((threadIdx.x + 1) % blockDim.x) + i];
}
