// What a split's values are multiplied by: probabilities, times the scales of the values' tokens where they have any, one
// set for each group of channels. Needs slots that lie in one group each (Lanes.groups).
#pragma once
#include <type_traits>

#include "sums.h"

namespace {
struct Grouped {
  alignas(64) float p[MAX_GROUPS][MAX_R][PITCH];
  float sum[MAX_GROUPS][MAX_R];  // of probability * shift
  // acc[r] += weights [t, t + n) times rows x [n].
  template <int R> void mix(const Lanes& of, const float* x, int slots, int t, int n, float* acc, int lda) const {
    for (int s = 0; s < slots;) {
      const int g = of.group[16 * s], first = s;
      while (s < slots && of.group[16 * s] == g) s++;
      mix16<R>(&p[g][0][t], PITCH, x + 16 * first, 16 * (s - first), 16 * slots, n, acc + 16 * first, lda);
    }
  }
};

struct Split {  // slots [first, first + n) of a decoding row; the first `skip` of them are not seen
  int first, skip, n;
  int64_t token[SPLIT / 16];  // of every sixteen slots: a division each
  alignas(64) float s[MAX_R][PITCH];  // scores, then weights
  Split(const Where& w, int a, int b) : first(a & ~15), skip(a - first), n(b - first) {
    for (int t = 0; t < n; t += 16) token[t / 16] = Where::token(w, first + t);
  }
  X seen(int t, X x, float other) const { return between(x, skip - t, n - t, other); }
  // f(from, to, whether all slots there are seen), for all.
  template <class F> KV_INLINE void each(const Split& x, bool all, F f) {
    const int end = (x.n + 15) & ~15, from = all ? f_min((x.skip + 15) & ~15, end) : end, to = all ? f_max(x.n & ~15, from) : end;
    f(0, from, std::false_type()), f(from, to, std::true_type()), f(to, end, std::false_type());
  }
};

// Scores of R rows -> weights: in x.s, or if values have GROUPS of scales (-1: any number) in `out`. inverse: 1 / what a row's
// weights add up to; of a row that sees nothing 0, as its weights are. lse2: base 2. bad: a query that is not finite.
template <int R, int GROUPS> static void softmax(const kv_side& v, const Where& w, int groups, const bool* bad, Split& x, Grouped& out, float* inverse, float* lse2) {
  constexpr int SOME = GROUPS < 0 ? MAX_GROUPS : GROUPS ? GROUPS : 1;
  const int G = GROUPS < 0 ? groups : GROUPS;
  X top[R], sum[R], shifts[SOME][R];
  for (auto& m : top) m = set1(NEG_INF);
  Split::each(x, !w.f.valid, [&](int from, int to, auto inside) {
    for (int t = from; t < to; t += 16)
      for (int r = 0; r < R; r++) top[r] = max(top[r], inside ? load(&x.s[r][t]) : x.seen(t, load(&x.s[r][t]), NEG_INF));
  });
  bool none[R];
  for (int r = 0; r < R; r++) {
    lse2[r] = hmax(top[r]), none[r] = bad[r] || lse2[r] == NEG_INF;  // or nothing but holes
    top[r] = set1(none[r] ? 0.f : lse2[r]), sum[r] = set1(0.f);
    for (int g = 0; g < G; g++) shifts[g][r] = set1(0.f);
  }
  Split::each(x, !w.f.valid, [&](int from, int to, auto inside) {
    for (int t = from; t < to; t += 16) {
      const int64_t token = x.token[t / 16];
      X scale[SOME], shift[SOME];
      if (GROUPS == 1) token_scales(v, token, scale[0], shift[0]);
      else if (GROUPS) group_scales(v, token, G, scale, shift);
      for (int g = 0; !inside && g < G; g++)  // there may be anything where nothing is seen
        scale[g] = holes(w, token, x.seen(t, scale[g], 0.f)), shift[g] = holes(w, token, x.seen(t, shift[g], 0.f));
      for (int r = 0; r < R; r++) {
        X p = exp2_of(sub(load(&x.s[r][t]), top[r]));
        if (!inside) p = holes(w, token, x.seen(t, p, 0.f));
        sum[r] = add(sum[r], p);
        if (!GROUPS) store(&x.s[r][t], p);
        for (int g = 0; g < G; g++) store(&out.p[g][r][t], mul(p, scale[g])), shifts[g][r] = fma(p, shift[g], shifts[g][r]);
      }
    }
  });
  for (int r = 0; r < R; r++) {
    const float l = hsum(sum[r]);
    inverse[r] = bad[r] ? NAN : none[r] ? 0.f : 1.f / l;
    lse2[r] = bad[r] ? NAN : none[r] ? NEG_INF : lse2[r] + std::log2(l);
    for (int g = 0; g < G; g++) out.sum[g][r] = none[r] ? 0.f : hsum(shifts[g][r]);
    if (none[r]) std::memset(x.s[r], 0, sizeof x.s[r]);
    for (int g = 0; none[r] && g < G; g++) std::memset(out.p[g][r], 0, sizeof out.p[g][r]);
  }
}
}  // namespace
