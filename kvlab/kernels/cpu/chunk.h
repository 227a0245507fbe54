// Chunks of a prompt and votes: many query rows against tiles of TILE slots, which become floats once for ROWS rows.
#pragma once
#include "attend.h"

namespace {
// C [M, N] (+)= A [M, K] B [K, N], N a multiple of 16. A row's bits do not depend on M.
template <int M> static void gemm_rows(const float* A, int lda, const float* B, int ldb, int N, int K, float* C, int ldc, bool more) {
  for (int j = 0; j < N; j += 16) {
    X c[M];
    for (int i = 0; i < M; i++) c[i] = more ? load(C + i * ldc + j) : set1(0.f);
    for (int k = 0; k < K; k++) {
      X b = load(B + (int64_t)k * ldb + j);
      for (int i = 0; i < M; i++) c[i] = fma(set1(A[i * lda + k]), b, c[i]);
    }
    for (int i = 0; i < M; i++) store(C + i * ldc + j, c[i]);
  }
}
static void gemm(int M, const float* A, int lda, const float* B, int ldb, int N, int K, float* C, int ldc, bool more) {
  for (; M >= 6; M -= 6, A += 6 * lda, C += 6 * ldc) gemm_rows<6>(A, lda, B, ldb, N, K, C, ldc, more);
  for (; M; M--, A += lda, C += ldc) gemm_rows<1>(A, lda, B, ldb, N, K, C, ldc, more);
}

// Slots [a, b) of the tile that starts at `tile`, scaled; [TILE, lanes], other rows zero.
static void tile_rows(const kv_side& s, const Decoder* d, const Lanes& of, const Where& w, int tile, int a, int b, float* out) {
  const int W = lanes(s);
  std::memset(out, 0, sizeof(float) * TILE * W);
  for (int t = a; t < b;) {
    int n = f_min(b - t, w.f.block - t % w.f.block);
    float* to = out + (t - tile) * W;
    const int64_t token = Where::token(w, t);
    const float* x = read_rows(s, d, of, w, token, n, to);
    if (x != to) std::memcpy(to, x, sizeof(float) * n * W);
    if (folds(s))
      for (int i = 0; i < n; i++) {
        const int64_t at = token + i;
        if (w.f.valid && !w.f.valid[at]) continue;
        float sc = meta_at(s.scale, s.meta, at) * (s.scale2 ? meta_at(s.scale2, s.meta, at) : 1.f);
        float sh = s.zero ? meta_at(s.zero, s.meta, at) + sc * s.mid : 0.f;
        for (int c = 0; c < W; c += 16) store(to + i * W + c, fma(load(to + i * W + c), set1(sc), set1(sh)));
      }
    t += n;
  }
}
static void tile_keys(const kv_format& f, const Sides& d, const Where& w, int tile, int a, int b, float* rows, float* turned) {
  for (int i = 0; i < f.keys; turned += lanes(f.k[i]) * TILE, i++) {
    tile_rows(f.k[i], d.k[i], d.of[i], w, tile, a, b, rows);
    transpose(rows, TILE, lanes(f.k[i]), turned);
  }
}

// Rows [r0, r0 + M) of a sequence and head, numbered query * G + g, over all slots that they see.
static void chunk_item(const kv_format& f, const kv_view& s, const Sides& d, const Queries& q, const Output& io, int n, int h, int r0, int M) {
  const int G = f.group, g0 = f.group_of[h], wk = key_lanes(f), wv = lanes(f.v);
  const int32_t *lo = s.lo + (int64_t)(n * s.groups + g0) * s.rows, *hi = s.hi + (int64_t)(n * s.groups + g0) * s.rows;
  const Where w{f, s.table + (int64_t)(n * s.groups + g0) * s.blocks, h};
  float* Q = buffer().get((size_t)ROWS * (wk + wv + TILE + 2) + (size_t)TILE * (wk + wv + f_max(wk, wv)));
  float *O = Q + ROWS * wk, *S = O + ROWS * wv, *m = S + ROWS * TILE, *l = m + ROWS, *K = l + ROWS, *V = K + TILE * wk, *rows = V + TILE * wv;
  int first = INT32_MAX, end = 0;
  for (int i = 0; i < M; i++) {
    const int t = (r0 + i) / G;
    take(f, q, h, (r0 + i) % G, s.first[n] + t, Q + i * wk);
    m[i] = NEG_INF, l[i] = 0.f;
    if (lo[t] < hi[t]) first = f_min(first, lo[t]), end = f_max(end, hi[t]);
  }
  std::memset(O, 0, sizeof(float) * M * wv);
  for (int tile = first / TILE * TILE; tile < end; tile += TILE) {
    const int a = f_max(first, tile), b = f_min(end, tile + TILE);
    tile_keys(f, d, w, tile, a, b, rows, K);
    tile_rows(f.v, d.v, d.of[2], w, tile, a, b, V);
    int change[TILE + 1] = {}, seen = 0;  // slots between what different rows see may hold anything
    for (int t = r0 / G; t * G < r0 + M; t++) {
      const int from = f_max(lo[t] - tile, 0), to = f_min(hi[t] - tile, TILE);
      if (from < to) change[from]++, change[to]--;
    }
    for (int c = 0; c < TILE; c++)
      if (!(seen += change[c])) std::memset(V + c * wv, 0, sizeof(float) * wv);
    gemm(M, Q, wk, K, TILE, TILE, wk, S, TILE, false);
    for (int i = 0; i < M; i++) {
      const int t = (r0 + i) / G, from = f_max(lo[t] - tile, 0), to = f_min(hi[t] - tile, TILE);
      float* p = S + i * TILE;
      for (int c = a - tile; f.valid && c < b - tile; c += 16 - (tile + c) % 16)
        punch(w, Where::token(w, tile + c), f_min(16 - (tile + c) % 16, b - tile - c), p + c);
      if (from >= to) {
        std::memset(p, 0, sizeof(float) * TILE);
        continue;
      }
      X top = set1(m[i]), sum = set1(0.f);
      for (int c = 0; c < TILE; c += 16) {
        if (from > c || to < c + 16) store(p + c, between(load(p + c), from - c, to - c, NEG_INF));
        top = max(top, load(p + c));
      }
      if (hmax(top) == NEG_INF) {  // nothing but holes so far
        std::memset(p, 0, sizeof(float) * TILE);
        continue;
      }
      const float now = hmax(top), keep = l[i] > 0 ? std::exp2(m[i] - now) : 0.f;
      for (int c = 0; c < TILE; c += 16) {
        X e = exp2_of(sub(load(p + c), set1(now)));
        if (from > c || to < c + 16) e = between(e, from - c, to - c, 0.f);
        if (f.valid) e = present(w, tile + c, a, b, e);
        store(p + c, e), sum = add(sum, e);
      }
      if (keep != 1.f)
        for (int c = 0; c < wv; c += 16) store(O + i * wv + c, mul(load(O + i * wv + c), set1(keep)));
      m[i] = now, l[i] = l[i] * keep + hsum(sum);
    }
    gemm(M, S, TILE, V, wv, wv, TILE, O, wv, true);
  }
  for (int i = 0; i < M; i++) {
    if (!finite(Q + i * wk, wk) && lo[(r0 + i) / G] < hi[(r0 + i) / G]) {
      for (int c = 0; c < wv; c++) O[i * wv + c] = NAN;
      finish(io, f, O + i * wv, NAN, h * G + (r0 + i) % G, s.first[n] + (r0 + i) / G);
      continue;
    }
    for (int c = 0; c < wv && l[i] > 0; c += 16) store(O + i * wv + c, mul(load(O + i * wv + c), set1(1.f / l[i])));
    finish(io, f, O + i * wv, l[i] > 0 ? m[i] + std::log2(l[i]) : NEG_INF, h * G + (r0 + i) % G, s.first[n] + (r0 + i) / G);
  }
}

// Attention that slots [tile, tile + TILE) got from the rows of a sequence: sum over queries of exp(logit - lse) -> out [G, columns].
static void mass_item(const kv_format& f, const kv_view& s, const Sides& d, const Queries& q, const Output& io, int n, int h, int tile, float* out, int columns) {
  const int G = f.group, g0 = f.group_of[h], wk = key_lanes(f), total = s.count[n] * G;
  const int32_t *lo = s.lo + (int64_t)(n * s.groups + g0) * s.rows, *hi = s.hi + (int64_t)(n * s.groups + g0) * s.rows;
  const Where w{f, s.table + (int64_t)(n * s.groups + g0) * s.blocks, h};
  float* Q = buffer().get((size_t)ROWS * (wk + TILE) + (size_t)TILE * (2 * wk + G));
  float *S = Q + ROWS * wk, *K = S + ROWS * TILE, *rows = K + TILE * wk, *sum = rows + TILE * wk;
  int a = tile + TILE, b = tile;
  for (int t = 0; t < s.count[n]; t++)
    if (lo[t] < hi[t]) a = f_min(a, f_max(lo[t], tile)), b = f_max(b, f_min(hi[t], tile + TILE));
  std::memset(sum, 0, sizeof(float) * TILE * G);
  if (a < b) tile_keys(f, d, w, tile, a, b, rows, K);
  for (int r0 = 0; r0 < total && a < b; r0 += ROWS) {
    const int M = f_min(ROWS, total - r0);
    for (int i = 0; i < M; i++) take(f, q, h, (r0 + i) % G, s.first[n] + (r0 + i) / G, Q + i * wk);
    gemm(M, Q, wk, K, TILE, TILE, wk, S, TILE, false);
    for (int i = 0; i < M; i++) {
      const int t = (r0 + i) / G, from = f_max(lo[t] - tile, 0), to = f_min(hi[t] - tile, TILE), g = (r0 + i) % G;
      const float lse = io.lse[(h * G + g) * io.lse_head + (s.first[n] + t) * io.lse_row];
      if (from >= to || lse == INFINITY) continue;
      for (int c = 0; c < TILE; c += 16) {
        X above = sub(set1(lse * LOG2E), load(S + i * TILE + c));  // bounded below: another lse must not overflow
        X e = exp2_of(sub(set1(0.f), max(above, set1(-127.f))));
        if (from > c || to < c + 16) e = between(e, from - c, to - c, 0.f);
        if (f.valid) e = present(w, tile + c, a, b, e);
        store(sum + g * TILE + c, add(load(sum + g * TILE + c), e));
      }
    }
  }
  for (int g = 0; g < G; g++) std::memcpy(out + (int64_t)g * columns + tile, sum + g * TILE, sizeof(float) * f_min(TILE, columns - tile));
}
}  // namespace
