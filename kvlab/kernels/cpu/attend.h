// Softmax attention of query rows over pages, straight from what is stored. Results depend on a row and the slots it sees
// alone: a decoding row is cut into SPLITs of fixed length that start at slot 0, chunk rows walk TILEs that start at
// slot 0, and whatever a thread does is one (sequence, head, split) or (sequence, head, rows) by itself.
#pragma once
#include <vector>

#include "format.h"

struct kv_format {       // of one layer; made once
  int32_t size;          // sizeof(kv_format): the caller's idea of it
  int32_t heads, group;  // Hk kv heads, G query heads each
  int32_t block, keys;   // tokens a block; sides of K (2 = codes and a sketch beside them)
  float scale;           // multiplies q.k
  int32_t dim;           // channels of a query and of an output, D
  int32_t fast;          // decoding rows multiply integers of up to 15 bits where pages hold codes (fast.h)
  const float *turn, *back;  // the codec's basis, null = the model's: q' = q turn, [1 | Hk, D, width of the keys]; out = o
  const float* turn_v;           // back, [1 | Hk, width of the values, D]; turn_v its transpose, for writing
  int64_t turn_head, back_head;  // floats from one head's to the next's, 0 = shared
  const int32_t* group_of;  // [Hk] row of `table` for each head
  const int64_t* offset;    // [Hk] block row = id * stride + offset[h]
  int64_t stride;
  const uint8_t* valid;     // [block rows, B] 0 = a hole that no row sees; null = every slot in [lo, hi) is there
  kv_side k[2], v;
};

struct kv_view {         // what the rows of some sequences see; made once a step
  int32_t size;
  int32_t N, groups, blocks, rows;  // sequences, tables each, blocks a table, rows of the longest sequence
  const int32_t* table;             // [N, groups, blocks] block ids
  const int32_t *lo, *hi;           // [N, groups, rows] slots [lo, hi) that a row sees
  const int32_t *first, *count;     // [N] packed row of the first query, number of queries
};

namespace {
constexpr int SPLIT = 256, TILE = 64, ROWS = 96, MAX_R = 4, AHEAD = 64, MAX_GROUPS = 8;
constexpr float LOG2E = 1.44269504088896341f, LN2 = 0.693147180559945309f;

constexpr float QUERY_TOP = 16383.f;
static int word_top(int products) {  // the largest word of which so many, times a query's or a weight's, fit int32
  const int64_t most = (((int64_t)1 << 31) - 1) / ((int64_t)QUERY_TOP * products);
  return most < 16383 ? (int)most : 16383;
}

struct Lanes {  // of a side whose scales are finer than one per token
  bool runs;  // every slot is sixteen channels in a row
  int halves;  // groups, if each half of every slot lies in one of at most MAX_GROUPS; else 0
  int32_t group[MAX_SLOTS * 16];
};
struct Sides {
  const Decoder *k[2], *v;
  Storage store[3];
  Lanes of[3];
};

static void open_lanes(const kv_side& s, Lanes& to) {
  to.runs = true;
  for (int c = 0; c < s.slots * 16; c++) {
    to.group[c] = s.channel[c] < 0 || s.axis != KV_TOKEN ? 0 : s.channel[c] / s.group;
    if (s.channel[c] != s.channel[c & ~15] + (c & 15)) to.runs = false;
  }
  to.halves = s.axis == KV_TOKEN && s.width / s.group <= MAX_GROUPS ? s.width / s.group : 0;
  for (int c = 0; c < s.slots * 16; c++)
    if (to.group[c] != to.group[c & ~7]) to.halves = 0;
}
static void open_sides(const kv_format& f, Sides& s) {
  for (int i = 0; i < f.keys; i++) s.k[i] = decoder(f.k[i], s.store[i], f.fast ? word_top(2 * f.k[i].slots) : 0), open_lanes(f.k[i], s.of[i]);
  s.v = decoder(f.v, s.store[2], f.fast ? word_top(16) : 0);
  open_lanes(f.v, s.of[2]);
}
static int lanes(const kv_side& s) { return s.slots * 16; }
static int key_lanes(const kv_format& f) { return lanes(f.k[0]) + (f.keys > 1 ? lanes(f.k[1]) : 0); }

KV_INLINE int f_min(int a, int b) { return a < b ? a : b; }
KV_INLINE int f_max(int a, int b) { return a > b ? a : b; }
KV_INLINE float f_max(float a, float b) { return a > b ? a : b; }

struct Where {  // of one sequence and head
  const kv_format& f;
  const int32_t* table;
  int h;
  KV_INLINE int64_t row(const Where& w, int slot) { return w.table[slot / w.f.block] * w.f.stride + w.f.offset[w.h]; }
  KV_INLINE int64_t token(const Where& w, int slot) { return row(w, slot) * w.f.block + slot % w.f.block; }
};

// Below, `token` is Where::token of a slot; what follows it in the block follows it there too.

// n slots that are holes: their scores become -inf.
KV_INLINE void punch(const Where& w, int64_t token, int n, float* scores) {
  if (!w.f.valid) return;
  const uint8_t* valid = w.f.valid + token;
  for (int t = 0; t < n; t++)
    if (!valid[t]) scores[t] = NEG_INF;
}

// Zero where there is a hole; also written to `to`.
KV_INLINE X holes(const Where& w, int64_t token, X x, float* to) {
  alignas(64) float v[16];
  store(v, x);
  const uint8_t* valid = w.f.valid + token;
  for (int t = 0; t < 16; t++) v[t] = valid[t] ? v[t] : 0.f;
  if (to) store(to, load(v));
  return load(v);
}

// Like holes, for sixteen slots of which only those in [a, b) are looked at.
KV_INLINE X present(const Where& w, int slot, int a, int b, X x) {
  alignas(64) float v[16];
  store(v, x);
  for (int t = f_max(a - slot, 0); t < 16 && slot + t < b; t++)
    if (!w.f.valid[Where::token(w, slot + t)]) v[t] = 0.f;
  return load(v);
}

// One scale (and zero) per token can be applied to scores and probabilities; anything finer goes to the rows.
KV_INLINE bool folds(const kv_side& s) { return s.axis == KV_TOKEN && s.group == s.width; }

// Whether the fast arithmetic takes a side (fast.h): a scale per token, none, or, of keys, one per channel.
KV_INLINE bool as_words(const kv_side& s, const Decoder& d, bool key) {
  return d.step != 0.f && (folds(s) || s.axis == KV_NONE || (key && s.axis == KV_BLOCK));
}

// Scale and shift of each lane for the group of tokens that `token` is in (KV_BLOCK; a group divides a block).
static void block_scales(const kv_side& s, const Lanes& of, int64_t token, float* scale, float* shift) {
  const int64_t at = token / s.group * s.width;
  for (int c = 0; c < lanes(s); c += 16) {
    if (of.runs) {
      X a = meta_load(s.scale, s.meta, at + s.channel[c]);
      store(scale + c, a);
      store(shift + c, s.zero ? fma(a, set1(s.mid), meta_load(s.zero, s.meta, at + s.channel[c])) : set1(0.f));
      continue;
    }
    for (int l = c; l < c + 16; l++) {
      const int ch = s.channel[l] < 0 ? 0 : s.channel[l];
      scale[l] = meta_at(s.scale, s.meta, at + ch);
      shift[l] = s.zero ? meta_at(s.zero, s.meta, at + ch) + scale[l] * s.mid : 0.f;
    }
  }
}

// Rows x = scale * x + (zero + scale * mid): scales per group of channels, or per channel and group of tokens.
static void scale_rows(const kv_side& s, const Lanes& of, int64_t token, int n, float* x) {
  const int W = lanes(s), groups = s.width / s.group;
  if (s.axis == KV_BLOCK) {
    float sc[MAX_SLOTS * 16], sh[MAX_SLOTS * 16];
    for (int t = 0; t < n;) {
      block_scales(s, of, token + t, sc, sh);
      for (int end = t + s.group - (int)((token + t) % s.group); t < n && t < end; t++)
        for (int c = 0; c < W; c += 16) store(x + t * W + c, fma(load(x + t * W + c), load(sc + c), load(sh + c)));
    }
    return;
  }
  int64_t at = token * groups;
  for (int t = 0; t < n; t++, x += W, at += groups) {
    if (groups > 16) {
      for (int c = 0; c < W; c++) {
        const float a = meta_at(s.scale, s.meta, at + of.group[c]);
        x[c] = x[c] * a + (s.zero ? meta_at(s.zero, s.meta, at + of.group[c]) + a * s.mid : 0.f);
      }
      continue;
    }
    const X a = meta_few(s.scale, s.meta, at, groups);
    const X b = s.zero ? fma(a, set1(s.mid), meta_few(s.zero, s.meta, at, groups)) : set1(0.f);
    for (int c = 0; c < W; c += 16)
      store(x + c, fma(load(x + c), permute(a, of.group + c, groups), permute(b, of.group + c, groups)));
  }
}

// n tokens of a side (all in one block), as stored; float32 pages are read where they lie.
static const float* read_rows(const kv_side& s, const Decoder* d, const Lanes& of, const Where& w, int64_t token, int n, float* buf, bool scaled = true) {
  const uint8_t* row = s.codes + token * s.row_bytes;
  if (s.kind == KV_F32 && s.axis == KV_NONE && !w.f.valid) return (const float*)row;
  d->rows(s, row, n, buf);
  if (scaled && s.axis != KV_NONE && !folds(s)) scale_rows(s, of, token, n, buf);
  for (int t = 0; w.f.valid && t < n; t++)  // nothing that lies in a hole may reach a sum, not even times zero
    if (!w.f.valid[token + t]) std::memset(buf + t * lanes(s), 0, sizeof(float) * lanes(s));
  return buf;
}

// Scale and shift of sixteen tokens of a side that folds.
KV_INLINE void token_scales(const kv_side& s, int64_t at, X& scale, X& shift) {
  scale = meta_load(s.scale, s.meta, at);
  if (s.scale2) scale = mul(scale, meta_load(s.scale2, s.meta, at));
  shift = s.zero ? fma(scale, set1(s.mid), meta_load(s.zero, s.meta, at)) : set1(0.f);
}

// A query with a NaN or an infinity has no result: comparisons would lose it, and the row would look like an empty one.
static bool finite(const float* x, int n) {
  X sum = set1(0.f);
  for (int i = 0; i < n; i += 16) sum = fma(load(x + i), set1(0.f), sum);
  return hsum(sum) == 0.f;
}

static void slot_order(const kv_side& s, const float* q, float by, float* out) {
  for (int c = 0; c < lanes(s); c++) out[c] = s.channel[c] < 0 ? 0.f : q[s.channel[c]] * by;
}

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

#include "fast.h"
#include "grouped.h"

// Pages are scattered: the hardware stops at each one's end, so the next ones are asked for by hand, scales too.
KV_INLINE void prefetch(const uint8_t* p, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += 64) KV_PREFETCH(p + b);
}
KV_INLINE void prefetch_rows(const kv_side& s, int64_t token) {
  const int64_t meta = s.meta == KV_F32 ? 4 : 2;
  prefetch(s.codes + token * s.row_bytes, 16 * s.row_bytes);
  if (s.axis == KV_TOKEN) {
    const int64_t each = s.width / s.group * meta;
    prefetch(s.scale + token * each, 16 * each);
    if (s.zero) prefetch(s.zero + token * each, 16 * each);
    if (s.scale2) prefetch(s.scale2 + token * each, 16 * each);
  } else if (s.axis == KV_BLOCK && token % s.group == 0) {
    const int64_t each = s.width * meta, at = token / s.group;
    prefetch(s.scale + at * each, each);
    if (s.zero) prefetch(s.zero + at * each, each);
  }
}

// One decoding row of R query heads over the slots [a, b) of one split. out [R, lanes of V] normalised, lse2 [R] base 2.
static void split_rows(const kv_format& f, const Sides& d, const Where& w, int R, const float* q, int a, int b, float* buf, float* out, float* lse2) {
  alignas(64) float s[MAX_R][SPLIT];
  float z[MAX_R];
  const int first = a & ~15, n = b - first, ldq = key_lanes(f), wv = lanes(f.v);
  int64_t token[SPLIT / 16];  // of every sixteen slots: a division each
  for (int t = 0; t < n; t += 16) token[t / 16] = Where::token(w, first + t);
  for (int t = 0; t < n && t < AHEAD; t += 16) prefetch_rows(f.k[0], token[t / 16]);
  for (int i = 0, at = 0; i < f.keys; at += lanes(f.k[i]), i++) {
    const kv_side& k = f.k[i];
    for (int r = 0; r < R; r++) {
      z[r] = 0.f;
      for (int c = 0; c < lanes(k); c++) z[r] += q[r * ldq + at + c];
    }
    const bool per_channel = k.axis == KV_BLOCK;  // a group's scales multiply the queries instead of its sixteen tokens
    const bool words = as_words(k, *d.k[i], true);
    Query16 asked;
    if (words && !per_channel) asked.take(q + at, ldq, R, k.slots);
    alignas(64) float scaled[MAX_R][MAX_SLOTS * 16], sc_lane[MAX_SLOTS * 16], sh_lane[MAX_SLOTS * 16];
    for (int t = 0; t < n; t += 16) {
      const int64_t at_token = token[t / 16];
      if (t + AHEAD < n) prefetch_rows(k, token[(t + AHEAD) / 16]);
      if (!i) prefetch_rows(f.v, at_token);
      const float* x = words ? nullptr : read_rows(k, d.k[i], d.of[i], w, at_token, 16, buf, !per_channel);
      const float* y = q + at;
      int ldy = ldq;
      if (per_channel) {
        const bool next = !t || at_token % k.group == 0;  // a group of tokens lies in one block: the rest of it follows
        if (next) block_scales(k, d.of[i], at_token, sc_lane, sh_lane);
        for (int r = 0; next && r < R; r++) {
          X sum = set1(0.f);
          for (int c = 0; c < lanes(k); c += 16) {
            X u = load(q + r * ldq + at + c);
            sum = fma(u, load(sh_lane + c), sum);
            store(scaled[r] + c, mul(u, load(sc_lane + c)));
          }
          z[r] = hsum(sum);
        }
        y = scaled[0], ldy = MAX_SLOTS * 16;
        if (words && next) asked.take(y, ldy, R, k.slots);
      }
      alignas(64) float dots[MAX_R][16];
      if (words) {
        asked.dot(*d.k[i], k, at_token, R, dots[0]);
      } else {
#define KV_CALL(N) dot16<N>(y, ldy, x, lanes(k), dots[0], 16)
        KV_ROWS(R, KV_CALL)
#undef KV_CALL
      }
      X sc = set1(1.f), sh = set1(0.f);
      if (folds(k)) token_scales(k, at_token, sc, sh);
      for (int r = 0; r < R; r++) {
        X score = load(dots[r]);
        if (folds(k)) score = fma(sh, set1(z[r]), mul(score, sc));
        if (per_channel) score = add(score, set1(z[r]));
        store(&s[r][t], i ? add(load(&s[r][t]), score) : score);
        punch(w, at_token, 16, &s[r][t]);
      }
    }
  }
  const int end = (n + 15) & ~15, skip = a - first;
  alignas(64) float v_scale[SPLIT], v_shift[SPLIT];
  const bool v_words = as_words(f.v, *d.v, false);
  Weights16 weights;
  const int groups = folds(f.v) ? 0 : d.of[2].halves;
  Grouped by_group;
  for (int t = 0; groups && t < end; t += 16) by_group.scales(f.v, w, token[t / 16], t, groups, t < skip ? skip - t : 0, n - t < 16 ? n - t : 16);
  for (int t = 0; folds(f.v) && t < end; t += 16) {
    X sc, sh;
    token_scales(f.v, token[t / 16], sc, sh);
    if (t < skip || t + 16 > n) sc = between(sc, skip - t, n - t, 0.f), sh = between(sh, skip - t, n - t, 0.f);
    if (f.valid) sc = holes(w, token[t / 16], sc, nullptr), sh = holes(w, token[t / 16], sh, nullptr);
    store(v_scale + t, sc), store(v_shift + t, sh);
  }
  for (int r = 0; r < R; r++) {
    if (!finite(q + r * ldq, ldq)) {
      lse2[r] = NAN;
      for (int c = 0; c < wv; c++) out[r * wv + c] = NAN;
      std::memset(s[r], 0, sizeof(float) * end);
      if (v_words) weights.take(*d.v, r, s[r], end);
      if (groups) by_group.weigh(r, s[r], end, groups);
      continue;
    }
    X top = set1(NEG_INF);
    for (int t = 0; t < end; t += 16) {
      if (t < skip || t + 16 > n) store(&s[r][t], between(load(&s[r][t]), skip - t, n - t, NEG_INF));
      top = max(top, load(&s[r][t]));
    }
    const float m = hmax(top);
    if (m == NEG_INF) {  // nothing but holes
      lse2[r] = NEG_INF;
      std::memset(s[r], 0, sizeof(float) * end);
      std::memset(out + r * wv, 0, sizeof(float) * wv);
      if (v_words) weights.take(*d.v, r, s[r], end);
      if (groups) by_group.weigh(r, s[r], end, groups);
      continue;
    }
    X sum = set1(0.f);
    for (int t = 0; t < end; t += 16) {
      X p = exp2_of(sub(load(&s[r][t]), set1(m)));
      if (t < skip || t + 16 > n) p = between(p, skip - t, n - t, 0.f);
      store(&s[r][t], p);
      if (f.valid) p = holes(w, token[t / 16], p, &s[r][t]);
      sum = add(sum, p);
    }
    const float l = hsum(sum);
    lse2[r] = m + std::log2(l);
    X shift = set1(0.f), inv = set1(1.f / l);
    for (int t = 0; t < end; t += 16) {
      X p = mul(load(&s[r][t]), inv);
      if (folds(f.v)) shift = fma(p, load(v_shift + t), shift), p = mul(p, load(v_scale + t));
      store(&s[r][t], p);
    }
    if (groups) {
      by_group.weigh(r, s[r], end, groups);
      by_group.start(d.of[2], f.v.slots, out + r * wv);
      continue;
    }
    const float z0 = hsum(shift) + (v_words ? weights.take(*d.v, r, s[r], end) : 0.f);
    for (int c = 0; c < wv; c++) out[r * wv + c] = z0;
  }
  for (int t = 0; v_words && t < end; t += 16) weights.mix(*d.v, f.v, token[t / 16], t, R, out, wv);
  if (v_words) return;
  for (int t = 0; t < end; t += 16) {
    const int from = t < skip ? skip - t : 0, to = n - t < 16 ? n - t : 16;
    const float* x = read_rows(f.v, d.v, d.of[2], w, token[t / 16] + from, to - from, buf, !groups);
    if (groups) {
#define KV_CALL(N) by_group.mix<N>(d.of[2], x, f.v.slots, t + from, to - from, out, wv)
      KV_ROWS(R, KV_CALL)
#undef KV_CALL
      continue;
    }
#define KV_CALL(N) mix16<N>(&s[0][t + from], SPLIT, x, f.v.slots, to - from, out, wv)
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

// x [n] times m [n, width] -> out [width]; width a multiple of 16.
static void times(const float* x, const float* m, int n, int width, float* out) {
  for (int c = 0; c < width; c += 16) {
    X sum = set1(0.f);
    for (int i = 0; i < n; i++) sum = fma(set1(x[i]), load(m + (int64_t)i * width + c), sum);
    store(out + c, sum);
  }
}

// A query head in the codec's basis and slot order, times scale * log2 e.
static void take(const kv_format& f, const Queries& q, int h, int g, int64_t row, float* out) {
  const float* from = q.q + (h * f.group + g) * q.head + row * q.row;
  alignas(64) float turned[MAX_SLOTS * 16];
  if (f.turn) {
    times(from, f.turn + h * f.turn_head, f.dim, f.k[0].width + (f.keys > 1 ? f.k[1].width : 0), turned);
    from = turned;
  }
  for (int i = 0; i < f.keys; from += f.k[i].width, out += lanes(f.k[i]), i++) slot_order(f.k[i], from, f.scale * LOG2E, out);
}
static void give(const kv_format& f, int h, const float* x, float* out) {
  alignas(64) float stored[MAX_SLOTS * 16];
  float* to = f.back ? stored : out;
  for (int c = 0; c < lanes(f.v); c++)
    if (f.v.channel[c] >= 0) to[f.v.channel[c]] = x[c];
  if (f.back) times(stored, f.back + h * f.back_head, f.v.width, f.dim, out);
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

static void decode_item(const kv_format& f, const kv_view& s, const Sides& d, const Queries& q, int n, int h, int split, float* part) {
  const int g0 = f.group_of[h], at = (n * s.groups + g0) * s.rows, wv = lanes(f.v);
  const int a = f_max(s.lo[at], split * SPLIT), b = f_min(s.hi[at], (split + 1) * SPLIT);
  float* lse2 = part + f.group * wv;
  if (a >= b) {
    for (int g = 0; g < f.group; g++) lse2[g] = NEG_INF;
    return;
  }
  const Where w{f, s.table + (int64_t)(n * s.groups + g0) * s.blocks, h};
  float *qs = buffer().get(MAX_R * key_lanes(f) + 16 * (size_t)f_max(key_lanes(f), wv)), *rows = qs + MAX_R * key_lanes(f);
  for (int g = 0; g < f.group; g += MAX_R) {
    const int R = f_min(MAX_R, f.group - g);
    for (int r = 0; r < R; r++) take(f, q, h, g + r, s.first[n], qs + r * key_lanes(f));
    split_rows(f, d, w, R, qs, a, b, rows, part + g * wv, lse2 + g);
  }
}

static void join_splits(const kv_format& f, const kv_view& s, const Output& io, int n, int h, int splits, const float* parts, int64_t step) {
  const int wv = lanes(f.v);
  float* o = buffer().get(wv);
  for (int g = 0; g < f.group; g++) {
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
}
}  // namespace
