// Products of tiles in shared memory, summed in the registers of a warp.
//
//     C += A B,    A (16, DEPTH),  B (DEPTH, COLUMNS),  C (16, COLUMNS)
//
// A warp has 16 rows of C. A lane has four elements of every eight columns: element i of eighth j is
//
//     C[row_of(i)][column_of(j, i)]
//
// which is how tensor cores return a product. float16 and bfloat16 use tensor cores. float32 does not,
// as it would lose 13 of its 23 bits there; it uses plain_product, as does everything in the simulator.
#pragma once

#include "numbers.cuh"

__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp() { return threadIdx.x / 32; }
__device__ __forceinline__ int row_of(int i) { return lane() / 4 + 8 * (i / 2); }
__device__ __forceinline__ int column_of(int j, int i) { return 8 * j + 2 * (lane() % 4) + i % 2; }

// Padding of the rows of shared tiles, in elements: eight rows that are read at once are then in
// different banks.
template <class T>
__host__ __device__ constexpr int gap() {
  return 16 / sizeof(T);
}

template <int COLUMNS>
struct Product {
  float x[COLUMNS / 8][4];
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) x[j][i] = 0.0f;
  }
};

// C += column k of A, of which a lane has the numbers of its two rows, times row k of B.
template <bool B_TRANSPOSED, int COLUMNS, class T>
__device__ __forceinline__ void add_outer(Product<COLUMNS>& c, float upper, float lower, const T* b,
                                          int b_step, int k) {
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
    const int n = column_of(j, 0);
    const float left = wide(B_TRANSPOSED ? b[n * b_step + k] : b[k * b_step + n]);
    const float right = wide(B_TRANSPOSED ? b[(n + 1) * b_step + k] : b[k * b_step + n + 1]);
    c.x[j][0] += upper * left;
    c.x[j][1] += upper * right;
    c.x[j][2] += lower * left;
    c.x[j][3] += lower * right;
  }
}

// A[m][k] is a[m * a_step + k], or, transposed, a[k * a_step + m]; B likewise.
template <bool A_TRANSPOSED, bool B_TRANSPOSED, int COLUMNS, int DEPTH, class T>
__device__ __forceinline__ void plain_product(Product<COLUMNS>& c, const T* a, int a_step,
                                              const T* b, int b_step) {
  const int row = row_of(0);
#pragma unroll 4
  for (int k = 0; k < DEPTH; ++k) {
    const float upper = wide(A_TRANSPOSED ? a[k * a_step + row] : a[row * a_step + k]);
    const float lower = wide(A_TRANSPOSED ? a[k * a_step + row + 8] : a[(row + 8) * a_step + k]);
    add_outer<B_TRANSPOSED>(c, upper, lower, b, b_step, k);
  }
}

// On tensor cores. The simulator has none; there, a test provides the two instructions.
#ifndef PRECONDATTN_SIMULATED

// Four 8 × 8 matrices of 16-bit numbers; lane l provides the address of row l % 8 of matrix l / 8.
template <bool TRANSPOSED, class T>
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], const T* row) {
  const unsigned at = (unsigned)__cvta_generic_to_shared(row);
  if (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at)
                 : "memory");
}

// (16, 16) times (16, 8).
template <class T>
__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                         unsigned b1) {
  static_assert(sizeof(T) == 2, "tensor cores take 16 bits");
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
               "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply<__nv_bfloat16>(float (&c)[4], const unsigned (&a)[4],
                                                        unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
               "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif

#if !defined(PRECONDATTN_SIMULATED) || defined(PRECONDATTN_EMULATED_TENSORS)

// C += 16 columns of A, from k on, times 16 rows of B.
template <bool B_TRANSPOSED, int COLUMNS, class T>
__device__ __forceinline__ void multiply_by_rows(Product<COLUMNS>& c, const unsigned (&left)[4],
                                                 const T* b, int b_step, int k) {
  const int row = lane() % 8, second = lane() / 8 % 2 * 8, third = lane() / 16 * 8;
#pragma unroll
  for (int n = 0; n < COLUMNS; n += 16) {
    unsigned right[4];
    load_matrices<!B_TRANSPOSED>(right, B_TRANSPOSED ? b + (n + row + third) * b_step + k + second
                                                     : b + (k + row + second) * b_step + n + third);
    multiply<T>(c.x[n / 8], left, right[0], right[1]);
    multiply<T>(c.x[n / 8 + 1], left, right[2], right[3]);
  }
}

template <bool A_TRANSPOSED, bool B_TRANSPOSED, int COLUMNS, int DEPTH, class T>
__device__ __forceinline__ void tensor_product(Product<COLUMNS>& c, const T* a, int a_step,
                                               const T* b, int b_step) {
  // The row of the 8 × 8 matrix whose address this lane provides: the second matrix is the next eight
  // rows of A, or the next eight of B's depth; the third is the other way round.
  const int row = lane() % 8, second = lane() / 8 % 2 * 8, third = lane() / 16 * 8;
#pragma unroll
  for (int k = 0; k < DEPTH; k += 16) {
    unsigned left[4];
    load_matrices<A_TRANSPOSED>(left, A_TRANSPOSED ? a + (k + row + third) * a_step + second
                                                   : a + (row + second) * a_step + k + third);
    multiply_by_rows<B_TRANSPOSED>(c, left, b, b_step, k);
  }
}

#endif

// C += A B, for the 16 rows of A that begin at `a`.
template <bool A_TRANSPOSED, bool B_TRANSPOSED, int COLUMNS, int DEPTH, class T>
__device__ __forceinline__ void add_product(Product<COLUMNS>& c, const T* a, int a_step, const T* b,
                                            int b_step) {
  static_assert(COLUMNS % 16 == 0 && DEPTH % 16 == 0, "tiles are made of 16 by 16");
#if !defined(PRECONDATTN_SIMULATED) || defined(PRECONDATTN_EMULATED_TENSORS)
  if constexpr (sizeof(T) == 2) {
    tensor_product<A_TRANSPOSED, B_TRANSPOSED, COLUMNS, DEPTH>(c, a, a_step, b, b_step);
    return;
  }
#endif
  plain_product<A_TRANSPOSED, B_TRANSPOSED, COLUMNS, DEPTH>(c, a, a_step, b, b_step);
}

// From a product to a tile in shared or global memory: 16 rows that begin at `tile`, all aligned to two
// elements.
template <int COLUMNS, class T>
__device__ __forceinline__ void store_product(T* tile, int step, const Product<COLUMNS>& c) {
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; i += 2)
      store_two(tile + row_of(i) * step + column_of(j, i), c.x[j][i], c.x[j][i + 1]);
}
