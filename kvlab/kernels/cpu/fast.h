// The fast arithmetic of decoding rows: codes stay integers. Queries and probabilities become integers up to 2^14, so do a
// table's entries (2^13 and less for values and wide heads: word_top), sums of products are exact in int32. That costs a rounding of 2^-15 of a query's largest channel and of a table's range, and, in the sum of a
// split's weights, of at most 2^-11 of the largest.
#pragma once
#include "sums.h"

namespace {
// scores [R][16] of int16 queries [R][W] and sixteen tokens [16][W].
template <int R> static void dot16_words(const int16_t* q, int ldq, const int16_t* x, int W, float* scores) {
  constexpr int T = R > 3 ? 2 : 4;
  Pairs sum[R][16];
  for (int t = 0; t < 16; t += T, x += T * W) {
    Pairs a[R][T];
    for (auto& row : a) for (auto& s : row) s = no_pairs();
    for (int c = 0; c < W; c += 16) {
      for (int i = 0; i < T; i++) {
        const Row16 u = load_row(x + i * W + c);
        for (int r = 0; r < R; r++) a[r][i] = add_pairs(a[r][i], u, load_row(q + r * ldq + c));
      }
    }
    for (int r = 0; r < R; r++)
      for (int i = 0; i < T; i++) sum[r][t + i] = a[r][i];
  }
  for (int r = 0; r < R; r++) sum16(sum[r], scores + r * 16);
}

// acc[r] += by[r] * p[r][t] x[t] over sixteen tokens.
template <int R> static void mix16_words(const int16_t* p, int ldp, const int16_t* x, int slots, const float* by, float* acc, int lda) {
  for (int s = 0; s < slots; s++) {
    Pairs a[R][2];
    for (auto& row : a) row[0] = row[1] = no_pairs();
    KV_UNROLL(2)
    for (int t = 0; t < 16; t += 2) {
      Row16 both[2];
      interleave(load_row(x + (t * slots + s) * 16), load_row(x + ((t + 1) * slots + s) * 16), both);
      for (int r = 0; r < R; r++) {
        const Row16 weight = all_pairs(p + r * ldp + t);
        for (int i = 0; i < 2; i++) a[r][i] = add_pairs(a[r][i], both[i], weight);
      }
    }
    for (int r = 0; r < R; r++) {
      alignas(64) int32_t sum[16];
      store_pairs(a[r], sum);
      float* to = acc + r * lda + 16 * s;
      store(to, fma(from_int32(sum), set1(by[r]), load(to)));
    }
  }
}

struct Query16 {  // up to MAX_R queries of a side in slot order
  alignas(64) int16_t q[MAX_R][MAX_SLOTS * 16];
  float step[MAX_R], sum[MAX_R];  // of a word; of all words times step
  void take(const float* from, int ld, int R, int slots) {
    for (int r = 0; r < R; r++) {
      step[r] = to_words<false>(from + r * ld, slots * 16, QUERY_TOP, q[r]);
      int32_t total = 0;
      for (int c = 0; c < slots * 16; c++) total += q[r][c];
      sum[r] = (float)total * step[r];
    }
  }
  // dots [R][16] with the stored numbers of sixteen tokens.
  void dot(const Decoder& d, const kv_side& s, int64_t token, int R, float* dots) const {
    alignas(64) int16_t x[16 * MAX_SLOTS * 16 + 16];
    d.words(s.codes + token * s.row_bytes, 16, x);
#define KV_CALL(N) dot16_words<N>(q[0], MAX_SLOTS * 16, x, s.slots * 16, dots)
    KV_ROWS(R, KV_CALL)
#undef KV_CALL
    for (int r = 0; r < R; r++) store(dots + 16 * r, fma(load(dots + 16 * r), set1(d.step * step[r]), set1(d.low * sum[r])));
  }
};

struct Weights16 {  // of a split: probability times scale. A token without weight may hold anything
  alignas(64) int16_t p[MAX_R][SPLIT];
  float by[MAX_R];
  // Returns the sum over tokens of weight * d.low, the same for every channel.
  float take(const Decoder& d, int r, const float* from, int n) {
    const float step = to_words<true>(from, n, QUERY_TOP - 1.f, p[r]);  // - 1: what is carried over comes on top
    int32_t total = 0;
    for (int t = 0; t < n; t++) total += p[r][t];
    by[r] = step * d.step;
    return d.low * step * (float)total;
  }
  // out[r] += weights [t, t + 16) times the stored numbers of sixteen tokens.
  void mix(const Decoder& d, const kv_side& s, int64_t token, int t, int R, float* out, int ldo) const {
    alignas(64) int16_t x[16 * MAX_SLOTS * 16 + 16];
    d.words(s.codes + token * s.row_bytes, 16, x);
#define KV_CALL(N) mix16_words<N>(&p[0][t], SPLIT, x, s.slots, by, out, ldo)
    KV_ROWS(R, KV_CALL)
#undef KV_CALL
  }
};
}  // namespace
