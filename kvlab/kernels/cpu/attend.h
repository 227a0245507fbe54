// Softmax attention of query rows over pages, straight from what is stored. Results depend on a row and the slots it sees
// alone: a decoding row is cut into splits whose places are fixed (split_start), chunk rows walk TILEs that start at
// slot 0, and whatever a thread does is one (sequence, head, split) or (sequence, head, rows) by itself.
#pragma once
#include <vector>

#include "fast.h"
#include "grouped.h"
#include "signs.h"

namespace {
// What scores will need soon: keys AHEAD tokens further on (of the next side of K at the end), and these tokens' values.
KV_INLINE void ask(const kv_format& f, const Sides& d, const Split& x, int i, int t) {
  const int ahead = t + AHEAD;
  if (ahead < x.n) prefetch_rows(f.k[i], d.of[i], x.first + ahead, x.token[ahead / 16]);
  else if (i + 1 < f.keys && ahead - x.n < x.n) prefetch_rows(f.k[i + 1], d.of[i + 1], x.first + ahead - x.n, x.token[(ahead - x.n) / 16]);
  if (!i) prefetch_rows(f.v, d.of[2], x.first + t, x.token[t / 16]);
}

// Scores of R query heads q [R, key lanes].
static void scores(const kv_format& f, const Sides& d, const Where& w, int R, const float* q, float* buf, Split& x) {
  const int n = x.n, end = (n + 15) & ~15, ldq = key_lanes(f);
  float z[MAX_GROUPS][MAX_R];
  for (int t = 0; t < n && t < AHEAD; t += 16) prefetch_rows(f.k[0], d.of[0], x.first + t, x.token[t / 16]);
  for (int i = 0, at = 0; i < f.keys; at += lanes(f.k[i]), i++) {
    const kv_side& k = f.k[i];
    const int parts = d.of[i].parts, wp = lanes(k) / parts;
    const int64_t part = part_bytes(k, parts);
    for (int p = 0; p < parts; p++)
      for (int r = 0; r < R; r++) {
        X sum = set1(0.f);
        for (int c = 0; c < wp; c += 16) sum = add(sum, load(q + r * ldq + at + p * wp + c));
        z[p][r] = hsum(sum);
      }
    const bool per_channel = k.axis == KV_BLOCK;  // a group's scales multiply the queries instead of its tokens
    const bool per_token = folds(k) || parts > 1, fine = k.axis == KV_TOKEN && !per_token;
    const bool bytes = as_bytes(k, d.of[i], *d.part[i], true);
    Query8 asked;
    if (bytes && !per_channel) asked.take(q + at, ldq, R, lanes(k), parts);
    Signs signs;
    const bool bits = !bytes && Signs::takes(k, d.of[i]);
    if (bits) signs.take(k, q + at, ldq, R);
    const bool beside = d.part[i]->asks && f.keys == 1 && k.axis == KV_NONE && f.v.axis == KV_NONE;
    alignas(64) float scaled[MAX_R * MAX_SLOTS * 16];
    for (int t = 0, m; t < end; t += m) {
      m = f_min(is_codes(k) || beside ? RUN : 16, end - t);  // as many as can be asked for at once
      const float* y = q + at;
      int ldy = ldq;
      if (per_channel) {  // a group of tokens lies in one block, and begins at a multiple of its length
        const int in_group = (x.first + t) % k.group;
        m = f_min(m, k.group - in_group);
        y = scaled, ldy = lanes(k);
        if (!t || !in_group) {
#define KV_CALL(N) scale_queries<N>(k, d.of[i], x.token[t / 16], q + at, ldq, scaled, ldy, z[0])
          KV_ROWS(R, KV_CALL)
#undef KV_CALL
          if (bytes) asked.take(y, ldy, R, lanes(k), 1);
        }
      }
      const Soon soon{{k.codes, x.token + f_min(t + AHEAD, end) / 16, k.row_bytes}, {f.v.codes, x.token + t / 16, f.v.row_bytes}, n - t - AHEAD};
      for (int j = t; !beside && j < t + m; j += 16) ask(f, d, x, i, j);
      alignas(64) float dots[MAX_R][RUN];
      alignas(64) float scale[MAX_GROUPS][RUN], shift[MAX_GROUPS][RUN];
      for (int j = 0; parts > 1 && j < m; j += 16) {
        X a[MAX_GROUPS], b[MAX_GROUPS];
        group_scales(k, x.token[(t + j) / 16], parts, a, b);
        for (int p = 0; p < parts; p++) store(&scale[p][j], a[p]), store(&shift[p][j], b[p]);
      }
      const Decoder& one = *d.part[i];
      for (int p = 0; p < parts; p++) {
        const Stored from{k.codes + p * part, x.token + t / 16, k.row_bytes};
        if (bytes) {
          asked.dot(one, from, m, wp, p, R, dots[0], RUN);
        } else if (bits) {
#define KV_CALL(N) signs.dot<N>(k, from, m, dots[0], RUN)
          KV_ROWS(R, KV_CALL)
#undef KV_CALL
        } else if (fine || !one.dot(y + p * wp, ldy, R, from, beside ? &soon : nullptr, m, dots[0], RUN)) {
          for (int j = 0; j < m; j += 16) {
            const float* rows = fine || parts == 1 ? read_rows(k, d.k[i], d.of[i], w, x.token[(t + j) / 16], 16, buf, fine) : buf;
            if (parts > 1) one.rows(Stored::row(from, j), 16, buf);
#define KV_CALL(N) dot16<N>(y + p * wp, ldy, rows, wp, wp, &dots[0][j], RUN)
            KV_ROWS(R, KV_CALL)
#undef KV_CALL
          }
        }
        for (int j = 0; j < m; j += 16) {
          X sc = set1(1.f), sh = set1(0.f);
          if (parts > 1) sc = load(&scale[p][j]), sh = load(&shift[p][j]);
          else if (per_token) token_scales(k, x.token[(t + j) / 16], sc, sh);
          for (int r = 0; r < R; r++) {
            X score = load(&dots[r][j]);
            if (per_token) score = fma(sh, set1(z[p][r]), mul(score, sc));
            if (per_channel) score = add(score, set1(z[0][r]));
            store(&x.s[r][t + j], i || p ? add(load(&x.s[r][t + j]), score) : score);
          }
        }
      }
      for (int j = t; f.valid && j < t + m; j += 16)
        for (int r = 0; r < R; r++) punch(w, x.token[j / 16], 16, &x.s[r][j]);
    }
  }
}

// The same over one split: out [R, lanes of V] normalised, lse2 [R] base 2.
static void split_rows(const kv_format& f, const Sides& d, const Where& w, int R, const float* q, int a, int b, float* buf, float* out, float* lse2) {
  Split x(w, a, b);
  scores(f, d, w, R, q, buf, x);
  const int n = x.n, end = (n + 15) & ~15, skip = x.skip, ldq = key_lanes(f), wv = lanes(f.v);
  const int groups = d.of[2].groups;
  const bool bytes = as_bytes(f.v, d.of[2], *d.v, false);
  Grouped by_group;
  Weights8 weights;
  float inverse[MAX_R];
  bool bad[MAX_R];
  for (int r = 0; r < R; r++) bad[r] = !finite(q + r * ldq, ldq);
#define KV_CALL(N) groups == 0 ? softmax<N, 0>(f.v, w, 0, bad, x, by_group, inverse, lse2) : groups == 1 ? softmax<N, 1>(f.v, w, 1, bad, x, by_group, inverse, lse2) \
                 : groups == 2 ? softmax<N, 2>(f.v, w, 2, bad, x, by_group, inverse, lse2) : softmax<N, -1>(f.v, w, groups, bad, x, by_group, inverse, lse2)
  KV_ROWS(R, KV_CALL)
#undef KV_CALL
  for (int r = 0; r < R; r++) {
    float low[MAX_GROUPS] = {};
    for (int g = 0; g < f_max(groups, 1); g++) {
      if (groups) low[g] = by_group.sum[g][r];
      if (bytes) low[g] += weights.take(*d.v, g, r, groups ? by_group.p[g][r] : x.s[r], end);
    }
    for (int c = 0; c < wv; c += 16) store(out + r * wv + c, set1(low[groups ? d.of[2].group[c] : 0]));
  }
  const Stored from{f.v.codes, x.token, f.v.row_bytes};
  const Weights<float> all = groups ? Weights<float>{by_group.p[0][0], PITCH, groups > 1 ? MAX_R * PITCH : 0, d.of[2].group} : Weights<float>{x.s[0], PITCH, 0, d.of[2].group};
  // Numbers of codes are numbers also in holes, whose weight is zero; floats may be anything there.
  const bool direct = (groups || f.v.axis == KV_NONE) && (is_codes(f.v) || !f.valid);
  if (bytes) {
    weights.mix(*d.v, d.of[2], from, wv, end, R, out, wv);
  } else if (!direct || !d.v->mix(all, R, from, skip, n, out, wv)) {
    for (int t = 0; t < end; t += 16) {
      const int first = t < skip ? skip - t : 0, some = f_min(n - t, 16) - first;
      const float* v = read_rows(f.v, d.v, d.of[2], w, x.token[t / 16] + first, some, buf, !groups);
#define KV_CALL(N) groups ? by_group.mix<N>(d.of[2], v, f.v.slots, t + first, some, out, wv) \
                          : mix16<N>(&x.s[0][t + first], PITCH, v, wv, wv, some, out, wv)
      KV_ROWS(R, KV_CALL)
#undef KV_CALL
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < wv; c += 16) store(out + r * wv + c, mul(load(out + r * wv + c), set1(inverse[r])));
}

struct Buffer {  // grows once per thread
  std::vector<float> v;
  float* get(size_t n) {
    if (v.size() < n + 16) v.resize(n + 16);
    return v.data() + (16 - ((uintptr_t)v.data() / 4) % 16) % 16;
  }
};
static Buffer& buffer() {
  static thread_local Buffer b;
  return b;
}

struct Queries {  // q [row, head]: where query head h * G + g of packed row t is
  const float* q;
  int64_t head, row;
};

// x [n] times m [n, width], its rows `row` floats apart -> out [width]; width a multiple of 16.
static void times(const float* x, const float* m, int n, int row, int width, float* out) {
  int c = 0;
  for (; c + 64 <= width; c += 64) {  // four sums at once: one alone would wait for itself
    X sum[4] = {set1(0.f), set1(0.f), set1(0.f), set1(0.f)};
    for (int i = 0; i < n; i++)
      for (int k = 0; k < 4; k++) sum[k] = fma(set1(x[i]), load(m + (int64_t)i * row + c + 16 * k), sum[k]);
    for (int k = 0; k < 4; k++) store(out + c + 16 * k, sum[k]);
  }
  for (; c < width; c += 16) {
    X sum = set1(0.f);
    for (int i = 0; i < n; i++) sum = fma(set1(x[i]), load(m + (int64_t)i * row + c), sum);
    store(out + c, sum);
  }
}

// A query head in the codec's basis and slot order, times scale * log2 e.
static void take(const kv_format& f, const Queries& q, int h, int g, int64_t row, float* out) {
  const float* from = q.q + (h * f.group + g) * q.head + row * q.row;
  alignas(64) float turned[MAX_SLOTS * 16];
  if (f.turn) {
    const int width = f.k[0].width + (f.keys > 1 ? f.k[1].width : 0);
    times(from, f.turn + h * f.turn_head, f.dim, width, width, turned);
    from = turned;
  }
  for (int i = 0; i < f.keys; from += f.k[i].width, out += lanes(f.k[i]), i++) slot_order(f.k[i], from, f.scale * LOG2E, out);
}
static void give(const kv_format& f, int h, const float* x, float* out) {
  alignas(64) float stored[MAX_SLOTS * 16];
  float* to = f.back ? stored : out;
  for (int c = 0; c < lanes(f.v); c++)
    if (f.v.channel[c] >= 0) to[f.v.channel[c]] = x[c];
  if (f.back) times(stored, f.back + h * f.back_head, f.v.width, f.dim, f.dim, out);
}

struct Output {
  float *out, *lse;  // [row, head, channel], [row, head]
  int64_t head, row, lse_head, lse_row;
  bool join;  // they hold a partial over other keys: join it
};

// o normalised over some keys, lse2 its log2-sum-exp2 (-inf: none) -> the caller's arrays.
static void finish(const Output& io, const kv_format& f, const float* o, float lse2, int head, int64_t row) {
  float* out = io.out + head * io.head + row * io.row;
  float& lse = io.lse[head * io.lse_head + row * io.lse_row];
  const float mine = lse2 == NEG_INF ? NEG_INF : lse2 * LN2;
  if (!io.join || lse == NEG_INF) {
    if (mine == NEG_INF) for (int c = 0; c < f.dim; c++) out[c] = 0.f;
    else give(f, head / f.group, o, out);
    lse = mine;
    return;
  }
  if (mine == NEG_INF) return;
  const float top = lse > mine ? lse : mine, a = std::exp(lse - top), b = std::exp(mine - top), share = b / (a + b);
  alignas(64) float own[MAX_SLOTS * 16];
  give(f, head / f.group, o, own);
  for (int c = 0; c < f.dim; c++) out[c] += share * (own[c] - out[c]);
  lse = top + std::log(a + b);
}

static void decode_item(const kv_format& f, const kv_view& s, const Sides& d, const float* queries, int n, int h, int split, float* part) {
  const int g0 = f.group_of[h], at = (n * s.groups + g0) * s.rows, wv = lanes(f.v);
  const int a = f_max(s.lo[at], split_start(split)), b = f_min(s.hi[at], split_start(split + 1));
  float* lse2 = part + f.group * wv;
  if (a >= b) {
    for (int g = 0; g < f.group; g++) lse2[g] = NEG_INF;
    return;
  }
  const Where w{f, s.table + (int64_t)(n * s.groups + g0) * s.blocks, h};
  float* rows = buffer().get(16 * (size_t)f_max(key_lanes(f), wv));
  for (int g = 0; g < f.group; g += MAX_R)
    split_rows(f, d, w, f_min(MAX_R, f.group - g), queries + g * key_lanes(f), a, b, rows, part + g * wv, lse2 + g);
}

static void join_splits(const kv_format& f, const kv_view& s, const Output& io, int n, int h, int g, int splits, const float* parts, int64_t step) {
  const int wv = lanes(f.v);
  float* o = buffer().get(wv);
  float top = NEG_INF, sum = 0.f;
  for (int i = 0; i < splits && top == top; i++) {  // a NaN stays
    const float lse2 = parts[i * step + f.group * wv + g];
    if (!(lse2 <= top)) top = lse2;
  }
  for (int c = 0; c < wv; c++) o[c] = 0.f;
  for (int i = 0; i < splits && top != NEG_INF; i++) {
    const float* p = parts + i * step;
    if (p[f.group * wv + g] == NEG_INF) continue;
    const float e = std::exp2(p[f.group * wv + g] - top);
    sum += e;
    for (int c = 0; c < wv; c += 16) store(o + c, fma(set1(e), load(p + g * wv + c), load(o + c)));
  }
  for (int c = 0; c < wv && sum > 0; c += 16) store(o + c, mul(load(o + c), set1(1.f / sum)));
  finish(io, f, o, top == NEG_INF ? NEG_INF : top + std::log2(sum), h * f.group + g, s.first[n]);
}
}  // namespace
