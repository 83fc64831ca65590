// Tiles: some tokens of one head with all of its channels, copied from memory to shared memory.
//
// A user's array (b, t, h, d) is contiguous, so that consecutive rows of a head are h d elements apart.
// Elements beyond the last token or channel are 0 in the tile, and so are invalid tokens, whatever memory
// holds.
#pragma once

#include "products.cuh"

// `by_16`: rows are aligned to 16 bytes, and their length is a multiple of 16 bytes.
template <int ROWS, int WIDTH, class T, class U>
__device__ __forceinline__ void load_tile(U* tile, int tile_step, const T* __restrict__ head,
                                          long long step, int first, int count, int width,
                                          bool by_16, const unsigned char* valid = nullptr) {
  constexpr int PART = 16 / sizeof(T);
  static_assert(WIDTH % PART == 0, "a tile's rows are made of 16 bytes");
  for (int at = threadIdx.x; at < ROWS * WIDTH / PART; at += blockDim.x) {
    const int row = at / (WIDTH / PART), column = at % (WIDTH / PART) * PART;
    const int token = first + row;
    const bool there = token >= 0 && token < count && (valid == nullptr || valid[token]);
    const T* from = head + token * step + column;
    U* to = tile + row * tile_step + column;
    if (there && by_16 && column < width) {
      const uint4 bytes = *reinterpret_cast<const uint4*>(from);
      const T* x = reinterpret_cast<const T*>(&bytes);
#pragma unroll
      for (int i = 0; i < PART; ++i) to[i] = narrow<U>(wide(x[i]));
    } else {
#pragma unroll
      for (int i = 0; i < PART; ++i)
        to[i] = narrow<U>(there && column + i < width ? wide(from[i]) : Sum<T>(0));
    }
  }
}
