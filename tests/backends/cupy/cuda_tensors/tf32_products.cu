// C = A B in tf32, of one block whose warps have 16 rows each; A and B are tiles as they stand.
#include "emulated_tensors.cuh"

#include "chunk_products.cuh"

template <Treatment LEFT, Treatment RIGHT, bool A_TRANSPOSED, bool B_TRANSPOSED, int COLUMNS, int DEPTH>
__global__ void tf32_of_tiles(const float* a, const float* b, float* c, int rows) {
  const float* own = a + 16 * warp() * (A_TRANSPOSED ? 1 : DEPTH);
  Product<COLUMNS> found;
  found.clear();
  tf32_product<LEFT, RIGHT, A_TRANSPOSED, B_TRANSPOSED, COLUMNS, DEPTH>(
      found, own, A_TRANSPOSED ? rows : DEPTH, b, B_TRANSPOSED ? DEPTH : COLUMNS);
  store_product(c + 16 * warp() * COLUMNS, COLUMNS, found);
}
