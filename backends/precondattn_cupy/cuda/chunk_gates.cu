// Sums of gates over chunks, and the gradients of gates and β, from a few numbers per token.
//
// The gradient of a gate is a sum over everything that it separates: pairs of tokens (`crossing`), a
// token and the state before the chunk (`read`), a token and the state after it (`written`), and the
// two states (`overlap`). A block has a chunk of one head, and a thread for each token.
#include "chunk_tiles.cuh"

// Reads g and β (b, s, m); writes `sums` (m, T, 2) from the chunk's first token, and `strength` (m, T).
__global__ void sum_gates(const float* __restrict__ g, const float* __restrict__ beta,
                          float* __restrict__ sums, float* __restrict__ strength, int heads, int s,
                          int tokens) {
  extern __shared__ __align__(16) unsigned char memory[];
  double* gates = reinterpret_cast<double*>(memory);
  const int place = threadIdx.x, token = blockIdx.x * blockDim.x + place;
  const int b = blockIdx.y / heads, head = blockIdx.y % heads;
  const long long from = ((long long)b * s + token) * heads + head;
  const long long to = (long long)blockIdx.y * tokens + token;
  if (beta != nullptr) strength[to] = token < s ? beta[from] : 0.0f;
  if (g == nullptr) return;
  gates[place] = token < s ? fmaxf(g[from], -200.0f) : 0.0f;
  __syncthreads();
  double sum = 0.0;
  for (int i = 0; i <= place; ++i) sum += gates[i];
  sums[2 * to] = (float)sum;
  sums[2 * to + 1] = (float)(sum - (double)(float)sum);
}

// dg and dβ (b, s, m), if present. Inputs by blocks of key channels: `read` (m r, blocks, T), `written`
// and `from_keys` (m, blocks, T), `overlap` (m, chunks, blocks). `crossing` (m r, T) and, with the
// delta rule, `crossing_keys` (m, T) are already by gate. `d_strength` (m, T) is dβ without
// `from_keys`.
__global__ void gate_gradient(const float* __restrict__ sums, const float* __restrict__ strength,
                              const float* __restrict__ crossing_queries,
                              const float* __restrict__ crossing_keys,
                              const float* __restrict__ read, const float* __restrict__ written,
                              const float* __restrict__ overlap,
                              const float* __restrict__ from_keys,
                              const float* __restrict__ d_strength, float* __restrict__ d_g,
                              float* __restrict__ d_beta, int heads, int queries, int s, int tokens,
                              int blocks) {
  extern __shared__ __align__(16) unsigned char memory[];
  float* reads = reinterpret_cast<float*>(memory);
  float* writes = reads + blockDim.x;
  const long long head = blockIdx.y;
  const int place = threadIdx.x, token = blockIdx.x * blockDim.x + place;
  const long long at = head * tokens + token;
  const long long to = ((head / heads) * s + token) * heads + head % heads;
  float from_state = 0.0f;
  if (d_beta != nullptr) {
    for (int block = 0; block < blocks; ++block)
      from_state += from_keys[(head * blocks + block) * tokens + token];
    if (token < s) d_beta[to] = d_strength[at] - from_state;
  }
  if (d_g == nullptr) return;
  float found = 0.0f, own = 0.0f, before = 0.0f;
  for (int row = 0; row < queries; ++row) {
    const long long query = head * queries + row;
    found += crossing_queries[query * tokens + token];
    for (int block = 0; block < blocks; ++block)
      own += read[(query * blocks + block) * tokens + token];
  }
  if (crossing_keys != nullptr) {
    found += crossing_keys[at];
    own -= strength[at] * from_state;
  }
  for (int block = 0; block < blocks; ++block)
    before += written[(head * blocks + block) * tokens + token];
  reads[place] = own;
  writes[place] = before;
  __syncthreads();
  for (int i = place; i < blockDim.x; ++i) found += reads[i];
  for (int i = 0; i < place; ++i) found += writes[i];
  const long long chunk = head * gridDim.x + blockIdx.x;
  float kept = 0.0f;
  for (int block = 0; block < blocks; ++block) kept += overlap[chunk * blocks + block];
  const float* last = sums + 2 * (head * tokens + (blockIdx.x + 1) * blockDim.x - 1);
  if (token < s) d_g[to] = found + kept * reading(last, 0);
}
