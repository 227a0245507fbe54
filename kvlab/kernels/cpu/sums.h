// Products of up to four queries with sixteen rows of floats, and weighted sums of such rows.
#pragma once
#include "rows.h"

namespace {
// scores[r][0..16) = q[r] . x[t] over sixteen rows of W floats.
template <int R> static void dot16(const float* q, int ldq, const float* x, int ldx, int W, float* scores, int lds) {
  constexpr int T = R > 3 ? 2 : 4, L = sizeof(Y) / 4;
  Y sum[R][16];
  for (int t = 0; t < 16; t += T, x += T * ldx) {
    Y a[R][T];
    for (int r = 0; r < R; r++)
      for (int i = 0; i < T; i++) a[r][i] = y_zero();
    KV_UNROLL(2)
    for (int c = 0; c < W; c += L) {
      Y y[R];
      for (int r = 0; r < R; r++) y[r] = y_load(q + r * ldq + c);
      for (int i = 0; i < T; i++) {
        Y u = y_load(x + i * ldx + c);
        for (int r = 0; r < R; r++) a[r][i] = y_fma(u, y[r], a[r][i]);
      }
    }
    for (int r = 0; r < R; r++)
      for (int i = 0; i < T; i++) sum[r][t + i] = a[r][i];
  }
  for (int r = 0; r < R; r++) reduce16(sum[r], scores + r * lds);
}

// acc[r] += p[r][t] x[t] over n rows, N registers of each, `width` floats from row to row.
template <int R, int N> KV_INLINE void mix_registers(const float* p, int ldp, const float* x, int width, int n, float* acc, int lda) {
  constexpr int L = sizeof(Y) / 4;
  Y o[R][N];
  for (int r = 0; r < R; r++)
    for (int i = 0; i < N; i++) o[r][i] = y_load(acc + r * lda + L * i);
  for (int t = 0; t < n; t++, x += width) {
    Y w[R];
    for (int r = 0; r < R; r++) w[r] = y_set1(p[r * ldp + t]);
    for (int i = 0; i < N; i++) {
      const Y u = y_load(x + L * i);
      for (int r = 0; r < R; r++) o[r][i] = y_fma(w[r], u, o[r][i]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < N; i++) y_store(acc + r * lda + L * i, o[r][i]);
}
// The first `lanes` floats of rows. As many at once as leave room for the weights in sixteen registers.
template <int R> static void mix16(const float* p, int ldp, const float* x, int lanes, int width, int n, float* acc, int lda) {
  constexpr int L = sizeof(Y) / 4, N = R == 1 ? 8 : R <= 3 ? 4 : 2;
  int c = 0;
  for (; c + N * L <= lanes; c += N * L) mix_registers<R, N>(p, ldp, x + c, width, n, acc + c, lda);
  for (; c + 2 * L <= lanes; c += 2 * L) mix_registers<R, 2>(p, ldp, x + c, width, n, acc + c, lda);
  for (; c < lanes; c += L) mix_registers<R, 1>(p, ldp, x + c, width, n, acc + c, lda);
}
}  // namespace
