// Products of up to four queries with sixteen rows of floats, and weighted sums of such rows.
#pragma once
#include "rows.h"

namespace {
// scores[r][0..16) = q[r] . x[t] over sixteen rows of W floats.
template <int R> static void dot16(const float* q, int ldq, const float* x, int W, float* scores, int lds) {
  constexpr int T = R > 3 ? 2 : 4, L = sizeof(Y) / 4;
  Y sum[R][16];
  for (int t = 0; t < 16; t += T, x += T * W) {
    Y a[R][T];
    for (int r = 0; r < R; r++)
      for (int i = 0; i < T; i++) a[r][i] = y_zero();
    KV_UNROLL(2)
    for (int c = 0; c < W; c += L) {
      Y y[R];
      for (int r = 0; r < R; r++) y[r] = y_load(q + r * ldq + c);
      for (int i = 0; i < T; i++) {
        Y u = y_load(x + i * W + c);
        for (int r = 0; r < R; r++) a[r][i] = y_fma(u, y[r], a[r][i]);
      }
    }
    for (int r = 0; r < R; r++)
      for (int i = 0; i < T; i++) sum[r][t + i] = a[r][i];
  }
  for (int r = 0; r < R; r++) reduce16(sum[r], scores + r * lds);
}

// acc[r] += p[r][t] x[t] over n rows.
template <int R> static void mix16(const float* p, int ldp, const float* x, int slots, int n, float* acc, int lda) {
  for (int s = 0; s < slots; s += 2) {
    int two = s + 1 < slots;
    X o[R][2];
    for (int r = 0; r < R; r++) o[r][0] = load(acc + r * lda + 16 * s), o[r][1] = two ? load(acc + r * lda + 16 * s + 16) : set1(0.f);
    KV_UNROLL(2)
    for (int t = 0; t < n; t++) {
      const float* y = x + (t * slots + s) * 16;
      X u = load(y), v = two ? load(y + 16) : u;
      for (int r = 0; r < R; r++) {
        X w = set1(p[r * ldp + t]);
        o[r][0] = fma(w, u, o[r][0]), o[r][1] = fma(w, v, o[r][1]);
      }
    }
    for (int r = 0; r < R; r++) {
      store(acc + r * lda + 16 * s, o[r][0]);
      if (two) store(acc + r * lda + 16 * s + 16, o[r][1]);
    }
  }
}
#define KV_ROWS(R, CALL) switch (R) { case 1: CALL(1); break; case 2: CALL(2); break; case 3: CALL(3); break; default: CALL(4); }
}  // namespace
