// The instructions of tensor cores in plain C++, as the manual of PTX defines them, for the
// simulator. To be included in front of products.cuh, whose own they stand for.
//
// Lane l holds of every 8 × 8 matrix the numbers 2 (l % 4) and the next of row l / 4, the first in
// the lower half of its register.
#pragma once

#include <cstring>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <class T>
__device__ inline unsigned both(T lower, T upper) {
  unsigned short x[2];
  memcpy(&x[0], &lower, 2);
  memcpy(&x[1], &upper, 2);
  return x[0] | (unsigned)x[1] << 16;
}

template <class T>
__device__ inline float half_of(unsigned both, int which) {
  const unsigned short x = both >> 16 * which;
  T found;
  memcpy(&found, &x, 2);
  return (float)found;
}

// The row that a lane points to.
template <class T>
__device__ inline const T* row_of_lane(const T* row, int lane) {
  return (const T*)__shfl_sync(0xffffffffu, (unsigned long long)row, lane);
}

// ldmatrix.sync.aligned.m8n8.x4[.trans].shared.b16: lane l points to row l % 8 of matrix l / 8.
template <bool TRANSPOSED, class T>
__device__ inline void load_matrices(unsigned (&to)[4], const T* row) {
  assert((unsigned long long)row % 16 == 0);
  const int lane = threadIdx.x % 32, own = lane / 4, first = 2 * (lane % 4);
  for (int matrix = 0; matrix < 4; ++matrix) {
    const T* straight = row_of_lane(row, 8 * matrix + own);
    const T* upper = row_of_lane(row, 8 * matrix + first);
    const T* lower = row_of_lane(row, 8 * matrix + first + 1);
    to[matrix] = TRANSPOSED ? both(upper[own], lower[own])
                            : both(straight[first], straight[first + 1]);
  }
}

// mma.sync.aligned.m16n8k16.row.col.f32: the four registers of A are its 8 × 8 quarters, first down
// and then to the right; those of B its halves, transposed; C has row l / 4, and l / 4 + 8.
template <class T>
__device__ inline void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < 16; ++k) {
      const int column = 2 * (lane % 4) + i % 2, quarter = i / 2 + 2 * (k / 8);
      const unsigned left = __shfl_sync(0xffffffffu, a[quarter], lane / 4 * 4 + k % 8 / 2);
      const unsigned right = __shfl_sync(0xffffffffu, k < 8 ? b0 : b1, column * 4 + k % 8 / 2);
      c[i] += half_of<T>(left, k % 2) * half_of<T>(right, k % 2);
    }
}
