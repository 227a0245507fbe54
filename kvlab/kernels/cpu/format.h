// How one side (K or V) of a page is stored, and its rows as floats. `kv_side` is filled by kernels/cpu/attend.py from a
// codec's own description (kernels/format.py); nothing here knows a method by name.
//
// A row (one token of one head) is read sixteen bytes of its widest plane at a time: a UNIT. A unit holds 8 / w runs of
// sixteen codes, w the bits of the plane; a run is a SLOT, one X. `channel` says which channel each lane of each slot
// is (-1: padding). Queries are brought into slot order once, outputs back into channel order once; rows never are.
#pragma once
#include <new>

#include "words.h"

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

template <int BITS> struct Bits {  // planes of the binary expansion, widest first
  static constexpr int W = BITS == 8 ? 8 : BITS >= 4 ? 4 : BITS >= 2 ? 2 : 1;
  static constexpr int REST = BITS - W, PER = 8 / W;
};

KV_INLINE int unit_bytes(int bits) { return bits == 8 ? 8 : bits >= 4 ? 4 : bits >= 2 ? 2 : 1; }
KV_INLINE bool is_codes(const kv_side& s) { return s.kind == KV_UNIFORM || s.kind == KV_TABLE; }

// Lane -> channel of every slot; returns the number of slots, or -1 when there are more than the kernels hold.
static int slot_channels(const kv_side& s, int16_t* channel) {
  int n = 0;
  if (!is_codes(s)) {
    for (int c = 0; c < s.width; c++) channel[c] = (int16_t)c;
    return s.width % 16 ? -1 : s.width / 16;
  }
  int w = unit_bytes(s.bits), per = 8 / w, bytes = s.pack * w / 8, rows = s.width / s.pack;
  bool flat = s.bits == w;  // one plane: rows of all groups follow each other without a gap
  int spans = flat ? 1 : rows, span = flat ? bytes * rows : bytes;
  for (int r = 0; r < spans; r++)
    for (int u = 0; u < span; u += 16)
      for (int i = 0; i < per; i++, n++) {
        if (n == MAX_SLOTS) return -1;
        for (int l = 0; l < 16; l++) {
          int b = u + l, row = flat ? b / bytes : r;
          channel[n * 16 + l] = (int16_t)(b < span ? row * s.pack + i * bytes + b % bytes : -1);
        }
      }
  return n;
}

// Where the bits of the narrower planes lie for the codes of each unit (see kernels/packing.py, order `split`).
struct Narrow {  // empty for formats of one plane
  int offset[3], bytes[3];
  bool straight[3];
  uint8_t at[MAX_UNITS][3][16], bit[MAX_UNITS][4][3][16];
};

template <int BITS> static void narrow_of(const kv_side& s, Narrow& t) {
  using P = Bits<BITS>;
  int wide = s.pack * P::W / 8, start = wide, plane = 0, b = 0;
  for (int v = 4; v; v /= 2) {
    if (!(P::REST & v)) continue;
    int m = s.pack * v / 8;
    t.offset[plane] = start, t.bytes[plane] = m, t.straight[plane] = m % 16 == 0;
    for (int u = 0; u * 16 < wide; u++)
      for (int l = 0; l < 16; l++) {
        int j = u * 16 + l < wide ? u * 16 + l : 0;
        t.at[u][plane][l] = (uint8_t)(j % m);
        for (int i = 0; i < P::PER; i++)
          for (int k = 0; k < v; k++) t.bit[u][i][b + k][l] = (uint8_t)(1 << (P::W * i + v * (j / m) + k));
      }
    start += m, b += v, plane++;
  }
}

KV_INLINE Bytes narrow_bytes(const uint8_t* row, const Narrow& t, int u, int plane) {
  const uint8_t* p = row + t.offset[plane];
  if (t.straight[plane]) return load_bytes(p + t.at[u][plane][0]);
  if (t.bytes[plane] == 8) return shuffle(load_eight(p), t.at[u][plane]);
  uint8_t b[16];
  for (int l = 0; l < 16; l++) b[l] = p[t.at[u][plane][l]];
  return load_bytes(b);
}

template <int BITS, int I> KV_INLINE Bytes code_run(Bytes wide, const Bytes* rest, const Narrow& t, int u) {
  using P = Bits<BITS>;
  Bytes c = P::W == 8 ? wide : shift_mask<P::W * I, (1 << P::W) - 1>(wide);
  if constexpr (P::REST == 1) c = where_bit<1 << P::W>(rest[0], t.bit[u][I][0], c);
  if constexpr (P::REST >= 2) {
    c = where_bit<1 << P::W>(rest[0], t.bit[u][I][0], c);
    c = where_bit<2 << P::W>(rest[0], t.bit[u][I][1], c);
  }
  if constexpr (P::REST == 3) c = where_bit<4 << P::W>(rest[1], t.bit[u][I][2], c);
  return c;
}

struct Decoder {  // n tokens in a row: their stored numbers, [n, slots * 16], without scales
  virtual void rows(const kv_side& s, const uint8_t* row, int n, float* out) const = 0;
  float step = 0.f, low = 0.f;  // number = step * word + low; step 0: there are no words
  virtual void words(const kv_side&, const uint8_t*, int, int16_t*) const {}
};

template <int BITS, bool UNIFORM> struct Codes final : Decoder {
  using P = Bits<BITS>;
  Table16 lo{}, hi{};
  const float* table;
  float mid;
  Narrow narrow;
  Bytes word_lo{}, word_hi{};  // of a table, as words
  Codes(const kv_side& s, int top) : table(s.table), mid(s.mid) {
    if (top && s.kind == KV_UNIFORM) step = 1.f, low = -mid;
    else if (top && BITS <= 4) table_words(s.table, (float)top);
    if (!UNIFORM && BITS <= 5) lo = table16(s.table, BITS < 4 ? 1 << BITS : 16), hi = table16(s.table + (BITS == 5 ? 16 : 0), BITS < 4 ? 1 << BITS : 16);
    if (P::REST) narrow_of<BITS>(s, narrow);
  }
  void table_words(const float* t, float top) {
    const int n = 1 << BITS;
    float most = t[0];
    low = t[0];
    for (int i = 1; i < n; i++) low = t[i] < low ? t[i] : low, most = t[i] > most ? t[i] : most;
    step = most > low ? (most - low) / top : 1.f;
    uint8_t b[2][16];
    for (int i = 0; i < 16; i++) {
      const int w = (int)std::lround((t[i & (n - 1)] - low) / step);
      b[0][i] = (uint8_t)w, b[1][i] = (uint8_t)(w >> 8);
    }
    word_lo = load_bytes(b[0]), word_hi = load_bytes(b[1]);
  }
  template <bool TABLE, int I> KV_INLINE void word_runs(const Codes& c, Bytes wide, const Bytes* rest, int u, int16_t* out) {
    if constexpr (I < P::PER) {
      const Bytes code = code_run<BITS, I>(wide, rest, c.narrow, u);
      if (TABLE) store_looked(out + I * 16, c.word_lo, c.word_hi, code);
      else store_codes(out + I * 16, code);
      word_runs<TABLE, I + 1>(c, wide, rest, u, out);
    }
  }
  template <bool TABLE> void all_words(const kv_side& s, const uint8_t* row, int n, int16_t* out) const {
    units(*this, s, row, n, [&](Bytes wide, const Bytes* rest, int u) {
      word_runs<TABLE, 0>(*this, wide, rest, u, out);
      out += 16 * P::PER;
    });
  }
  void words(const kv_side& s, const uint8_t* row, int n, int16_t* out) const override {
    if (s.kind == KV_TABLE) all_words<true>(s, row, n, out);
    else all_words<false>(s, row, n, out);
  }
  // Tables are passed by value: they stay in registers while floats are stored.
  template <bool LOW> KV_INLINE void values(const float* table, float mid, const Table16& lo, const Table16& hi, Bytes a, Bytes b, X* out) {
    if constexpr (UNIFORM) out[0] = sub(from_uint8(a), set1(mid)), out[1] = sub(from_uint8(b), set1(mid));
    else if constexpr (BITS <= 4) look16<LOW>(a, b, lo, out);
    else if constexpr (BITS == 5) look32(a, b, lo, hi, out);
    else out[0] = look(a, table), out[1] = look(b, table);
  }
  template <bool LOW, int I> KV_INLINE void runs(const Codes& c, const Table16& lo, const Table16& hi, Bytes wide, const Bytes* rest, int u, float* out) {
    if constexpr (I < P::PER) {
      X x[2];
      values<LOW>(c.table, c.mid, lo, hi, code_run<BITS, I>(wide, rest, c.narrow, u), code_run<BITS, I + 1>(wide, rest, c.narrow, u), x);
      store(out + I * 16, x[0]), store(out + I * 16 + 16, x[1]);
      runs<LOW, I + 2>(c, lo, hi, wide, rest, u, out);
    }
  }
  template <class F> KV_INLINE void units(const Codes& c, const kv_side& s, const uint8_t* row, int n, F each) {
    const int bytes = s.pack * P::W / 8, groups = s.width / s.pack, stride = s.pack / 8 * BITS;
    const int spans = P::REST ? groups : 1, span = P::REST ? bytes : bytes * groups;
    for (int t = 0; t < n; t++, row += s.row_bytes)
      for (int g = 0; g < spans; g++) {
        const uint8_t* from = row + g * stride;
        for (int u = 0, b = 0; b < span; b += 16, u++) {
          Bytes wide = span - b >= 16 ? load_bytes(from + b) : load_bytes(from + b, span - b), rest[2];
          if constexpr (P::REST > 0) rest[0] = narrow_bytes(from, c.narrow, u, 0);
          if constexpr (P::REST == 3) rest[1] = narrow_bytes(from, c.narrow, u, 1);
          each(wide, rest, u);
        }
      }
  }
  template <bool LOW> void all(const kv_side& s, const uint8_t* row, int n, float* out) const {
    const Table16 low = lo, high = hi;
    units(*this, s, row, n, [&](Bytes wide, const Bytes* rest, int u) {
      if constexpr (P::PER == 1) {
        X x[2];
        values<LOW>(table, mid, low, high, wide, wide, x);
        store(out, x[0]);
      } else {
        runs<LOW, 0>(*this, low, high, wide, rest, u, out);
      }
      out += 16 * P::PER;
    });
  }
  void rows(const kv_side& s, const uint8_t* row, int n, float* out) const override {
    if (BITS > 4 || lo.low) all<true>(s, row, n, out);
    else all<false>(s, row, n, out);
  }
};

template <int KIND> struct Plain final : Decoder {
  explicit Plain(int top) { step = top && KIND == KV_I8 ? 1.f : 0.f; }
  void words(const kv_side& s, const uint8_t* row, int n, int16_t* out) const override {
    for (int t = 0; t < n; t++, row += s.row_bytes)
      for (int c = 0; c < s.width; c += 16, out += 16) store_int8(out, load_bytes(row + c));
  }
  void rows(const kv_side& s, const uint8_t* row, int n, float* out) const override {
    for (int t = 0; t < n; t++, row += s.row_bytes)
      for (int c = 0; c < s.width; c += 16, out += 16) {
        X x;
        if constexpr (KIND == KV_F32) x = load((const float*)row + c);
        if constexpr (KIND == KV_BF16) x = load_bf16((const uint16_t*)row + c);
        if constexpr (KIND == KV_F16) x = load_half((const uint16_t*)row + c);
        if constexpr (KIND == KV_E4M3) x = mul(from_e_bits<7, 0xBF80>(load_bytes(row + c)), set1(256.f));
        if constexpr (KIND == KV_E5M2) x = from_e_bits<8, 0xFF00>(load_bytes(row + c));
        if constexpr (KIND == KV_I8) x = from_int8(load_bytes(row + c));
        store(out, x);
      }
  }
};

// Built once a call; the one place where a format becomes a type. `storage` must outlive it.
struct Storage { alignas(64) char bytes[sizeof(Codes<7, false>)]; };

// top: of words made from a table, 0 = no words.
static const Decoder* decoder(const kv_side& s, Storage& at, int top) {
  void* p = at.bytes;
  switch (s.kind) {
    case KV_F32: return new (p) Plain<KV_F32>(top);
    case KV_BF16: return new (p) Plain<KV_BF16>(top);
    case KV_F16: return new (p) Plain<KV_F16>(top);
    case KV_E4M3: return new (p) Plain<KV_E4M3>(top);
    case KV_E5M2: return new (p) Plain<KV_E5M2>(top);
    case KV_I8: return new (p) Plain<KV_I8>(top);
  }
  switch (s.bits) {
    case 1: return new (p) Codes<1, false>(s, top);
    case 2: return new (p) Codes<2, false>(s, top);
    case 3: return new (p) Codes<3, false>(s, top);
    case 4: return new (p) Codes<4, false>(s, top);
    case 5: return new (p) Codes<5, false>(s, top);
    case 6: return s.kind == KV_TABLE ? (Decoder*)new (p) Codes<6, false>(s, top) : new (p) Codes<6, true>(s, top);
    case 7: return s.kind == KV_TABLE ? (Decoder*)new (p) Codes<7, false>(s, top) : new (p) Codes<7, true>(s, top);
    default: return s.kind == KV_TABLE ? (Decoder*)new (p) Codes<8, false>(s, top) : new (p) Codes<8, true>(s, top);
  }
}

KV_INLINE float meta_at(const uint8_t* p, int32_t type, int64_t i) {
  if (type == KV_F32) { float f; std::memcpy(&f, p + 4 * i, 4); return f; }
  uint16_t h;
  std::memcpy(&h, p + 2 * i, 2);
  return type == KV_F16 ? half_to_float(h) : bf16_to_float(h);
}
KV_INLINE X meta_load(const uint8_t* p, int32_t type, int64_t i) {  // sixteen in a row
  if (type == KV_F32) return load((const float*)p + i);
  const uint16_t* h = (const uint16_t*)p + i;
  return type == KV_F16 ? load_half(h) : load_bf16(h);
}

KV_INLINE X meta_few(const uint8_t* p, int32_t type, int64_t i, int n) {  // n <= 16 in a row, as the first lanes
  if (type == KV_F16) return half_few((const uint16_t*)p + i, n);
  float x[16] = {};
  for (int j = 0; j < n; j++) x[j] = meta_at(p, type, i + j);
  return load(x);
}
}  // namespace
