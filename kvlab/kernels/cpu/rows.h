// A layer's format and what a step sees of it; tokens of a page as floats with their scales; holes; prefetching.
#pragma once
#include "format.h"

struct kv_format {       // of one layer; made once
  int32_t size;          // sizeof(kv_format): the caller's idea of it
  int32_t heads, group;  // Hk kv heads, G query heads each
  int32_t block, keys;   // tokens a block; sides of K (2 = codes and a sketch beside them)
  float scale;           // multiplies q.k
  int32_t dim;           // channels of a query and of an output, D
  int32_t fast;          // decoding rows multiply integers of up to 15 bits where pages hold codes (fast.h)
  const float *turn, *back;  // the codec's basis, null = the model's: q' = q turn, [1 | Hk, D, width of the keys]; out = o
                             // back, [1 | Hk, width of the values, D]. Keys are written turned, values by back's transpose
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
constexpr float LOG2E = 1.44269504088896341f, LN2 = 0.693147180559945309f;

struct Lanes {  // of a side
  bool runs;    // slots come in pairs: two runs of sixteen channels each, laced; or of whole bytes, or of AVX-512's units
  bool lined;   // each is sixteen neighbouring channels, in order
  bool turned;  // or in the order of AVX-512's units of sixteen bytes
  int groups;   // of a token's scales, if each slot lies in one of at most MAX_GROUPS; else 0
  int parts;    // groups that are read one by one: each has slots and bytes of its own; else 1
  bool wide;    // every two slots lie in one group
  int64_t scales;  // bytes of a token's scales, 0: it has none of its own
  int32_t group[MAX_SLOTS * 16];
};
static kv_side one_part(const kv_side& s, int parts) {
  kv_side one = s;
  one.width = s.width / parts, one.slots = s.slots / parts;
  if (parts > 1) one.pack = one.width;
  return one;
}
static int64_t part_bytes(const kv_side& s, int parts) { return least_row_bytes(s) / parts; }

struct Sides {
  const Decoder *k[2], *v, *part[2];  // part: of one of the groups of a key that are read one by one (Lanes.parts)
  Storage store[5];
  Lanes of[3];
};

static void open_lanes(const kv_side& s, Lanes& to) {
  const bool laced = is_codes(s) && s.bits < 8;
  const int lanes = s.slots * 16;
  const bool one = s.axis != KV_TOKEN || s.group == s.width;
  for (int c = 0; c < lanes; c++) to.group[c] = one || s.channel[c] < s.group ? 0 : s.channel[c] / s.group;
  to.lined = true, to.turned = KV_AVX512;
  for (int c = 0; c < lanes; c++) {
    to.lined = to.lined && s.channel[c] == s.channel[c & ~15] + c % 16;
    to.turned = to.turned && s.channel[c] == s.channel[c & ~15] + c % 4 * 4 + c % 16 / 4;
  }
#if KV_AVX512
  to.runs = !laced || unit_size(s) * 4 >= 16 * unit_bytes(s.bits);  // a unit is two slots or more
#else
  to.runs = !laced || (s.slots % 2 == 0 && !Spans(s).odd());
  for (int c = 0; laced && to.runs && c < lanes; c++) {
    const int l = c % 32, first = s.channel[c - l + (laced_run(l) ? 4 : 0)];
    to.runs = s.channel[c] == first + laced_code(l / 16, l % 16);
  }
#endif
  to.groups = s.axis == KV_TOKEN && s.width / s.group <= MAX_GROUPS ? s.width / s.group : 0;
  for (int c = 0; c < lanes; c++)
    if (to.group[c] != to.group[c & ~15]) to.groups = 0;
  to.wide = to.groups > 0;
  to.scales = s.axis == KV_TOKEN ? s.width / s.group * (s.meta == KV_F32 ? 4 : 2) : 0;
  for (int c = 0; c < lanes; c++)
    if (to.group[c] != to.group[c & ~31]) to.wide = false;
  const bool own = is_codes(s) ? s.pack == s.group && s.pack * unit_bytes(s.bits) / 8 % 16 == 0 : s.group % 16 == 0;
  to.parts = to.groups && own ? to.groups : 1;
}
static void open_sides(const kv_format& f, Sides& s) {
  for (int i = 0; i < f.keys; i++) {
    s.k[i] = decoder(f.k[i], s.store[i], f.fast ? UNSIGNED : NO_BYTES), open_lanes(f.k[i], s.of[i]);
    s.part[i] = s.of[i].parts == 1 ? s.k[i] : decoder(one_part(f.k[i], s.of[i].parts), s.store[3 + i], f.fast ? UNSIGNED : NO_BYTES);
  }
  s.v = decoder(f.v, s.store[2], f.fast ? SIGNED : NO_BYTES);
  open_lanes(f.v, s.of[2]);
}
static int lanes(const kv_side& s) { return s.slots * 16; }
static int key_lanes(const kv_format& f) { return lanes(f.k[0]) + (f.keys > 1 ? lanes(f.k[1]) : 0); }

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

// Zero where there is a hole.
KV_INLINE X holes(const Where& w, int64_t token, X x) {
  if (!w.f.valid) return x;
  alignas(64) float v[16];
  store(v, x);
  const uint8_t* valid = w.f.valid + token;
  for (int t = 0; t < 16; t++) v[t] = valid[t] ? v[t] : 0.f;
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

// Whether the fast arithmetic takes a side (fast.h): codes in whole runs, with scales that multiply scores, weights or
// queries. Weights must not become negative: values need a fit, none of which gives a negative scale.
KV_INLINE bool as_bytes(const kv_side& s, const Lanes& of, const Decoder& d, bool key) {
  if (!d.top || !of.runs || (of.parts > 1 && lanes(s) / of.parts % 32) || !(key || s.fit || s.axis == KV_NONE)) return false;
  return folds(s) || s.axis == KV_NONE || (key ? s.axis == KV_BLOCK || of.parts > 1 : KV_AVX512 ? of.groups > 0 : of.wide);
}

// Calls f(first lane, scale, shift) for every sixteen lanes, of the group of tokens that `token` is in (KV_BLOCK; a group
// divides a block).
template <class F> KV_INLINE void each_block_scale(const kv_side& s, const Lanes& of, int64_t token, F f) {
  const int64_t at = token / s.group * s.width;
  const auto put = [&](int c, X a, X b) { f(c, a, s.zero ? fma(a, set1(s.mid), b) : set1(0.f)); };
  const auto zero = [&](int c) { return s.zero ? meta_load(s.zero, s.meta, at + s.channel[c]) : set1(0.f); };
  if (of.lined) {
    for (int c = 0; c < lanes(s); c += 16) put(c, meta_load(s.scale, s.meta, at + s.channel[c]), zero(c));
    return;
  }
#if KV_AVX512
  if (of.turned) {
    alignas(64) static constexpr struct By { int32_t v[16]; constexpr By() : v() { for (int l = 0; l < 16; l++) v[l] = byte_of(16, l); } } by;
    for (int c = 0; c < lanes(s); c += 16) put(c, permute(meta_load(s.scale, s.meta, at + s.channel[c]), by.v, 16), s.zero ? permute(zero(c), by.v, 16) : set1(0.f));
    return;
  }
#else
  for (int c = 0; c < lanes(s) && of.runs; c += 32) {
    X a[2], b[2];
    lace(meta_load(s.scale, s.meta, at + s.channel[c]), meta_load(s.scale, s.meta, at + s.channel[c + 4]), a);
    lace(zero(c), zero(c + 4), b);
    for (int i = 0; i < 2; i++) put(c + 16 * i, a[i], b[i]);
  }
  if (of.runs) return;
#endif
  for (int c = 0; c < lanes(s); c += 16) {
    alignas(64) float a[16], b[16];
    for (int l = 0; l < 16; l++) {
      const int64_t i = at + (s.channel[c + l] < 0 ? 0 : s.channel[c + l]);
      a[l] = meta_at(s.scale, s.meta, i), b[l] = s.zero ? meta_at(s.zero, s.meta, i) : 0.f;
    }
    put(c, load(a), load(b));
  }
}
static void block_scales(const kv_side& s, const Lanes& of, int64_t token, float* scale, float* shift) {
  each_block_scale(s, of, token, [&](int c, X a, X b) { store(scale + c, a), store(shift + c, b); });
}
// Such a group's scales in queries q instead, q * scale, and what its shifts add to their scores, q . shift.
template <int R> static void scale_queries(const kv_side& s, const Lanes& of, int64_t token, const float* q, int ldq, float* out, int ldo, float* added) {
  X sum[R];
  for (auto& x : sum) x = set1(0.f);
  each_block_scale(s, of, token, [&](int c, X a, X b) {
    for (int r = 0; r < R; r++) {
      const X u = load(q + r * ldq + c);
      sum[r] = fma(u, b, sum[r]), store(out + r * ldo + c, mul(u, a));
    }
  });
  for (int r = 0; r < R; r++) added[r] = hsum(sum[r]);
}

// x: n values of each of sixteen tokens, token by token -> value by value. n at most MAX_GROUPS.
KV_INLINE void by_value(X* x, int n) {
  if (n & (n - 1)) {
    alignas(64) float a[16 * MAX_GROUPS], b[MAX_GROUPS][16];
    for (int i = 0; i < n; i++) store(a + 16 * i, x[i]);
    for (int i = 0; i < 16 * n; i++) b[i % n][i / n] = a[i];
    for (int i = 0; i < n; i++) x[i] = load(b[i]);
    return;
  }
  for (int m = n; m > 1; m /= 2) {
    X y[MAX_GROUPS];
    for (int i = 0; i < n; i += 2) {
      X two[2];
      deal(x[i], x[i + 1], two);
      y[i / 2] = two[0], y[n / 2 + i / 2] = two[1];
    }
    for (int i = 0; i < n; i++) x[i] = y[i];
  }
}

// Scale and shift of sixteen tokens, group by group.
KV_INLINE void some_group_scales(const kv_side& s, int64_t token, int groups, X* scale, X* shift) {
  for (int j = 0; j < groups; j++) {
    scale[j] = meta_load(s.scale, s.meta, token * groups + 16 * j);
    shift[j] = s.zero ? fma(scale[j], set1(s.mid), meta_load(s.zero, s.meta, token * groups + 16 * j)) : set1(0.f);
  }
  by_value(scale, groups);
  if (s.zero) by_value(shift, groups);
}
KV_INLINE void group_scales(const kv_side& s, int64_t token, int groups, X* scale, X* shift) {
  if (groups == 2) return some_group_scales(s, token, 2, scale, shift);  // a number that is known keeps them in registers
  if (groups == 4) return some_group_scales(s, token, 4, scale, shift);
  some_group_scales(s, token, groups, scale, shift);
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
  d->rows(row, n, buf);
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

// Pages are scattered: the hardware stops at each one's end, so the next ones are asked for by hand, scales too.
KV_INLINE void prefetch(const uint8_t* p, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += 64) KV_PREFETCH(p + b);
}
KV_INLINE void prefetch_rows(const kv_side& s, const Lanes& of, int slot, int64_t token) {  // sixteen tokens
  prefetch(s.codes + token * s.row_bytes, 16 * s.row_bytes);
  if (of.scales) {
    prefetch(s.scale + token * of.scales, 16 * of.scales);
    if (s.zero) prefetch(s.zero + token * of.scales, 16 * of.scales);
    if (s.scale2) prefetch(s.scale2 + token * of.scales, 16 * of.scales);
  } else if (s.axis == KV_BLOCK && slot % s.group == 0) {
    const int64_t each = s.width * (s.meta == KV_F32 ? 4 : 2), at = token / s.group;
    prefetch(s.scale + at * each, each);
    if (s.zero) prefetch(s.zero + at * each, each);
  }
}
}  // namespace
