// Softmax attention of query rows over pages, straight from what is stored. Results depend on a row and the slots it sees
// alone: a decoding row is cut into SPLITs of fixed length that start at slot 0, chunk rows walk TILEs that start at
// slot 0, and whatever a thread does is one (sequence, head, split) or (sequence, head, rows) by itself.
#pragma once
#include <vector>

#include "fast.h"
#include "grouped.h"
#include "signs.h"

namespace {
struct Split {  // slots [first, first + n) of a decoding row; the first `skip` of them are not seen
  int first, skip, n;
  int64_t token[SPLIT / 16];  // of every sixteen slots: a division each
  alignas(64) float s[MAX_R][SPLIT];  // scores, then weights
  Split(const Where& w, int a, int b) : first(a & ~15), skip(a - first), n(b - first) {
    for (int t = 0; t < n; t += 16) token[t / 16] = Where::token(w, first + t);
  }
};

// Scores of R query heads q [R, key lanes].
static void scores(const kv_format& f, const Sides& d, const Where& w, int R, const float* q, float* buf, Split& x) {
  const int n = x.n, ldq = key_lanes(f);
  float z[MAX_GROUPS][MAX_R];
  for (int t = 0; t < n && t < AHEAD; t += 16) prefetch_rows(f.k[0], x.token[t / 16]);
  for (int i = 0, at = 0; i < f.keys; at += lanes(f.k[i]), i++) {
    const kv_side& k = f.k[i];
    const int parts = d.of[i].parts, wp = lanes(k) / parts;
    for (int p = 0; p < parts; p++)
      for (int r = 0; r < R; r++) {
        X sum = set1(0.f);
        for (int c = 0; c < wp; c += 16) sum = add(sum, load(q + r * ldq + at + p * wp + c));
        z[p][r] = hsum(sum);
      }
    const bool per_channel = k.axis == KV_BLOCK;  // a group's scales multiply the queries instead of its sixteen tokens
    const bool per_token = folds(k) || parts > 1, fine = k.axis == KV_TOKEN && !per_token;
    const bool bytes = as_bytes(k, d.of[i], *d.part[i], true);
    Query8 asked;
    if (bytes && !per_channel) asked.take(q + at, ldq, R, lanes(k), parts);
    Signs signs;
    const bool bits = !bytes && Signs::takes(k, d.of[i]);
    if (bits) signs.take(k, q + at, ldq, R);
    alignas(64) float scaled[MAX_R][MAX_SLOTS * 16];
    for (int t = 0; t < n; t += 16) {
      const int64_t at_token = x.token[t / 16];
      const int ahead = t + AHEAD;
      if (ahead < n) prefetch_rows(k, x.token[ahead / 16]);
      else if (i + 1 < f.keys && ahead - n < n) prefetch_rows(f.k[i + 1], x.token[(ahead - n) / 16]);
      if (!i) prefetch_rows(f.v, at_token);
      const float* y = q + at;
      int ldy = ldq;
      if (per_channel) {
        const bool next = !t || at_token % k.group == 0;  // a group of tokens lies in one block: the rest of it follows
#define KV_CALL(N) scale_queries<N>(k, d.of[i], at_token, q + at, ldq, scaled[0], MAX_SLOTS * 16, z[0])
        if (next) KV_ROWS(R, KV_CALL)
#undef KV_CALL
        y = scaled[0], ldy = MAX_SLOTS * 16;
        if (bytes && next) asked.take(y, ldy, R, lanes(k), 1);
      }
      alignas(64) float dots[MAX_R][16];
      X sc_part[MAX_GROUPS], sh_part[MAX_GROUPS];
      if (parts > 1) group_scales(k, at_token, parts, sc_part, sh_part);
      const Decoder& one = parts > 1 ? *d.part[i] : *d.k[i];
      const uint8_t* row = k.codes + at_token * k.row_bytes;
      for (int p = 0; p < parts; p++, row += part_bytes(k, parts)) {
        if (bytes) {
          asked.dot(one, row, wp, p, R, dots[0]);
        } else if (bits) {
#define KV_CALL(N) signs.dot<N>(k, row, dots[0])
          KV_ROWS(R, KV_CALL)
#undef KV_CALL
        } else if (fine || !one.dot(y + p * wp, ldy, R, row, dots[0])) {
          const float* rows = fine || parts == 1 ? read_rows(k, d.k[i], d.of[i], w, at_token, 16, buf, fine) : buf;
          if (parts > 1) one.rows(row, 16, buf);
#define KV_CALL(N) dot16<N>(y + p * wp, ldy, rows, wp, wp, dots[0], 16)
          KV_ROWS(R, KV_CALL)
#undef KV_CALL
        }
        X sc = set1(1.f), sh = set1(0.f);
        if (parts > 1) sc = sc_part[p], sh = sh_part[p];
        else if (per_token) token_scales(k, at_token, sc, sh);
        for (int r = 0; r < R; r++) {
          X score = load(dots[r]);
          if (per_token) score = fma(sh, set1(z[p][r]), mul(score, sc));
          if (per_channel) score = add(score, set1(z[0][r]));
          store(&x.s[r][t], i || p ? add(load(&x.s[r][t]), score) : score);
        }
      }
      for (int r = 0; r < R; r++) punch(w, at_token, 16, &x.s[r][t]);
    }
  }
}

// The same over one split: out [R, lanes of V] normalised, lse2 [R] base 2.
static void split_rows(const kv_format& f, const Sides& d, const Where& w, int R, const float* q, int a, int b, float* buf, float* out, float* lse2) {
  Split x(w, a, b);
  scores(f, d, w, R, q, buf, x);
  const int n = x.n, end = (n + 15) & ~15, skip = x.skip, ldq = key_lanes(f), wv = lanes(f.v);
  alignas(64) float v_scale[SPLIT], v_shift[SPLIT];
  const int groups = folds(f.v) ? 0 : d.of[2].groups;
  const bool bytes = as_bytes(f.v, d.of[2], *d.v, false);
  Grouped by_group;
  Weights8 weights;
  for (int t = 0; groups && t < end; t += 16) by_group.scales(f.v, w, x.token[t / 16], t, groups, t < skip ? skip - t : 0, n - t < 16 ? n - t : 16);
  for (int t = 0; folds(f.v) && t < end; t += 16) {
    X sc, sh;
    token_scales(f.v, x.token[t / 16], sc, sh);
    if (t < skip || t + 16 > n) sc = between(sc, skip - t, n - t, 0.f), sh = between(sh, skip - t, n - t, 0.f);
    if (f.valid) sc = holes(w, x.token[t / 16], sc, nullptr), sh = holes(w, x.token[t / 16], sh, nullptr);
    store(v_scale + t, sc), store(v_shift + t, sh);
  }
  for (int r = 0; r < R; r++) {
    float *s = x.s[r], *o = out + r * wv, start = 0.f, low[MAX_GROUPS] = {};
    X top = set1(NEG_INF);
    for (int t = 0; t < end; t += 16) {
      if (t < skip || t + 16 > n) store(s + t, between(load(s + t), skip - t, n - t, NEG_INF));
      top = max(top, load(s + t));
    }
    const float m = hmax(top);
    const bool bad = !finite(q + r * ldq, ldq), none = m == NEG_INF;  // none: nothing but holes
    if (bad || none) {
      lse2[r] = bad ? NAN : NEG_INF, start = bad ? NAN : 0.f;
      std::memset(s, 0, sizeof(float) * end);
    } else {
      X sum = set1(0.f);
      for (int t = 0; t < end; t += 16) {
        X p = exp2_of(sub(load(s + t), set1(m)));
        if (t < skip || t + 16 > n) p = between(p, skip - t, n - t, 0.f);
        store(s + t, p);
        if (f.valid) p = holes(w, x.token[t / 16], p, s + t);
        sum = add(sum, p);
      }
      const float l = hsum(sum);
      lse2[r] = m + std::log2(l);
      X shift = set1(0.f), inv = set1(1.f / l);
      for (int t = 0; t < end; t += 16) {
        X p = mul(load(s + t), inv);
        if (folds(f.v)) shift = fma(p, load(v_shift + t), shift), p = mul(p, load(v_scale + t));
        store(s + t, p);
      }
      start = hsum(shift);
    }
    if (groups) by_group.weigh(r, s, end, groups);
    for (int g = 0; g < f_max(groups, 1); g++) {
      low[g] = start + (groups ? by_group.sum[g] : 0.f);
      if (bytes) low[g] += weights.take(*d.v, g, r, groups ? by_group.p[g][r] : s, end);
    }
    for (int c = 0; c < wv; c++) o[c] = low[groups ? d.of[2].group[c] : 0];
  }
  if (bytes) {
    for (int t = 0; t < end; t += TOKENS) weights.mix(*d.v, d.of[2], f.v, x.token + t / 16, wv, t, f_min(TOKENS, end - t), R, out, wv);
    return;
  }
  const Weights<float> all = groups ? Weights<float>{by_group.p[0][0], SPLIT, MAX_R * SPLIT, d.of[2].group} : Weights<float>{x.s[0], SPLIT, 0, d.of[2].group};
  // Numbers of codes are numbers also in holes, whose weight is zero; floats may be anything there.
  bool direct = (groups || folds(f.v) || f.v.axis == KV_NONE) && (is_codes(f.v) || !f.valid);
  for (int t = 0, more; t < end; t += more) {
    more = 16;
    while (direct && t + more < end && x.token[(t + more) / 16] == x.token[t / 16] + more) more += 16;  // of one block
    const int from = t < skip ? skip - t : 0, to = n - t < more ? n - t : more;
    if (direct) {
      direct = d.v->mix({all.p + t + from, all.row, all.group, all.of}, R, f.v.codes + (x.token[t / 16] + from) * f.v.row_bytes, to - from, out, wv);
      if (!direct) more = 0;
      continue;
    }
    const float* v = read_rows(f.v, d.v, d.of[2], w, x.token[t / 16] + from, to - from, buf, !groups);
#define KV_CALL(N) groups ? by_group.mix<N>(d.of[2], v, f.v.slots, t + from, to - from, out, wv) \
                          : mix16<N>(&x.s[0][t + from], SPLIT, v, wv, wv, to - from, out, wv)
    KV_ROWS(R, KV_CALL)
#undef KV_CALL
  }
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
  const int a = f_max(s.lo[at], split * SPLIT), b = f_min(s.hi[at], (split + 1) * SPLIT);
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
