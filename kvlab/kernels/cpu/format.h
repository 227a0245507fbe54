// Decoders: rows of a page as numbers, one type per way to store them. What a side is: slots.h.
#pragma once
#include <new>

#include "slots.h"

namespace {
enum Wanted { NO_BYTES, UNSIGNED, SIGNED };  // which bytes a table's entries become
constexpr int TOP = 127;                      // the largest of them

struct Decoder {  // of rows as they are stored: numbers without scales, in slot order
  virtual void rows(const uint8_t* row, int n, float* out) const = 0;  // [n, lanes]
  // The same as bytes, two runs after two runs: number = step * byte + low, no byte larger than `top`. top 0: there are none.
  virtual void bytes(const uint8_t*, int, uint8_t*) const {}
  int top = 0;
  float step = 0.f, low = 0.f;
};

template <int BITS> struct Runs {  // a row's codes, two runs at a time
  using P = Bits<BITS>;
  template <Units HOW, int I, class F> KV_INLINE void each(Laced wide, const Laced* rest, bool more, F& f) {
    if constexpr (I < P::PER) {
      constexpr int W = P::W, S = W * I, T = HOW == PAIRS ? S : S + W;
      Laced c = shift_mask<S, T, (1 << W) - 1>(wide);
      if constexpr (P::REST == 1) c = or_bits<S - W, 1 << W>(c, rest[0]);
      if constexpr (P::REST >= 2) c = or_bits<S - W, 3 << W>(c, rest[0]);
      if constexpr (P::REST == 3) c = or_bits<S - W - 2, 4 << W>(c, rest[1]);
      f(c, more);
      each<HOW, I + (HOW == PAIRS ? 1 : 2)>(wide, rest, more, f);
    }
  }
  template <Units HOW, class F> KV_INLINE void unit(const Spans& at, const Narrow& t, const uint8_t* row, int b, int u, F& f) {
    Laced wide, rest[2];
    if constexpr (HOW == PAIRS) wide = load_both(row + b);
    else wide = twice(HOW == WHOLE || at.span - b >= 16 ? load_bytes(row + b) : load_bytes(row + b, at.span - b));
    for (int p = 0; p < (P::REST == 0 ? 0 : P::REST == 3 ? 2 : 1); p++) rest[p] = narrow_bits(row, t, u, p);
    each<HOW, 0>(wide, rest, HOW != ENDS || at.span - b > 8, f);
  }
  // f(two runs, whether their upper halves are there too) for n rows
  template <Units HOW, class F> KV_INLINE void rows(const Spans at, const Narrow& t, const uint8_t* row, int n, int64_t row_bytes, F f) {
    constexpr int step = HOW == PAIRS ? 32 : 16;
    if (HOW != ENDS && at.count == 1 && at.span == step) {
      for (int i = 0; i < n; i++, row += row_bytes) unit<HOW>(at, t, row, 0, 0, f);
      return;
    }
    for (int i = 0; i < n; i++, row += row_bytes)
      for (int g = 0; g < at.count; g++)
        for (int b = 0, u = 0; b < at.span; b += step, u++) unit<HOW>(at, t, row + g * at.stride, b, u, f);
  }
};

template <int BITS, bool UNIFORM> struct Codes final : Decoder {
  const Spans at;
  const int width;
  const int64_t row_bytes;
  const bool looked;
  bool mirrored = BITS == 5;  // the table's upper half is the lower one backwards, negated
  Table16 lo{}, hi{};
  const float* table;
  float mid;
  Narrow narrow;
  Bytes table_bytes[2]{};
  Codes(const kv_side& s, Wanted wanted) : at(s), width(s.width), row_bytes(s.row_bytes), looked(s.kind == KV_TABLE), table(s.table), mid(s.mid) {
    if (wanted && BITS <= 5) looked ? take_bytes(wanted) : (void)(top = (1 << BITS) - 1, step = 1.f, low = -mid);
    if (!UNIFORM && BITS <= 5) lo = table16(s.table, BITS < 4 ? 1 << BITS : 16), hi = table16(s.table + (BITS == 5 ? 16 : 0), BITS < 4 ? 1 << BITS : 16);
    for (int i = 0; BITS == 5 && i < 16; i++) mirrored = mirrored && table[31 - i] == -table[i];
    if (Bits<BITS>::REST) narrow_of<BITS>(s, narrow);
  }
  void take_bytes(Wanted wanted) {
    const int n = 1 << BITS;
    float least = table[0], most = table[0];
    for (int i = 1; i < n; i++) least = table[i] < least ? table[i] : least, most = table[i] > most ? table[i] : most;
    top = TOP, low = wanted == SIGNED ? (least + most) / 2 : least;
    step = most > least ? (most - low) / TOP : 1.f;
    uint8_t b[32];
    for (int i = 0; i < 32; i++) b[i] = (uint8_t)std::lround((table[i & (n - 1)] - low) / step);
    for (int i = 0; i < 2; i++) table_bytes[i] = load_bytes(b + 16 * i);
  }
  // Tables are copied first: then they stay in registers while floats are stored.
  template <bool LOW, bool MIRRORED, Units HOW> void unpack(const uint8_t* row, int n, float* out) const {
    const Table16 low16 = lo, high16 = hi;
    Runs<BITS>::template rows<HOW>(at, narrow, row, n, row_bytes, [&](Laced c, bool more) {
      X x[2];
      if constexpr (BITS <= 4) look16<LOW>(c, low16, x);
      else if constexpr (BITS == 5) MIRRORED ? look_mirrored<LOW>(c, low16, high16, x) : look32(c, low16, high16, x);
      else {
        Bytes b[2];
        unlace(c, b);
        for (int i = 0; i < 2; i++) x[i] = UNIFORM ? sub(from_uint8(b[i]), set1(mid)) : look(b[i], table);
      }
      store(out, x[0]), out += 16;
      if (more) store(out, x[1]), out += 16;
    });
  }
  template <bool LOW, bool MIRRORED = false> void unpack_as(const uint8_t* row, int n, float* out) const {
    switch (at.units()) {
      case PAIRS: return unpack<LOW, MIRRORED, PAIRS>(row, n, out);
      case WHOLE: return unpack<LOW, MIRRORED, WHOLE>(row, n, out);
      case ENDS: return unpack<LOW, MIRRORED, ENDS>(row, n, out);
    }
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
        if (!lo.low) return unpack_as<false>(row, n, out);
      }
      if constexpr (BITS == 5) {
        if (mirrored) return lo.low ? unpack_as<true, true>(row, n, out) : unpack_as<false, true>(row, n, out);
      }
      unpack_as<true>(row, n, out);
    }
  }
  template <Units HOW> void as_bytes(const uint8_t* row, int n, uint8_t* out) const {
    const Bytes by = table_bytes[0], by32 = table_bytes[1];
    const bool looked = this->looked;
    Runs<BITS>::template rows<HOW>(at, narrow, row, n, row_bytes, [&](Laced c, bool) {
      if (looked) c = BITS == 5 ? shuffle32(by, by32, c) : shuffle(by, c);
      store_both(out, c), out += 32;
    });
  }
  void bytes(const uint8_t* row, int n, uint8_t* out) const override {
    if constexpr (BITS <= 5) {
      const Units how = at.units();
      how == PAIRS ? as_bytes<PAIRS>(row, n, out) : how == WHOLE ? as_bytes<WHOLE>(row, n, out) : as_bytes<ENDS>(row, n, out);
    }
  }
};

template <int KIND> struct Plain final : Decoder {
  const int width;
  const int64_t row_bytes;
  explicit Plain(const kv_side& s) : width(s.width), row_bytes(s.row_bytes) {}
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

static const Decoder* decoder(const kv_side& s, Storage& at, Wanted bytes) {
  void* p = at.bytes;
  switch (s.kind) {
    case KV_F32: return new (p) Plain<KV_F32>(s);
    case KV_BF16: return new (p) Plain<KV_BF16>(s);
    case KV_F16: return new (p) Plain<KV_F16>(s);
    case KV_E4M3: return new (p) Plain<KV_E4M3>(s);
    case KV_E5M2: return new (p) Plain<KV_E5M2>(s);
    case KV_I8: return new (p) Plain<KV_I8>(s);
  }
  switch (s.bits) {
    case 1: return new (p) Codes<1, false>(s, bytes);
    case 2: return new (p) Codes<2, false>(s, bytes);
    case 3: return new (p) Codes<3, false>(s, bytes);
    case 4: return new (p) Codes<4, false>(s, bytes);
    case 5: return new (p) Codes<5, false>(s, bytes);
    case 6: return s.kind == KV_TABLE ? (Decoder*)new (p) Codes<6, false>(s, bytes) : new (p) Codes<6, true>(s, bytes);
    case 7: return s.kind == KV_TABLE ? (Decoder*)new (p) Codes<7, false>(s, bytes) : new (p) Codes<7, true>(s, bytes);
    default: return s.kind == KV_TABLE ? (Decoder*)new (p) Codes<8, false>(s, bytes) : new (p) Codes<8, true>(s, bytes);
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
