// Functions that the kernels of a chunkwise recurrence share: decay factors, and memory layouts.
//
//     D_ij = e^{g_{j+1} + … + g_i}  (j ≤ i),    reading_i = e^{g_1 + … + g_i},
//     writing_j = e^{g_{j+1} + … + g_C},        total = e^{g_1 + … + g_C}.
//
// An exponent is a difference of two sums over the chunk. A sum is two float32 numbers, high and low,
// which hold 48 bits, so that the weak gates after a strong one lose no digits. A gate of −∞ is
// replaced by −200, whose exponential is 0 in float32.
//
// With m the heads that have a state and T the tokens padded to whole chunks of C, a user's array is
// (b, tokens, heads, width), and one of its heads may serve several that have a state; the t queries
// are those of the last tokens. Scratch is rows (m, T, w), numbers (m, T) and states (m, chunks, w, W),
// with the heads of all sequences in m. Padding is 0, and its gates too.
#pragma once

#include "chunk_products.cuh"
#include "tiles.cuh"
#include "warps.cuh"

// Padding of the rows of shared tiles, in elements, so that the 32 numbers that a warp reads at once are
// in different banks: GAP where four of them are along a row, as those of A in A B, or of B in A Bᵀ;
// DEEP_GAP where eight of them are, as those of B in A B, or of A in Aᵀ B. A tile that is read in both
// ways has memory for the latter.
constexpr int GAP = 4, DEEP_GAP = 8;

// Allocates shared memory piece by piece.
struct Memory {
  unsigned char* next;
  template <class T>
  __device__ __forceinline__ T* take(int count) {
    T* found = reinterpret_cast<T*>(next);
    next += (count * sizeof(T) + 15) / 16 * 16;
    return found;
  }
};

// `count` rows of `width` numbers, `step` apart.
template <class T>
struct Rows {
  T* head;
  long long step;
  int count, width;
  bool by_16;
};

// One head of a user's array.
template <class T>
__device__ __forceinline__ Rows<T> tokens_of(T* array, int b, int head, int heads, int count,
                                             int width) {
  const long long first = (long long)b * count * heads + head;
  return {array + first * width, (long long)heads * width, count, width,
          width * (int)sizeof(T) % 16 == 0};
}

// Some rows of scratch, whose width is a multiple of 16.
template <class T>
__device__ __forceinline__ Rows<T> scratch_of(T* array, long long first, int count, int width) {
  return {array + first * width, width, count, width, true};
}

// Rows from `start` and columns from `first`, 0 outside the array.
template <int ROWS, int WIDTH, int PADDING = GAP, int THREADS = 2 * ROWS, class T>
__device__ __forceinline__ void load(float* tile, const Rows<T>& rows, int start, int first) {
  load_tile<THREADS, ROWS, WIDTH>(tile, WIDTH + PADDING, rows.head + first, rows.step, start,
                                  rows.count, rows.width - first, rows.by_16);
}

// The same as a factor, of a call of dtype T.
template <class T, int ROWS, int WIDTH, int PADDING = GAP, int THREADS = 2 * ROWS, class U>
__device__ __forceinline__ void load_factor(float* tile, const Rows<U>& rows, int start, int first) {
  load_converted<THREADS, ROWS, WIDTH>(
      tile, WIDTH + PADDING, rows.head + first, rows.step, start, rows.count, rows.width - first,
      rows.by_16, nullptr,
      [](U x) { return sizeof(U) == 2 ? wide(x) : as_factor<T>(wide(x)); });
}

// Multiplies each row by a number; each thread has the elements that it loaded from rows of T.
template <class T, int ROWS, int WIDTH, int PADDING = GAP>
__device__ __forceinline__ void scale_factor(float* tile, const float* factor) {
  constexpr int PART = 16 / sizeof(T);
  for (int at = threadIdx.x; at < ROWS * WIDTH / PART; at += 2 * ROWS) {
    const int row = at / (WIDTH / PART), column = at % (WIDTH / PART) * PART;
    float* own = tile + row * (WIDTH + PADDING) + column;
#pragma unroll
    for (int i = 0; i < PART; ++i) own[i] = as_factor<T>(own[i] * factor[row]);
  }
}

// The 16 rows of a product, written to rows from `start` and columns from `first` that exist.
template <int COLUMNS, class T>
__device__ __forceinline__ void store(const Rows<T>& rows, int start, int first,
                                      const Product<COLUMNS>& c) {
  const bool aligned = rows.width % 2 == 0;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const int row = start + row_of(i);
    if (row < 0 || row >= rows.count) continue;
    T* to = rows.head + row * rows.step + first;
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
      const int there = rows.width - first - column_of(j, i);
      if (there > 0)
        store_there(to + column_of(j, i), there, aligned, c.x[j][i], c.x[j][i + 1]);
    }
  }
}

template <int COLUMNS>
__device__ __forceinline__ void scale_rows(Product<COLUMNS>& c, const float* factor) {
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) c.x[j][i] *= factor[row_of(i)];
}

// Sums over a row of a product times a tile, whose 16 rows begin at `tile`, written to `sums`.
template <int COLUMNS>
__device__ __forceinline__ void sum_rows(float* sums, const Product<COLUMNS>& c, const float* tile,
                                         int step) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j)
      sum += c.x[j][i] * tile[row_of(i) * step + column_of(j, i)] +
             c.x[j][i + 1] * tile[row_of(i) * step + column_of(j, i + 1)];
    sum = sum_of_four(sum);
    if (lane() % 4 == 0) sums[row_of(i)] = sum;
  }
}

// Sums of the gates from a chunk's first token to each token, (high, low); 0 without decay.
template <int CHUNK>
__device__ __forceinline__ void load_sums(float* to, const float* sums, long long at) {
  to[threadIdx.x] = sums == nullptr ? 0.0f : sums[2 * at + threadIdx.x];
}

__device__ __forceinline__ float decay(const float* sums, int later, int earlier) {
  const float high = sums[2 * later] - sums[2 * earlier];
  return expf(fminf(high + (sums[2 * later + 1] - sums[2 * earlier + 1]), 0.0f));
}

__device__ __forceinline__ float reading(const float* sums, int token) {
  return expf(fminf(sums[2 * token] + sums[2 * token + 1], 0.0f));
}

// A warp's 16 rows of pairs, times D; 0 above the diagonal, and if strict, also on it.
template <bool STRICT, int CHUNK>
__device__ __forceinline__ void decay_pairs(Product<CHUNK>& pairs, const float* sums, float scale) {
#pragma unroll
  for (int j = 0; j < CHUNK / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int later = 16 * warp() + row_of(i), earlier = column_of(j, i);
      const bool seen = STRICT ? later > earlier : later >= earlier;
      pairs.x[j][i] = seen ? pairs.x[j][i] * decay(sums, later, earlier) * scale : 0.0f;
    }
}

// A Bᵀ of a chunk's rows, over all of their channels; A is of 16 bits in a call of 16 bits.
template <int CHUNK, int BLOCK, class T, class U>
__device__ __forceinline__ void add_pairs(Product<CHUNK>& pairs, float* tile_a, const Rows<T>& a,
                                          int start_a, float* tile_b, const Rows<U>& b,
                                          int start_b) {
  constexpr int STEP = BLOCK + GAP;
  for (int c = 0; c < a.width; c += BLOCK) {
    __syncthreads();
    load<CHUNK, BLOCK>(tile_a, a, start_a, c);
    load_factor<T, CHUNK, BLOCK>(tile_b, b, start_b, c);
    __syncthreads();
    constexpr Numbers OF_B = sizeof(U) == 2 ? OF_16_BITS : FACTOR;
    add_tiles<T, OF_16_BITS, OF_B, false, true, CHUNK, BLOCK>(pairs, tile_a + 16 * warp() * STEP,
                                                              STEP, tile_b, STEP);
  }
}

// The gates' gradient from Σ dx ∘ x over pairs, lower triangular in `pairs` (C, C + 1), for token
// threadIdx.x: gate t is in the pairs j < t ≤ i.
template <int CHUNK>
__device__ __forceinline__ float crossing(float* pairs) {
  __syncthreads();
  float sum = 0.0f;
  if (threadIdx.x < CHUNK) {
    for (int j = 0; j < CHUNK; ++j) {
      const float own = pairs[threadIdx.x * (CHUNK + 1) + j];
      pairs[threadIdx.x * (CHUNK + 1) + j] = sum;
      sum += own;
    }
  }
  __syncthreads();
  sum = 0.0f;
  if (threadIdx.x < CHUNK)
    for (int i = threadIdx.x; i < CHUNK; ++i) sum += pairs[i * (CHUNK + 1) + threadIdx.x];
  return sum;
}
