// How one side (K or V) of a page is stored. `kv_side` is filled by kernels/cpu/attend.py from a codec's own description
// (kernels/format.py); nothing here knows a method by name.
//
// A row (one token of one head) becomes numbers in SLOTs of sixteen lanes, in the order that unpacking costs least: laced.h,
// and units.h for AVX-512. `channel` says which channel each lane of each slot is (-1: padding). Queries are brought into
// slot order once, outputs back into channel order once; rows never.
#pragma once
#include "bytes.h"

enum kv_kind : int32_t { KV_F32, KV_BF16, KV_F16, KV_E4M3, KV_E5M2, KV_I8, KV_UNIFORM, KV_TABLE };
enum kv_axis : int32_t { KV_NONE, KV_TOKEN, KV_BLOCK };

struct kv_side {
  int32_t kind, bits;      // kv_kind; bits of a code (1..8) for KV_UNIFORM and KV_TABLE
  int32_t width, pack;     // channels; channels packed as one row of planes (divides width)
  int32_t axis, group;     // scales: KV_TOKEN per token and `group` channels, KV_BLOCK per channel and `group` tokens
  int32_t meta, slots;     // type of scale and zero (KV_F32, KV_BF16, KV_F16); number of slots
  float mid;               // rows come out as code - mid: value = scale * row + (zero + scale * mid)
  int32_t fit;             // kv_fit of encode.h: how tokens are written
  int64_t row_bytes;       // bytes of one token
  const uint8_t* codes;    // [block rows, B, row_bytes]
  const uint8_t *scale, *scale2, *zero;  // [block rows, B, width / group] or [block rows, B / group, width]; null = none
  const float* table;      // KV_TABLE: [2**bits], mid taken off already
  const int16_t* channel;  // [slots * 16]
  const float* edges;      // KV_TABLE: [2**bits - 1] between the cells
  float factor;            // of KV_CONST_UNBIASED
  int32_t reserved;
};

namespace {
constexpr int MAX_UNITS = 16, MAX_SLOTS = 64;
constexpr int SPLIT = 1024, TILE = 64, ROWS = 96, MAX_R = 4, AHEAD = 64, RUN = 64, MAX_GROUPS = 8;
// Splits get longer towards a sequence's end, four to six of each length: one costs what some forty tokens cost whatever it
// holds, and few long ones leave threads without work.
constexpr int split_start(int i) { return i < 4 ? 256 * i : i < 10 ? 512 * (i - 2) : SPLIT * (i - 6); }
constexpr int PITCH = SPLIT + 16;  // from one row of a split to the next: rows a power of two apart would share lines of a cache
KV_INLINE int f_min(int a, int b) { return a < b ? a : b; }
KV_INLINE int f_max(int a, int b) { return a > b ? a : b; }

template <int BITS> struct Bits {  // planes of the binary expansion, widest first
  static constexpr int W = BITS == 8 ? 8 : BITS >= 4 ? 4 : BITS >= 2 ? 2 : 1;
  static constexpr int REST = BITS - W, PER = 8 / W;
};

KV_INLINE int unit_bytes(int bits) { return bits == 8 ? 8 : bits >= 4 ? 4 : bits >= 2 ? 2 : 1; }
KV_INLINE bool is_codes(const kv_side& s) { return s.kind == KV_UNIFORM || s.kind == KV_TABLE; }
static int64_t least_row_bytes(const kv_side& s) {
  if (is_codes(s)) return (int64_t)s.width * s.bits / 8;
  return (int64_t)s.width * (s.kind == KV_F32 ? 4 : s.kind == KV_BF16 || s.kind == KV_F16 ? 2 : 1);
}

enum Wanted { NO_BYTES, UNSIGNED, SIGNED };  // which bytes a table's entries become
constexpr int TOP = 127;                      // the largest of them
constexpr int TOKENS = 32;                    // that share a step of their weights as bytes

template <class T> struct Weights {  // of tokens: from one row's to the next one's, from one group's of channels to the next one's
  const T* p;
  int row, group;
  const int32_t* of;  // the group of each lane
};

struct Stored {  // tokens of a side, sixteen by sixteen: those of token[t / 16] follow each other
  const uint8_t* codes;
  const int64_t* token;
  int64_t row_bytes;
  KV_INLINE const uint8_t* row(const Stored& s, int t) { return s.codes + (s.token[t / 16] + t % 16) * s.row_bytes; }
};

struct Soon {  // what is read next: asked for beside the products, a few lines at a time, if anything is
  Stored keys, values;
  int n;  // of keys
  KV_INLINE void some(const Soon* s, int t, int part, int parts) {  // of sixteen tokens
    if (!s) return;
    for (int64_t b = part * 64; t < s->n && b < 16 * s->keys.row_bytes; b += parts * 64) KV_PREFETCH(Stored::row(s->keys, t) + b);
    for (int64_t b = part * 64; b < 16 * s->values.row_bytes; b += parts * 64) KV_PREFETCH(Stored::row(s->values, t) + b);
  }
};

struct Decoder {  // of rows as they are stored: numbers without scales, in slot order
  virtual void rows(const uint8_t* row, int n, float* out) const = 0;  // [n, lanes]
  // The same as bytes, for the fast arithmetic: number = step * byte + low, no byte larger than `top`. top 0: there are none.
  // Two slots after two slots, or, with AVX-512, multiplied where they are: sums [R][n] of q [R][lanes] and n tokens;
  // acc [R] += by [groups][R][n / TOKENS] * p [groups][R][n] times n tokens. n a multiple of 16.
  virtual void bytes(const uint8_t*, int, uint8_t*) const {}
  virtual void dot8(const int8_t* /*q*/, int /*ldq*/, int /*R*/, const Stored&, int /*n*/, float* /*sums*/, int /*ld*/) const {}
  virtual void mix8(const Weights<uint8_t>& /*p*/, const Weights<float>& /*by*/, int /*R*/, const Stored&, int /*n*/, float* /*acc*/, int /*lda*/) const {}
  // Straight from what is stored (direct.h): scores [R][n] of n tokens, a multiple of 16; acc [R] += p [groups][R] times
  // tokens [from, to). False: not done, use rows().
  virtual bool dot(const float* /*q*/, int /*ldq*/, int /*R*/, const Stored&, const Soon*, int /*n*/, float* /*dots*/, int /*ld*/) const { return false; }
  virtual bool mix(const Weights<float>&, int /*R*/, const Stored&, int /*from*/, int /*to*/, float* /*acc*/, int /*lda*/) const { return false; }
  bool asks = false;  // dot() does, for what is read soon
  int top = 0;
  float step = 0.f, low = 0.f;
};

// A table's entries as bytes.
template <int BITS> void table_bytes(const float* table, Wanted wanted, Decoder& d, uint8_t* out) {
  const int n = 1 << BITS;
  float least = table[0], most = table[0];
  for (int i = 1; i < n; i++) least = table[i] < least ? table[i] : least, most = table[i] > most ? table[i] : most;
  d.top = TOP, d.low = wanted == SIGNED ? (least + most) / 2 : least;
  d.step = most > least ? (most - d.low) / TOP : 1.f;
  for (int i = 0; i < 32; i++) out[i] = (uint8_t)std::lround((table[i & (n - 1)] - d.low) / d.step);
}
}  // namespace
