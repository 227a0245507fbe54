// Values with several scales a token: they multiply the weights of their group's channels, not every token's channels. Needs slots that lie in one group each (Lanes.groups).
#pragma once
#include "sums.h"

namespace {
struct Grouped {
  alignas(64) float scale[MAX_GROUPS][SPLIT], shift[MAX_GROUPS][SPLIT], p[MAX_GROUPS][MAX_R][SPLIT];
  float sum[MAX_GROUPS];  // of weight * shift, of the row that was weighed last

  // Scales of sixteen tokens, zero where they are not in [from, to) or a hole: nothing else may reach a sum.
  void scales(const kv_side& s, const Where& w, int64_t token, int t, int groups, int from, int to) {
    X a[MAX_GROUPS], b[MAX_GROUPS];
    if (groups == 1) {
      token_scales(s, token, a[0], b[0]);
      store(&scale[0][t], a[0]), store(&shift[0][t], b[0]);
    } else {
      group_scales(s, token, groups, a, b);
      for (int g = 0; g < groups; g++) store(&scale[g][t], a[g]), store(&shift[g][t], b[g]);
    }
    if (from <= 0 && to >= 16 && !w.f.valid) return;
    for (int i = 0; i < 16; i++) {
      const bool seen = i >= from && i < to && (!w.f.valid || w.f.valid[token + i]);
      for (int g = 0; g < groups && !seen; g++) scale[g][t + i] = shift[g][t + i] = 0.f;
    }
  }
  void weigh(int r, const float* weights, int end, int groups) {
    for (int g = 0; g < groups; g++) {
      X total = set1(0.f);
      for (int t = 0; t < end; t += 16) {
        const X x = load(weights + t);
        store(&p[g][r][t], mul(x, load(&scale[g][t])));
        total = fma(x, load(&shift[g][t]), total);
      }
      sum[g] = hsum(total);
    }
  }
  // acc[r] += weights [t, t + n) times rows x [n].
  template <int R> void mix(const Lanes& of, const float* x, int slots, int t, int n, float* acc, int lda) const {
    for (int s = 0; s < slots;) {
      const int g = of.group[16 * s], first = s;
      while (s < slots && of.group[16 * s] == g) s++;
      mix16<R>(&p[g][0][t], SPLIT, x + 16 * first, 16 * (s - first), 16 * slots, n, acc + 16 * first, lda);
    }
  }
};
}  // namespace
