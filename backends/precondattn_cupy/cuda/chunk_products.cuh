// Products of float32 tiles in shared memory, as accurate as the call's dtype requires.
//
// Intermediate results of a chunk (a state, an inverse, what is written) are not rounded to 16 bits:
// for nearly equal keys, the delta rule would amplify this to relative errors of a tenth. In a call of 16
// bits, factors are rounded to tf32, whose 11 bits hold either dtype, and tensor cores multiply them. A
// precise kernel in float16, of which cancellation would lose digits, splits a factor x into two,
// x = h + l, and sums three tf32 products,
//
//     x y ≈ l_x h_y + h_x l_y + h_x h_y.
//
// In a float32 call nothing is rounded. A number of 16 bits needs neither: tf32 holds it, so l = 0.
// Rounding takes several instructions, and the warps of a block read the same right factor. So what is
// not of 16 bits is rounded once, when it is written to shared memory, wherever it has no other use.
#pragma once

#include "products.cuh"

// Rounds to the nearest number with 11 significant bits, ties away from 0.
__device__ __forceinline__ unsigned tf32(float x) {
#ifdef PRECONDATTN_SIMULATED
  return (__float_as_uint(x) + 0x1000u) & ~0x1fffu;
#else
  unsigned found;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(found) : "f"(x));
  return found;
#endif
}

// The rounding error of that, rounded to nearest itself.
__device__ __forceinline__ unsigned rest(float x) { return tf32(x - __uint_as_float(tf32(x))); }

// The numbers of a tile that is a factor.
enum Numbers {
  OF_16_BITS,  // from an array of the call's dtype
  FACTOR,      // of `as_factor` below
  WHOLE        // any float32
};

// x as a factor of a later product in a call of dtype T.
template <class T>
__device__ __forceinline__ float as_factor(float x) {
  return sizeof(T) == 2 && !IS_SPLIT<T> ? __uint_as_float(tf32(x)) : x;
}

template <class T, int COLUMNS>
__device__ __forceinline__ void store_factor(float* tile, int step, const Product<COLUMNS>& c) {
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      tile[row_of(i) * step + column_of(j, i)] = as_factor<T>(c.x[j][i]);
}

// What a product does with the numbers of a factor.
enum Treatment { AS_THEY_ARE, ROUNDED, IN_TWO };

template <class T>
__host__ __device__ constexpr Treatment treatment(Numbers numbers) {
  if (numbers == OF_16_BITS) return AS_THEY_ARE;
  if (IS_SPLIT<T>) return IN_TWO;
  return numbers == FACTOR ? AS_THEY_ARE : ROUNDED;
}

template <Treatment IS>
__device__ __forceinline__ unsigned main_part(float x) {
  return IS == AS_THEY_ARE ? __float_as_uint(x) : tf32(x);
}

// On tensor cores. The simulator has none; there, a test provides the instruction.
#ifndef PRECONDATTN_SIMULATED

// (16, 8) times (8, 8).
__device__ __forceinline__ void multiply_tf32(float (&c)[4], const unsigned (&a)[4],
                                              const unsigned (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, "
               "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif

#if !defined(PRECONDATTN_SIMULATED) || defined(PRECONDATTN_EMULATED_TENSORS)

// A lane has rows l / 4 and l / 4 + 8 of A, and column l / 4 of B, at depths l % 4 and l % 4 + 4.
template <Treatment LEFT, Treatment RIGHT, bool A_TRANSPOSED, bool B_TRANSPOSED, int COLUMNS,
          int DEPTH>
__device__ __forceinline__ void tf32_product(Product<COLUMNS>& c, const float* a, int a_step,
                                             const float* b, int b_step) {
  const int across = lane() / 4, along = lane() % 4;
  a += A_TRANSPOSED ? along * a_step + across : across * a_step + along;
  b += B_TRANSPOSED ? across * b_step + along : along * b_step + across;
// All of a deeper product at once has more factors in flight than a thread has registers.
#pragma unroll(DEPTH > 128 ? 4 : DEPTH / 8)
  for (int k = 0; k < DEPTH; k += 8) {
    unsigned left[4], left_rest[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i % 2 * 8, depth = k + i / 2 * 4;
      const float x = A_TRANSPOSED ? a[depth * a_step + row] : a[row * a_step + depth];
      left[i] = main_part<LEFT>(x);
      if (LEFT == IN_TWO) left_rest[i] = rest(x);
    }
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
      unsigned right[2], right_rest[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int depth = k + i * 4;
        const float x = B_TRANSPOSED ? b[8 * j * b_step + depth] : b[depth * b_step + 8 * j];
        right[i] = main_part<RIGHT>(x);
        if (RIGHT == IN_TWO) right_rest[i] = rest(x);
      }
      if (LEFT == IN_TWO) multiply_tf32(c.x[j], left_rest, right);
      if (RIGHT == IN_TWO) multiply_tf32(c.x[j], left, right_rest);
      multiply_tf32(c.x[j], left, right);
    }
  }
}

#else

// A number that is passed as it is has to be one of tf32.
template <Treatment IS>
__device__ __forceinline__ float main_number(float x) {
  assert(IS != AS_THEY_ARE || __float_as_uint(x) % 8192 == 0);
  return __uint_as_float(main_part<IS>(x));
}

template <Treatment LEFT, Treatment RIGHT, bool A_TRANSPOSED, bool B_TRANSPOSED, int COLUMNS,
          int DEPTH>
__device__ __forceinline__ void tf32_product(Product<COLUMNS>& c, const float* a, int a_step,
                                             const float* b, int b_step) {
  for (int k = 0; k < DEPTH; ++k)
    for (int i = 0; i < 4; ++i) {
      const float x = A_TRANSPOSED ? a[k * a_step + row_of(i)] : a[row_of(i) * a_step + k];
      const float left = main_number<LEFT>(x);
      for (int j = 0; j < COLUMNS / 8; ++j) {
        const int n = column_of(j, i);
        const float y = B_TRANSPOSED ? b[n * b_step + k] : b[k * b_step + n];
        const float right = main_number<RIGHT>(y);
        if (LEFT == IN_TWO) c.x[j][i] += __uint_as_float(rest(x)) * right;
        if (RIGHT == IN_TWO) c.x[j][i] += left * __uint_as_float(rest(y));
        c.x[j][i] += left * right;
      }
    }
}

#endif

// C += A B like add_product (products.cuh), for a call of dtype T.
template <class T, Numbers LEFT, Numbers RIGHT, bool A_TRANSPOSED, bool B_TRANSPOSED, int COLUMNS,
          int DEPTH>
__device__ __forceinline__ void add_tiles(Product<COLUMNS>& c, const float* a, int a_step,
                                          const float* b, int b_step) {
  static_assert(COLUMNS % 16 == 0 && DEPTH % 16 == 0, "tiles are made of 16 by 16");
  if constexpr (sizeof(T) == 2)
    tf32_product<treatment<T>(LEFT), treatment<T>(RIGHT), A_TRANSPOSED, B_TRANSPOSED, COLUMNS,
                 DEPTH>(c, a, a_step, b, b_step);
  else
    plain_product<A_TRANSPOSED, B_TRANSPOSED, COLUMNS, DEPTH>(c, a, a_step, b, b_step);
}
