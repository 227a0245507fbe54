// Rows that are numbers only in registers: scores of sixteen of them, and their weighted sums, as they are unpacked. Worth it
// where there are 32 registers; elsewhere sums.h reads them from a buffer.
#pragma once
#include "slots.h"

#define KV_ROWS(R, CALL) switch (R) { case 1: CALL(1); break; case 2: CALL(2); break; case 3: CALL(3); break; default: CALL(4); }

#if KV_AVX512
namespace {
// D::get(d, place, row, x): four slots of a row, from the first on that d.place(first) was asked for.
template <int R, bool ONE, class D> static void dot_rows(const D& d, const float* q, int ldq, const Stored& from, const Soon* soon, int n, int slots, float* dots, int ld) {
  X asked[R][4];
  for (int r = 0; r < R; r++)
    for (int s = 0; s < 4; s++) asked[r][s] = load(q + r * ldq + 16 * s);
  const auto place = d.place(0);
  for (int t = 0; t < n; t += 16) {
    const uint8_t* row = Stored::row(from, t);
    alignas(64) X part[R][4];
    for (int k = 0; k < 4; k++) {
      X sum[R][4];
      Soon::some(soon, t, k, 4);
      for (int i = 0; i < 4; i++) {
        const uint8_t* at = row + (k + 4 * i) * from.row_bytes;
        X x[4];
        D::get(d, place, at, x);
        for (int r = 0; r < R; r++) {
          sum[r][i] = mul(x[0], asked[r][0]);
          for (int s = 1; s < 4; s++) sum[r][i] = fma(x[s], asked[r][s], sum[r][i]);
        }
        for (int first = 4; !ONE && first < slots; first += 4) {
          D::get(d, d.place(first), at, x);
          for (int r = 0; r < R; r++)
            for (int s = 0; s < 4; s++) sum[r][i] = fma(x[s], load(q + r * ldq + 16 * (first + s)), sum[r][i]);
        }
      }
      for (int r = 0; r < R; r++) part[r][k] = fold(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
    }
    for (int r = 0; r < R; r++) store(dots + r * ld + t, folded(part[r]));
  }
}
template <class D> static void dot_direct(const D& d, const float* q, int ldq, int R, const Stored& from, const Soon* soon, int n, int slots, float* dots, int ld) {
#define KV_CALL(N) slots == 4 ? dot_rows<N, true>(d, q, ldq, from, soon, n, slots, dots, ld) : dot_rows<N, false>(d, q, ldq, from, soon, n, slots, dots, ld)
  KV_ROWS(R, KV_CALL)
#undef KV_CALL
}

template <int R, bool ONE, class D> static void mix_rows(const D& d, const Weights<float>& w, const Stored& rows, int from, int to, int first, float* acc, int lda) {
  X o[R][4];
  const float* p[4];
  for (int s = 0; s < 4; s++) p[s] = w.p + (int64_t)w.of[16 * (first + s)] * w.group;
  for (int r = 0; r < R; r++)
    for (int s = 0; s < 4; s++) o[r][s] = load(acc + r * lda + 16 * s);
  const auto place = d.place(first);
  const int64_t next = w.row;
  for (int64_t t = from; t < to;) {
    const uint8_t* row = Stored::row(rows, (int)t);
    for (const int64_t end = f_min((int)t / 16 * 16 + 16, to); t < end; t++, row += rows.row_bytes) {
      X x[4];
      D::get(d, place, row, x);
      for (int r = 0; r < R; r++)
        for (int s = 0; s < 4; s++) o[r][s] = fma(set1(p[ONE ? 0 : s][r * next + t]), x[s], o[r][s]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int s = 0; s < 4; s++) store(acc + r * lda + 16 * s, o[r][s]);
}
template <class D> static void mix_direct(const D& d, const Weights<float>& w, int R, const Stored& rows, int from, int to, int slots, float* acc, int lda) {
  for (int s = 0; s < slots; s += 4) {
#define KV_CALL(N) w.group ? mix_rows<N, false>(d, w, rows, from, to, s, acc + 16 * s, lda) : mix_rows<N, true>(d, w, rows, from, to, s, acc + 16 * s, lda)
    KV_ROWS(R, KV_CALL)
#undef KV_CALL
  }
}
}  // namespace
#endif
