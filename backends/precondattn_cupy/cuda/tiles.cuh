// Tiles: some tokens of one head with all of its channels, copied from memory to shared memory.
//
// A user's array (b, t, h, d) is contiguous, so that consecutive rows of a head are h d elements apart.
// Elements beyond the last token or channel are 0 in the tile, and so are invalid tokens, whatever memory
// holds.
#pragma once

#include "copies.cuh"
#include "products.cuh"

// `by_16`: rows are aligned to 16 bytes, and their length is a multiple of 16 bytes. Then a thread
// reads 16 bytes at once, and several times before it uses the first. THREADS are those of the block.
template <int THREADS, int ROWS, int WIDTH, class T, class U>
__device__ __forceinline__ void load_tile(U* tile, int tile_step, const T* __restrict__ head,
                                          long long step, int first, int count, int width,
                                          bool by_16, const unsigned char* valid = nullptr) {
  constexpr int PART = 16 / sizeof(T), PARTS = ROWS * WIDTH / PART;
  static_assert(WIDTH % PART == 0, "a tile's rows are made of 16 bytes");
  if (by_16) {
#pragma unroll 4
    for (int start = 0; start < PARTS; start += THREADS) {
      const int at = start + threadIdx.x;
      if (PARTS % THREADS != 0 && at >= PARTS) break;
      const int row = at / (WIDTH / PART), column = at % (WIDTH / PART) * PART;
      const int token = first + row;
      uint4 bytes = {0, 0, 0, 0};
      if (token >= 0 && token < count && column < width && (valid == nullptr || valid[token]))
        bytes = *reinterpret_cast<const uint4*>(head + token * step + column);
      const T* x = reinterpret_cast<const T*>(&bytes);
      U* to = tile + row * tile_step + column;
#pragma unroll
      for (int i = 0; i < PART; ++i) to[i] = narrow<U>(wide(x[i]));
    }
  } else {
#pragma unroll 1
    for (int at = threadIdx.x; at < PARTS; at += THREADS) {
      const int row = at / (WIDTH / PART), column = at % (WIDTH / PART) * PART;
      const int token = first + row;
      const bool there = token >= 0 && token < count && (valid == nullptr || valid[token]);
#pragma unroll 1
      for (int i = 0; i < PART; ++i)
        tile[row * tile_step + column + i] =
            there && column + i < width ? narrow<U>(wide(head[token * step + column + i])) : U(0.0f);
    }
  }
}

// Begins to load a tile whose elements need no conversion: ready after `copies.wait()`.
template <int THREADS, int ROWS, int WIDTH, class T>
__device__ __forceinline__ void begin_tile(Copies& copies, T* tile, int tile_step,
                                           const T* __restrict__ head, long long step, int first,
                                           int count, int width, bool by_16,
                                           const unsigned char* valid = nullptr) {
  constexpr int PART = 16 / sizeof(T), PARTS = ROWS * WIDTH / PART;
  if (!by_16) {
    load_tile<THREADS, ROWS, WIDTH>(tile, tile_step, head, step, first, count, width, false, valid);
    return;
  }
#pragma unroll 4
  for (int start = 0; start < PARTS; start += THREADS) {
    const int at = start + threadIdx.x;
    if (PARTS % THREADS != 0 && at >= PARTS) break;
    const int row = at / (WIDTH / PART), column = at % (WIDTH / PART) * PART;
    const int token = first + row;
    const bool there =
        token >= 0 && token < count && column < width && (valid == nullptr || valid[token]);
    copies.add(tile + row * tile_step + column, head + token * step + column, there);
  }
}
