// Which keys a query sees.
//
// Query i of t stands at position i + s − t of the keys, and sees those that are at most `behind`
// before it and at most `ahead` after it, and of its own run. All tokens are of run 0, or of the run
// of their segment; a key that does not count is of run −1, and a query that does not, of run −2.
#pragma once

struct Sight {
  int t, s, behind, ahead;
  // Of one sequence; null where nothing is hidden so.
  const unsigned char *q_valid, *k_valid;
  const int *q_segment, *k_segment;

  __device__ __forceinline__ Sight(int batch, int t, int s, int behind, int ahead,
                                   const unsigned char* q_valid, const unsigned char* k_valid,
                                   const int* q_segment, const int* k_segment)
      : t(t), s(s), behind(behind), ahead(ahead), q_valid(q_valid), k_valid(k_valid),
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
    return distance <= behind && distance >= -ahead;
  }

  // Whether each of so many queries from i on sees each of so many keys from j on.
  __device__ __forceinline__ bool sees_all(int i, int queries, int j, int keys) const {
    return !q_valid && !k_valid && !k_segment && i + queries <= t && j + keys <= s &&
           is_near(i, j + keys - 1) && is_near(i + queries - 1, j);
  }
};

// Of runs, which do not fall: the first place with that run or a later one.
__device__ __forceinline__ int place_of_run(const int* runs, int count, int run) {
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

// The keys that so many queries from i on may see, or the queries that may see so many keys.
struct Span {
  int low, high;
};

__device__ __forceinline__ Span keys_of(const Sight& sight, int i, int queries) {
  const int last = min(i + queries, sight.t) - 1, shift = sight.s - sight.t;
  Span found = {max(i + shift - sight.behind, 0), min(last + shift + sight.ahead + 1, sight.s)};
  if (sight.k_segment) {
    found.low = max(found.low, place_of_run(sight.k_segment, sight.s, sight.q_segment[i]));
    found.high =
        min(found.high, place_of_run(sight.k_segment, sight.s, sight.q_segment[last] + 1));
  }
  return found;
}

__device__ __forceinline__ Span queries_of(const Sight& sight, int j, int keys) {
  const int last = min(j + keys, sight.s) - 1, shift = sight.t - sight.s;
  Span found = {max(j + shift - sight.ahead, 0), min(last + shift + sight.behind + 1, sight.t)};
  if (sight.k_segment) {
    found.low = max(found.low, place_of_run(sight.q_segment, sight.t, sight.k_segment[j]));
    found.high =
        min(found.high, place_of_run(sight.q_segment, sight.t, sight.k_segment[last] + 1));
  }
  return found;
}
