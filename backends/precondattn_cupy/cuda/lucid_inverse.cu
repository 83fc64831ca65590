// The inverses of LUCID's diagonal super-blocks, all at once.
//
//     N = (I + L)⁻¹,    L = stril(Φ) diag(β)  for the forward solve,  diag(β) stril(Φ)  for backward,
//
// by recursive 2×2 block inversion,
//
//     [[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]],
//
// C A⁻¹ first; the smallest blocks, of 16, by substitution. Doubling the Neumann series instead would
// lose all digits for nearly equal keys. For β in [0, 2] and any keys, no entry of such an inverse is
// larger than 2, so 16 bits represent them.
//
// A super-block of S tokens has S × S elements of scratch (m, T, S): N below and on its diagonal, and Lᵀ
// above, except that diagonal tiles hold N only, with zeros.
#include "lucid_tiles.cuh"

// Inverts a diagonal block of 16 rows of L; a lane has a column.
__device__ __forceinline__ void invert_least(float* inverse, const float* strict, int step) {
  const int column = lane() % 16;
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float found = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 0; j < i; ++j) found -= strict[i * step + j] * x[j];
    x[i] = found;
  }
  if (lane() < 16)
#pragma unroll
    for (int i = 0; i < 16; ++i) inverse[i * step + column] = x[i];
}

// From inverted blocks of HALF rows to blocks of twice as many rows, up to the whole tile. C A⁻¹
// replaces C in `strict`.
template <int TILE, int HALF>
__device__ __forceinline__ void invert_larger(float* inverse, float* strict) {
  if constexpr (HALF < TILE) {
    constexpr int STEP = step_of<float, TILE>();
    const int row = 16 * warp(), first = row / (2 * HALF) * 2 * HALF, second = first + HALF;
    Product<HALF> found;
    if (row >= second) {
      found.clear();
      add_product<false, false, HALF, HALF>(found, strict + row * STEP + first, STEP,
                                            inverse + first * STEP + first, STEP);
      __syncwarp();
      store_product(strict + row * STEP + first, STEP, found);
    }
    __syncthreads();
    if (row >= second) {
      found.clear();
      add_product<false, false, HALF, HALF>(found, inverse + row * STEP + second, STEP,
                                            strict + second * STEP + first, STEP);
#pragma unroll
      for (int j = 0; j < HALF / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) found.x[j][i] = -found.x[j][i];
      store_product(inverse + row * STEP + first, STEP, found);
    }
    __syncthreads();
    invert_larger<TILE, 2 * HALF>(inverse, strict);
  }
}

// A pair of tiles of a super-block, `low` and the one `apart` after it: Lᵀ, or, for a diagonal tile, N.
// The grid is (T / TILE · S / TILE, m).
template <class T, int TILE, int KEY_WIDTH, bool BY_ROW>
__global__ void __launch_bounds__(2 * TILE, 1) lucid_systems(
    const T* __restrict__ keys, const float* __restrict__ factor, const int* __restrict__ segments,
    T* __restrict__ inverse, int s, int heads, int tokens, int super, float scale, float shift) {
  constexpr int KEY_STEP = step_of<T, KEY_WIDTH>(), STEP = step_of<float, TILE>();
  extern __shared__ __align__(16) unsigned char memory[];
  const int tiles = super / TILE, low = blockIdx.x / tiles * TILE, apart = blockIdx.x % tiles;
  const int high = low + apart * TILE;
  if (high >= tokens || high / super != low / super) return;
  const long long head = blockIdx.y;
  if (segments != nullptr) segments += head / heads * s;
  factor += head * tokens;
  keys += head * tokens * KEY_WIDTH;
  inverse += (head * tokens + low) * super + high % super;
  if (reach(segments, s, tokens, low, TILE).high <= high) {
    for (int at = threadIdx.x; at < TILE * TILE; at += 2 * TILE)
      inverse[at / TILE * super + at % TILE] = narrow<T>(0.0f);
    return;
  }

  T *low_keys = reinterpret_cast<T*>(memory), *high_keys = low_keys;
  Copies copies;
  copy_tile<2 * TILE, TILE, KEY_WIDTH>(copies, low_keys, keys + (long long)low * KEY_WIDTH,
                                       KEY_WIDTH);
  if (apart > 0) {
    high_keys += TILE * KEY_STEP;
    copy_tile<2 * TILE, TILE, KEY_WIDTH>(copies, high_keys, keys + (long long)high * KEY_WIDTH,
                                         KEY_WIDTH);
  }
  copies.wait();
  __syncthreads();
  const int row = 16 * warp();
  Product<TILE> found;
  found.clear();
  add_product<false, true, TILE, KEY_WIDTH>(found, low_keys + row * KEY_STEP, KEY_STEP, high_keys,
                                            KEY_STEP);
  exponentiate(found, {segments, s, scale, shift}, low + row, high);
#pragma unroll
  for (int j = 0; j < TILE / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Tiles above the diagonal are transposed; diagonal tiles are not.
      const bool is_first = (apart > 0) != BY_ROW;
      found.x[j][i] *= factor[is_first ? low + row + row_of(i) : high + column_of(j, i)];
    }
  if (apart > 0) {
    store_product(inverse + row * super, super, found);
    return;
  }

  __syncthreads();
  float* strict = reinterpret_cast<float*>(memory);
  float* own = strict + TILE * STEP;
  for (int at = threadIdx.x; at < TILE * TILE; at += 2 * TILE)
    own[at / TILE * STEP + at % TILE] = 0.0f;
  store_product(strict + row * STEP, STEP, found);
  __syncthreads();
  invert_least(own + row * STEP + row, strict + row * STEP + row, STEP);
  __syncthreads();
  invert_larger<TILE, 16>(own, strict);
  for (int at = threadIdx.x; at < TILE * TILE; at += 2 * TILE)
    inverse[at / TILE * super + at % TILE] = narrow<T>(own[at / TILE * STEP + at % TILE]);
}

// −B⁻¹ C A⁻¹ of every pair of inverted blocks of `half` tokens, a tile of its columns. Rows of segments
// that do not reach these columns are 0. The grid is (pairs · half / TILE, m); shared memory has
// (half + 2 TILE) rows of a tile.
template <class T, int TILE>
__global__ void __launch_bounds__(2 * TILE, 1) lucid_join(
    const int* __restrict__ segments, T* __restrict__ inverse, int s, int heads, int tokens,
    int super, int half) {
  constexpr int STEP = step_of<T, TILE>();
  extern __shared__ __align__(16) unsigned char memory[];
  T *left = reinterpret_cast<T*>(memory), *right = left + TILE * STEP, *middle = right + TILE * STEP;
  const int tiles = half / TILE, own = blockIdx.x % tiles, row = 16 * warp();
  const int first = blockIdx.x / tiles * 2 * half, second = first + half;
  const int count = min(tiles, (tokens - second) / TILE);
  if (segments != nullptr) segments += (long long)(blockIdx.y / heads) * s;
  const int end = reach(segments, s, tokens, first + own * TILE, TILE).high;
  inverse += (long long)blockIdx.y * tokens * super;
  const T* upper = inverse + (long long)first * super + first % super;
  T* lower = inverse + (long long)second * super + first % super;
  Product<TILE> found;
  Copies copies;

  // Tiles of rows that reach the columns.
  const int reached = min(count, max(0, end - second + TILE - 1) / TILE);
  for (int i = 0; i < reached; ++i) {
    found.clear();
    const int begin = reach(segments, s, tokens, second + i * TILE, TILE).low;
    for (int m = max(own, (begin - first) / TILE); m < tiles && first + m * TILE < end; ++m) {
      const T* rows = upper + (long long)m * TILE * super;
      copy_tile<2 * TILE, TILE, TILE>(copies, left, rows + half + i * TILE, super);
      copy_tile<2 * TILE, TILE, TILE>(copies, right, rows + own * TILE, super);
      copies.wait();
      __syncthreads();
      add_product<true, false, TILE, TILE>(found, left + row, STEP, right, STEP);
      __syncthreads();
    }
    store_product(middle + (i * TILE + row) * STEP, STEP, found);
  }
  for (int i = 0; i < count; ++i) {
    T* rows = lower + (long long)i * TILE * super;
    found.clear();
    const int begin = reach(segments, s, tokens, second + i * TILE, TILE).low;
    for (int m = max(0, begin - second) / TILE; m <= i && m < reached; ++m) {
      copy_tile<2 * TILE, TILE, TILE>(copies, left, rows + half + m * TILE, super);
      copies.wait();
      __syncthreads();
      add_product<false, false, TILE, TILE>(found, left + row * STEP, STEP,
                                            middle + m * TILE * STEP, STEP);
      __syncthreads();
    }
#pragma unroll
    for (int j = 0; j < TILE / 8; ++j)
#pragma unroll
      for (int k = 0; k < 4; ++k) found.x[j][k] = -found.x[j][k];
    store_product(rows + (long long)row * super + own * TILE, super, found);
  }
}
