// Codes as AVX2 and the generic variant read them: sixteen bytes of a row's widest plane at a time, a UNIT, which holds
// 8 / w runs of sixteen w-bit codes. Two runs are unpacked at once (bytes.h) and make two slots: the same run of two
// neighbouring units where a packed row has an even number of them, else two runs of one.
#pragma once
#include "slots.h"

namespace {
// Calls f(byte, run, byte, run) for every two runs of `span` bytes, in the order in which they are unpacked.
template <class F> static void each_pair(int span, bool paired, int per, F f) {
  if (paired) {
    for (int b = 0; b < span; b += 32)
      for (int i = 0; i < per; i++) f(b, i, b + 16, i);
  } else {
    for (int b = 0; b < span; b += 16)
      for (int i = 0; i < per; i += 2) f(b, i, b, i + 1);
  }
}

// How units are read: two neighbours at once; one by one; one by one, and the last one is not full.
enum Units { PAIRS, WHOLE, ENDS };

// Rows of `pack` codes of one plane follow each other without a gap: they are read as one.
struct Spans {
  int bytes, count, span, stride;  // of a row's widest plane; rows; bytes read as one; from one to the next
  bool paired;                     // runs of neighbouring units, which lie in one row then
  explicit Spans(const kv_side& s) {
    const int w = unit_bytes(s.bits), rows = s.width / s.pack;
    const bool flat = s.bits == w;
    bytes = s.pack * w / 8, count = flat ? 1 : rows, span = flat ? bytes * rows : bytes, stride = s.pack / 8 * s.bits;
    paired = bytes % 32 == 0;
  }
  bool odd() const { return !paired && span % 16 > 0; }  // the last unit is not full
  Units units() const { return paired ? PAIRS : odd() ? ENDS : WHOLE; }
};

// Lane -> channel of every slot; returns the number of slots, or -1 when there are more than the kernels hold.
static int code_channels(const kv_side& s, int16_t* channel) {
  const Spans at(s);
  const int per = 8 / unit_bytes(s.bits);
  int n = 0;
  for (int r = 0; r < at.count; r++)
    each_pair(at.span, at.paired, per, [&](int b0, int i0, int b1, int i1) {
      for (int x = 0; x < (at.span - b0 > 8 ? 2 : 1) && n >= 0; x++) {
        if (n == MAX_SLOTS) { n = -1; return; }
        for (int l = 0; l < 16; l++) {
          const int b = (laced_run(l) ? b1 : b0) + laced_code(x, l), row = at.count > 1 ? r : b / at.bytes;
          channel[n * 16 + l] = (int16_t)(b < at.span ? row * s.pack + (laced_run(l) ? i1 : i0) * at.bytes + b % at.bytes : -1);
        }
        n++;
      }
    });
  return n;
}

// Where the narrower planes of two runs lie (see kernels/packing.py, order `split`): a code's bits are v neighbouring ones of
// a byte, at W * run + `by`. Runs of the units of a pair come one after another, so only W * run changes between them.
struct Narrow {  // empty for formats of one plane
  int offset[2], bytes[2];
  uint8_t at[MAX_UNITS][2][32], by[MAX_UNITS][2][32];  // of each pair of runs that a row's bytes are read for
};

template <int BITS> static void narrow_of(const kv_side& s, Narrow& t) {
  using P = Bits<BITS>;
  const int wide = s.pack * P::W / 8;
  const bool paired = wide % 32 == 0;
  int start = wide, plane = 0;
  for (int v = 2; v; v /= 2) {
    if (!(P::REST & v)) continue;
    const int m = s.pack * v / 8;
    t.offset[plane] = start, t.bytes[plane] = m;
    for (int b = 0, u = 0; b < wide; b += paired ? 32 : 16, u++)
      for (int l = 0; l < 32; l++) {
        const int j = b + (paired ? l : l % 16), in = j < wide ? j : 0;
        t.at[u][plane][l] = (uint8_t)(in % m), t.by[u][plane][l] = (uint8_t)(v * (in / m) + (paired || l < 16 ? 0 : P::W));
      }
    start += m, plane++;
  }
}

// The bits of a plane for the u-th pair of units (or twice a unit), shifted so that run I's begin at bit W * I.
KV_INLINE Laced narrow_bits(const uint8_t* row, const Narrow& t, int u, int plane) {
  const uint8_t *p = row + t.offset[plane], *at = t.at[u][plane], *by = t.by[u][plane];
  const int m = t.bytes[plane];
  if (m == 8) return shift_fours(all_eight(p), by);
  if (m % 16 == 0) return shift_fours(both(load_bytes(p + at[0]), load_bytes(p + at[16])), by);
  if (m == 4) return shift_fours(all_four(p), by);
  uint8_t b[32];
  for (int l = 0; l < 32; l++) b[l] = (uint8_t)(p[at[l]] >> by[l]);
  return load_both(b);
}

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
  Bytes half[2]{};
  Codes(const kv_side& s, Wanted wanted) : at(s), width(s.width), row_bytes(s.row_bytes), looked(s.kind == KV_TABLE), table(s.table), mid(s.mid) {
    if (wanted && BITS <= 5) looked ? take_bytes(wanted) : (void)(top = (1 << BITS) - 1, step = 1.f, low = -mid);
    if (!UNIFORM && BITS <= 5) lo = table16(s.table, BITS < 4 ? 1 << BITS : 16), hi = table16(s.table + (BITS == 5 ? 16 : 0), BITS < 4 ? 1 << BITS : 16);
    for (int i = 0; BITS == 5 && i < 16; i++) mirrored = mirrored && table[31 - i] == -table[i];
    if (Bits<BITS>::REST) narrow_of<BITS>(s, narrow);
  }
  void take_bytes(Wanted wanted) {
    uint8_t entry[32];
    table_bytes<BITS>(table, wanted, *this, entry);
    for (int i = 0; i < 2; i++) half[i] = load_bytes(entry + 16 * i);
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
    const Bytes half = this->half[0], upper = this->half[1];
    const bool looked = this->looked;
    Runs<BITS>::template rows<HOW>(at, narrow, row, n, row_bytes, [&](Laced c, bool) {
      if (looked) c = BITS == 5 ? shuffle32(half, upper, c) : shuffle(half, c);
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
}  // namespace
