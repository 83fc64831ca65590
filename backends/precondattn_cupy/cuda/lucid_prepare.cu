// Inputs of a solve: normalised keys, β, and right-hand sides, in scratch; a warp has a token.
//
//     k̂ = k / rms(k),    rms(k) = √(mean(k²) + ε),  and 1 for a zero row where ε = 0
//
// Padding of a sequence is not read: it becomes 0 even if memory holds NaN there.
#include "numbers.cuh"
#include "warps.cuh"

// k (b, s, n, d), v (b, s, n, e), β (b, s, n) or null, `valid` (b, s) or null; the grid is (T / warps,
// m). Writes k̂ to `unit` (m, T, key_step), 1 / rms to `reciprocal` (m, T), β, or 0 at invalid tokens,
// to `factor` (m, T), and v to `right` (m, T, step).
template <class T, class OPERAND, bool NORMALIZE>
__global__ void lucid_prepare(const T* __restrict__ k, const T* __restrict__ v,
                              const T* __restrict__ beta, const unsigned char* __restrict__ valid,
                              OPERAND* __restrict__ unit, float* __restrict__ reciprocal,
                              float* __restrict__ factor, float* __restrict__ right, int s,
                              int heads, int tokens, int width, int value_width, int key_step,
                              int step, float eps) {
  const int token = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (token >= tokens) return;
  const long long head = blockIdx.y, b = head / heads, n = head % heads;
  const long long from = (b * s + token) * heads + n, to = head * tokens + token;
  const bool counts = token < s && (valid == nullptr || valid[b * s + token]);

  float one_by_rms = 1.0f;
  if (NORMALIZE && counts) {
    float total = 0.0f;
    for (int i = lane; i < width; i += 32) {
      const float x = wide(k[from * width + i]);
      total += x * x;
    }
    const float mean_square = sum_of_warp(total) / width + eps;
    if (mean_square > 0.0f) one_by_rms = 1.0f / sqrtf(mean_square);
  }
  for (int i = lane; i < key_step; i += 32) {
    const float x = counts && i < width ? wide(k[from * width + i]) : 0.0f;
    unit[to * key_step + i] = narrow<OPERAND>(x * one_by_rms);
  }
  for (int i = lane; i < step; i += 32)
    right[to * step + i] = counts && i < value_width ? wide(v[from * value_width + i]) : 0.0f;
  if (lane == 0) {
    reciprocal[to] = one_by_rms;
    factor[to] = counts ? (beta == nullptr ? 1.0f : wide(beta[from])) : 0.0f;
  }
}
