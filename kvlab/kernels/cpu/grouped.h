// Values with several scales a token: they multiply the weights of their group's channels, not every token's channels. Needs slots of which each half lies in one group (Lanes.halves).
#pragma once
#include "sums.h"

namespace {
struct Grouped {
  alignas(64) float scale[MAX_GROUPS][SPLIT], shift[MAX_GROUPS][SPLIT], p[MAX_GROUPS][MAX_R][SPLIT];
  float sum[MAX_GROUPS];  // of weight * shift, of the row that was weighed last

  // Scales of sixteen tokens, zero where they are not in [from, to) or a hole: nothing else may reach a sum.
  void scales(const kv_side& s, const Where& w, int64_t token, int t, int groups, int from, int to) {
    alignas(64) float a[16 * MAX_GROUPS], b[16 * MAX_GROUPS];
    for (int j = 0; j < 16 * groups; j += 16) {
      const X x = meta_load(s.scale, s.meta, token * groups + j);
      store(a + j, x);
      store(b + j, s.zero ? fma(x, set1(s.mid), meta_load(s.zero, s.meta, token * groups + j)) : set1(0.f));
    }
    for (int i = 0; i < 16; i++) {
      const bool seen = i >= from && i < to && (!w.f.valid || w.f.valid[token + i]);
      for (int g = 0; g < groups; g++) scale[g][t + i] = seen ? a[i * groups + g] : 0.f, shift[g][t + i] = seen ? b[i * groups + g] : 0.f;
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
  void start(const Lanes& of, int slots, float* out) const {
    for (int c = 0; c < slots * 16; c++) out[c] = sum[of.group[c]];
  }
  // acc[r] += weights [t, t + n) times rows x [n].
  template <int R> void mix(const Lanes& of, const float* x, int slots, int t, int n, float* acc, int lda) const {
    for (int s = 0; s < slots; s++) {
      const float *low = &p[of.group[16 * s]][0][t], *high = &p[of.group[16 * s + 8]][0][t];
      X o[R];
      for (int r = 0; r < R; r++) o[r] = load(acc + r * lda + 16 * s);
      for (int i = 0; i < n; i++) {
        const X u = load(x + (i * slots + s) * 16);
        for (int r = 0; r < R; r++) o[r] = fma(halves(low[r * SPLIT + i], high[r * SPLIT + i]), u, o[r]);
      }
      for (int r = 0; r < R; r++) store(acc + r * lda + 16 * s, o[r]);
    }
  }
};
}  // namespace
