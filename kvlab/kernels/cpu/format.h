// Decoders: rows of a page as numbers, one type per way to store them. What a side is: slots.h.
#pragma once
#include <new>

#include "slots.h"
#include "words.h"

namespace {
struct Decoder {  // of rows as they are stored: numbers without scales, in slot order
  virtual void rows(const uint8_t* row, int n, float* out) const = 0;  // [n, lanes]
  float step = 0.f, low = 0.f;  // number = step * word + low; step 0: there are no words
  virtual void words(const uint8_t*, int, int16_t*) const {}
};

template <int BITS> struct Runs {  // a row's codes, two runs at a time; PAIRED: of neighbouring units
  using P = Bits<BITS>;
  template <bool PAIRED, int I, class F> KV_INLINE void each(Laced wide, const Laced* rest, const uint8_t (*bit)[3][32], bool more, F& f) {
    if constexpr (I < P::PER) {
      constexpr int S = P::W * I, T = PAIRED ? S : S + P::W;
      Laced c = shift_mask<S, T, (1 << P::W) - 1>(wide);
      if constexpr (P::REST == 1) c = where_bit<1 << P::W>(rest[0], bit[0][0], c);
      if constexpr (P::REST >= 2) {
        c = where_bit<1 << P::W>(rest[0], bit[0][0], c);
        c = where_bit<2 << P::W>(rest[0], bit[0][1], c);
      }
      if constexpr (P::REST == 3) c = where_bit<4 << P::W>(rest[1], bit[0][2], c);
      f(c, more);
      each<PAIRED, I + (PAIRED ? 1 : 2)>(wide, rest, bit + 1, more, f);
    }
  }
  // f(two runs, whether their upper halves are there too)
  template <bool PAIRED, class F> KV_INLINE void row(const Spans& at, const Narrow& t, const uint8_t* row, F f) {
    for (int g = 0; g < at.count; g++, row += at.stride) {
      const uint8_t(*bit)[3][32] = t.bit;
      for (int b = 0; b < at.span; b += PAIRED ? 32 : 16) {
        Laced wide, rest[2];
        if constexpr (PAIRED) wide = load_both(row + b);
        else wide = twice(at.span - b >= 16 ? load_bytes(row + b) : load_bytes(row + b, at.span - b));
        for (int p = 0; p < (P::REST == 0 ? 0 : P::REST == 3 ? 2 : 1); p++) {
          if constexpr (PAIRED) rest[p] = both(narrow_bytes(row, t, b / 16, p), narrow_bytes(row, t, b / 16 + 1, p));
          else rest[p] = twice(narrow_bytes(row, t, b / 16, p));
        }
        each<PAIRED, 0>(wide, rest, bit, PAIRED || at.span - b > 8, f);
        bit += PAIRED ? P::PER : P::PER / 2;
      }
    }
  }
};

template <int BITS, bool UNIFORM> struct Codes final : Decoder {
  const Spans at;
  const int width;
  const int64_t row_bytes;
  const bool looked;
  Table16 lo{}, hi{};
  const float* table;
  float mid;
  Narrow narrow;
  Bytes word_lo{}, word_hi{};  // of a table, as words
  Codes(const kv_side& s, int top) : at(s), width(s.width), row_bytes(s.row_bytes), looked(s.kind == KV_TABLE), table(s.table), mid(s.mid) {
    if (top && s.kind == KV_UNIFORM) step = 1.f, low = -mid;
    else if (top && BITS <= 4) table_words(s.table, (float)top);
    if (!UNIFORM && BITS <= 5) lo = table16(s.table, BITS < 4 ? 1 << BITS : 16), hi = table16(s.table + (BITS == 5 ? 16 : 0), BITS < 4 ? 1 << BITS : 16);
    if (Bits<BITS>::REST) narrow_of<BITS>(s, narrow);
  }
  void table_words(const float* t, float top) {
    const int n = 1 << BITS;
    float most = t[0], least = t[0];
    for (int i = 1; i < n; i++) least = t[i] < least ? t[i] : least, most = t[i] > most ? t[i] : most;
    low = least, step = most > least ? (most - least) / top : 1.f;
    uint8_t b[2][16];
    for (int i = 0; i < 16; i++) {
      const int w = (int)std::lround((t[i & (n - 1)] - least) / step);
      b[0][i] = (uint8_t)w, b[1][i] = (uint8_t)(w >> 8);
    }
    word_lo = load_bytes(b[0]), word_hi = load_bytes(b[1]);
  }
  // Tables are copied first: then they stay in registers while floats are stored.
  template <bool LOW, bool PAIRED> void unpack(const uint8_t* row, int n, float* out) const {
    const Table16 low16 = lo, high16 = hi;
    for (int t = 0; t < n; t++, row += row_bytes)
      Runs<BITS>::template row<PAIRED>(at, narrow, row, [&](Laced c, bool more) {
        X x[2];
        if constexpr (BITS <= 4) look16<LOW>(c, low16, x);
        else if constexpr (BITS == 5) look32(c, low16, high16, x);
        else {
          Bytes b[2];
          unlace(c, b);
          for (int i = 0; i < 2; i++) x[i] = UNIFORM ? sub(from_uint8(b[i]), set1(mid)) : look(b[i], table);
        }
        store(out, x[0]), out += 16;
        if (more) store(out, x[1]), out += 16;
      });
  }
  void rows(const uint8_t* row, int n, float* out) const override {
    if constexpr (BITS == 8) {
      for (int t = 0; t < n; t++, row += row_bytes)
        for (int c = 0; c < width; c += 16, out += 16) {
          const Bytes b = width - c >= 16 ? load_bytes(row + c) : load_bytes(row + c, width - c);
          store(out, UNIFORM ? sub(from_uint8(b), set1(mid)) : look(b, table));
        }
    } else {
      if constexpr (BITS <= 4) {
        if (!lo.low) return at.paired ? unpack<false, true>(row, n, out) : unpack<false, false>(row, n, out);
      }
      at.paired ? unpack<true, true>(row, n, out) : unpack<true, false>(row, n, out);
    }
  }
  void words(const uint8_t* row, int n, int16_t* out) const override {  // 16 lanes more than there are may be written
    for (int t = 0; t < n; t++, row += row_bytes) {
      if constexpr (BITS == 8) {
        for (int c = 0; c < width; c += 16, out += 16) store_codes(out, width - c >= 16 ? load_bytes(row + c) : load_bytes(row + c, width - c));
      } else {
        const auto two = [&](Laced c, bool more) {
          if (looked) store_looked(out, word_lo, word_hi, c);
          else store_codes(out, c);
          out += more ? 32 : 16;
        };
        if (at.paired) Runs<BITS>::template row<true>(at, narrow, row, two);
        else Runs<BITS>::template row<false>(at, narrow, row, two);
      }
    }
  }
};

template <int KIND> struct Plain final : Decoder {
  const int width;
  const int64_t row_bytes;
  Plain(const kv_side& s, int top) : width(s.width), row_bytes(s.row_bytes) { step = top && KIND == KV_I8 ? 1.f : 0.f; }
  void words(const uint8_t* row, int n, int16_t* out) const override {
    for (int t = 0; t < n; t++, row += row_bytes)
      for (int c = 0; c < width; c += 16, out += 16) store_int8(out, load_bytes(row + c));
  }
  void rows(const uint8_t* row, int n, float* out) const override {
    for (int t = 0; t < n; t++, row += row_bytes)
      for (int c = 0; c < width; c += 16, out += 16) {
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
    case KV_F32: return new (p) Plain<KV_F32>(s, top);
    case KV_BF16: return new (p) Plain<KV_BF16>(s, top);
    case KV_F16: return new (p) Plain<KV_F16>(s, top);
    case KV_E4M3: return new (p) Plain<KV_E4M3>(s, top);
    case KV_E5M2: return new (p) Plain<KV_E5M2>(s, top);
    case KV_I8: return new (p) Plain<KV_I8>(s, top);
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
