// The attention mask: which keys a query attends to.
//
// Query i of t is at position i + s − t of the keys. It attends to keys at most `lookback` before it, at
// most `lookahead` after it, and in its own run. A token's run is 0, or the run of its segment; an
// invalid key has run −1, an invalid query run −2.
#pragma once

struct Mask {
  int t, s, lookback, lookahead;
  // Of one sequence; null where nothing is masked.
  const unsigned char *q_valid, *k_valid;
  const int *q_segment, *k_segment;

  __device__ __forceinline__ Mask(int batch, int t, int s, int lookback, int lookahead,
                                  const unsigned char* q_valid, const unsigned char* k_valid,
                                  const int* q_segment, const int* k_segment)
      : t(t), s(s), lookback(lookback), lookahead(lookahead), q_valid(q_valid), k_valid(k_valid),
        q_segment(q_segment), k_segment(k_segment) {
    if (q_valid) this->q_valid += (long long)batch * t;
    if (k_valid) this->k_valid += (long long)batch * s;
    if (q_segment) this->q_segment += (long long)batch * t;
    if (k_segment) this->k_segment += (long long)batch * s;
  }

  __device__ __forceinline__ int run_of_query(int i) const {
    if (i >= t || (q_valid && !q_valid[i])) return -2;
    return q_segment ? q_segment[i] : 0;
  }
  __device__ __forceinline__ int run_of_key(int j) const {
    if (j >= s || (k_valid && !k_valid[j])) return -1;
    return k_segment ? k_segment[j] : 0;
  }
  __device__ __forceinline__ bool is_near(int i, int j) const {
    const int distance = i + (s - t) - j;
    return distance <= lookback && distance >= -lookahead;
  }

  // Whether each of `queries` queries from i on attends to each of `keys` keys from j on.
  __device__ __forceinline__ bool sees_all(int i, int queries, int j, int keys) const {
    return !q_valid && !k_valid && !k_segment && i + queries <= t && j + keys <= s &&
           is_near(i, j + keys - 1) && is_near(i + queries - 1, j);
  }
};

// In non-decreasing runs, the first position with that run or a later one.
__device__ __forceinline__ int position_of_run(const int* runs, int count, int run) {
  int low = 0;
  while (low < count) {
    const int middle = low + (count - low) / 2;
    if (runs[middle] < run)
      low = middle + 1;
    else
      count = middle;
  }
  return low;
}

// The range of keys that some queries from i on may attend to, or of queries that may attend to some keys.
struct Span {
  int low, high;
};

__device__ __forceinline__ Span keys_of(const Mask& mask, int i, int queries) {
  const int last = min(i + queries, mask.t) - 1, shift = mask.s - mask.t;
  Span found = {max(i + shift - mask.lookback, 0), min(last + shift + mask.lookahead + 1, mask.s)};
  if (mask.k_segment) {
    found.low = max(found.low, position_of_run(mask.k_segment, mask.s, mask.q_segment[i]));
    found.high =
        min(found.high, position_of_run(mask.k_segment, mask.s, mask.q_segment[last] + 1));
  }
  return found;
}

__device__ __forceinline__ Span queries_of(const Mask& mask, int j, int keys) {
  const int last = min(j + keys, mask.s) - 1, shift = mask.t - mask.s;
  Span found = {max(j + shift - mask.lookahead, 0), min(last + shift + mask.lookback + 1, mask.t)};
  if (mask.k_segment) {
    found.low = max(found.low, position_of_run(mask.q_segment, mask.t, mask.k_segment[j]));
    found.high =
        min(found.high, position_of_run(mask.q_segment, mask.t, mask.k_segment[last] + 1));
  }
  return found;
}
