// Codes as AVX-512 reads them: sixteen at a time, a byte with the code in each lane of 32 bits, shifted and looked up there.
// A row's widest plane is read in UNITs of N bytes, the largest power of two that divides a packed row and has at most 64
// codes; so no unit crosses packed rows. Lane l of a unit's slot s is field 16 / N * s + l / N of its byte l % N: all
// sixteen lanes are codes unless a unit has but eight.
#pragma once
#include <type_traits>

#include "direct.h"


namespace {
static int unit_size(const kv_side& s) {
  const int w = unit_bytes(s.bits), bytes = s.pack * w / 8;
  int n = w == 1 ? 8 : 16;
  while (bytes % n) n /= 2;
  return n;
}
template <int BITS, int N> constexpr int slots_of_unit = N * 8 / Bits<BITS>::W / 16 ? N * 8 / Bits<BITS>::W / 16 : 1;
constexpr int field_of(int N, int s, int l) { return 16 / N * s + l / N; }

static int code_channels(const kv_side& s, int16_t* channel) {
  const int w = unit_bytes(s.bits), n = unit_size(s), each = f_max(n * 8 / w / 16, 1), bytes = s.pack * w / 8;
  if (s.width / s.pack * (bytes / n) * each > MAX_SLOTS) return -1;
  int slot = 0;
  for (int row = 0; row < s.width; row += s.pack)
    for (int b = 0; b < bytes; b += n)
      for (int i = 0; i < each; i++, slot++)
        for (int l = 0; l < 16; l++) {
          const int run = field_of(n, i, l);
          channel[slot * 16 + l] = (int16_t)(run * w < 8 ? row + run * bytes + b + l % n : -1);
        }
  return slot;
}

struct Index { __m512i a; };  // a code in each lane; what is above it may be anything
template <int N> KV_INLINE Index spread(const uint8_t* p) {  // N bytes, again and again
  if constexpr (N == 16) return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))};
  if constexpr (N == 8) { int64_t v; std::memcpy(&v, p, 8); return {_mm512_cvtepu8_epi32(_mm_set1_epi64x(v))}; }
  if constexpr (N == 4) { int32_t v; std::memcpy(&v, p, 4); return {_mm512_cvtepu8_epi32(_mm_set1_epi32(v))}; }
  if constexpr (N == 2) { int16_t v; std::memcpy(&v, p, 2); return {_mm512_cvtepu8_epi32(_mm_set1_epi16(v))}; }
  if constexpr (N == 1) return {_mm512_set1_epi32(*p)};
}

// The narrower planes of a packed row (kernels/packing.py, order `split`): which byte a lane's bits are in, and how far it is turned
// until they lie above the ones that the lane has.
struct Narrow {
  int32_t offset[2], bytes[2];
  int16_t at[2][MAX_SLOTS][16];                // of each unit of a packed row
  alignas(64) int32_t turn[2][MAX_SLOTS][16];  // of each slot of one
};
template <int BITS> static void narrow_of(const kv_side& s, Narrow& t) {
  using P = Bits<BITS>;
  const int n = unit_size(s), each = f_max(n * 8 / P::W / 16, 1), bytes = s.pack * P::W / 8;
  int start = bytes, plane = 0, low = P::W;
  for (int v = 2; v; v /= 2) {
    if (!(P::REST & v)) continue;
    const int m = s.pack * v / 8;
    t.offset[plane] = start, t.bytes[plane] = m;
    for (int u = 0; u < bytes / n; u++)
      for (int l = 0; l < 16; l++) {
        t.at[plane][u][l] = (int16_t)((u * n + l % n) % m);
        for (int i = 0; i < each; i++) {
          const int channel = field_of(n, i, l) * bytes + u * n + l % n;
          t.turn[plane][u * each + i][l] = channel < s.pack ? (v * (channel / m) - low) & 31 : 0;
        }
      }
    start += m, plane++, low += v;
  }
}

template <int BITS, int N> struct Unpack {  // units of one packed row
  using P = Bits<BITS>;
  static constexpr int SLOTS = slots_of_unit<BITS, N>, PLANES = P::REST == 0 ? 0 : P::REST == 3 ? 2 : 1;
  KV_INLINE void unit(const uint8_t* row, const Narrow& t, int u, Index* out) {
    __m512i bits[2];
    for (int p = 0; p < PLANES; p++) bits[p] = plane(row + t.offset[p], t, p, u);
    fields(spread<N>(row + u * N).a, bits, t, u, out);
  }
  // The same of four rows, a byte of each in a lane.
  KV_INLINE void four(const uint8_t* row, int64_t row_bytes, const Narrow& t, int u, Index* out) {
    __m512i bits[2];
    for (int p = 0; p < PLANES; p++) {
      const uint8_t* from = row + t.offset[p];
      bits[p] = t.bytes[p] == 4 ? quads<4>(from, row_bytes) : t.bytes[p] == 8 ? quads<8>(from, row_bytes) : quads<16>(from + u * 16 % t.bytes[p], row_bytes);
    }
    fields(quads<N>(row + u * N, row_bytes), bits, t, u, out);
  }
  template <int M> KV_INLINE __m512i quads(const uint8_t* p, int64_t row_bytes) {  // M bytes of four rows, again and again
    alignas(64) static constexpr struct By { uint8_t v[64]; constexpr By() : v() { for (int i = 0; i < 64; i++) v[i] = (uint8_t)(i % 4 * 16 + i / 4 % M); } } by;
    __m128i x[4];
    for (int i = 0; i < 4; i++, p += row_bytes) {
      int32_t four;
      if (M == 4) std::memcpy(&four, p, 4);
      x[i] = M == 16 ? load_bytes(p).a : M == 8 ? load_eight(p).a : _mm_cvtsi32_si128(four);
    }
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(x[0]), x[1], 1), high = _mm256_inserti128_si256(_mm256_castsi128_si256(x[2]), x[3], 1);
    return _mm512_permutexvar_epi8(_mm512_load_si512(by.v), _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
  }
  KV_INLINE void fields(__m512i wide, const __m512i* bits, const Narrow& t, int u, Index* out) {
    if constexpr (N < 16) {
      alignas(64) static constexpr struct By { int32_t v[16]; constexpr By() : v() { for (int l = 0; l < 16; l++) v[l] = P::W * (l / N); } } by;
      wide = _mm512_srlv_epi32(wide, _mm512_load_si512(by.v));
    }
    for (int i = 0; i < SLOTS; i++) {
      out[i].a = i ? _mm512_srli_epi32(wide, P::W * (16 / N) * i) : wide;
      int have = P::W;
      for (int p = 0; p < PLANES; p++) {  // the bits that there are, and above them the plane's
        const __m512i more = _mm512_rorv_epi32(bits[p], _mm512_load_si512(t.turn[p][u * SLOTS + i]));
        out[i].a = _mm512_ternarylogic_epi32(out[i].a, more, _mm512_set1_epi8((1 << have) - 1), 0xE4);
        have += P::REST == 1 || p ? 1 : 2;
      }
    }
  }
  KV_INLINE __m512i plane(const uint8_t* from, const Narrow& t, int p, int u) {
    const int m = t.bytes[p];
    if (N == 16 && m % 16 == 0) return spread<16>(from + u * 16 % m).a;
    if (N >= 8 && m == 8) return spread<8>(from).a;
    if (N >= 4 && m == 4) return spread<4>(from).a;
    if (m > 64) {
      alignas(64) int32_t b[16];
      for (int l = 0; l < 16; l++) b[l] = from[t.at[p][u][l]];
      return _mm512_load_si512(b);
    }
    const __m512i all = _mm512_maskz_loadu_epi8(~0ull >> (64 - m), from);
    return _mm512_permutexvar_epi8(_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)t.at[p][u])), all);
  }
};

// Sixteen rows of BYTES as columns of four bytes: lane l is row l.
template <int BYTES> KV_INLINE void columns(const uint8_t* row, int64_t row_bytes, Index* out) {
  const auto four = [](__m512i* x) {  // rows of four columns -> columns of four rows, in each quarter
    __m512i y[4];
    for (int k = 0; k < 4; k += 2) y[k] = _mm512_unpacklo_epi32(x[k], x[k + 1]), y[k + 1] = _mm512_unpackhi_epi32(x[k], x[k + 1]);
    for (int k = 0; k < 2; k++) x[2 * k] = _mm512_unpacklo_epi64(y[k], y[k + 2]), x[2 * k + 1] = _mm512_unpackhi_epi64(y[k], y[k + 2]);
  };
  if constexpr (BYTES == 32) {
    __m512i x[8];
    for (int i = 0; i < 8; i++) {  // two rows that are four apart
      const uint8_t* p = row + (i % 4 + i / 4 * 8) * row_bytes;
      x[i] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)p)), _mm256_loadu_si256((const __m256i*)(p + 4 * row_bytes)), 1);
    }
    four(x), four(x + 4);
    for (int c = 0; c < 4; c++) out[c].a = _mm512_shuffle_i32x4(x[c], x[4 + c], 0x88), out[c + 4].a = _mm512_shuffle_i32x4(x[c], x[4 + c], 0xDD);
  } else {
    __m512i x[4];
    for (int i = 0; i < 4; i++) {
      __m128i part[4];
      for (int k = 0; k < 4; k++) {
        const uint8_t* p = row + (i + 4 * k) * row_bytes;
        part[k] = BYTES == 16 ? _mm_loadu_si128((const __m128i*)p) : _mm_loadl_epi64((const __m128i*)p);
      }
      const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(part[0]), part[1], 1), high = _mm256_inserti128_si256(_mm256_castsi128_si256(part[2]), part[3], 1);
      x[i] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    }
    four(x);
    for (int c = 0; c < BYTES / 4; c++) out[c].a = x[c];
  }
}
KV_INLINE __m512i shifted(Index x, int by) { return by > 0 ? _mm512_srli_epi32(x.a, by) : by ? _mm512_slli_epi32(x.a, -by) : x.a; }

template <int BITS, bool UNIFORM> struct Numbers {  // of codes
  X t[2];
  const float* table;
  float mid;
  explicit Numbers(const kv_side& s) : t{}, table(s.table), mid(s.mid) {
    float full[32];
    for (int i = 0; i < 32 && BITS <= 5; i++) full[i] = table[i & ((1 << BITS) - 1)];
    for (int i = 0; i < 2 && BITS <= 5; i++) t[i] = load(full + 16 * i);
  }
  KV_INLINE X look(const Numbers& n, Index c) {
    if constexpr (BITS <= 4) return {_mm512_permutexvar_ps(c.a, n.t[0].a)};
    if constexpr (BITS == 5) return {_mm512_permutex2var_ps(n.t[0].a, c.a, n.t[1].a)};
    const __m512i code = _mm512_and_si512(c.a, _mm512_set1_epi32((1 << BITS) - 1));
    if constexpr (UNIFORM) return sub({_mm512_cvtepi32_ps(code)}, set1(n.mid));
    return {_mm512_i32gather_ps(code, n.table, 4)};
  }
};

template <int BITS, bool UNIFORM> struct Codes final : Decoder {
  using P = Bits<BITS>;
  const int unit, packs, units, slots;  // bytes of a unit; packed rows of a row, units of each; slots of a row
  const int64_t row_bytes, pack_bytes;
  const Numbers<BITS, UNIFORM> numbers;
  Narrow narrow;
  alignas(64) uint8_t as_byte[64];
  Codes(const kv_side& s, Wanted wanted)
      : unit(unit_size(s)), packs(s.width / s.pack), units(s.pack * P::W / 8 / unit), slots(s.slots), row_bytes(s.row_bytes),
        pack_bytes(s.pack * BITS / 8), numbers(s) {
    if (P::REST) narrow_of<BITS>(s, narrow);
    if (wanted == UNSIGNED ? by_tokens() : wanted == SIGNED && by_fours()) take_bytes(s, wanted);
  }

  template <int N, class F> void each(const uint8_t* row, int n, F f) const {  // f(slots of a unit)
    for (int t = 0; t < n; t++, row += row_bytes)
      for (int g = 0; g < packs; g++)
        for (int u = 0; u < units; u++) {
          Index c[slots_of_unit<BITS, N>];
          Unpack<BITS, N>::unit(row + g * pack_bytes, narrow, u, c);
          f(c);
        }
  }
  template <class F> KV_INLINE void by_unit(int unit, F f) {  // f(its number of bytes, as a type)
    if (unit == 16) return f(std::integral_constant<int, 16>());
    if (unit == 8) return f(std::integral_constant<int, 8>());
    if (unit == 4) return f(std::integral_constant<int, 4>());
    unit == 2 ? f(std::integral_constant<int, 2>()) : f(std::integral_constant<int, 1>());
  }
  void rows(const uint8_t* row, int n, float* out) const override {
    by_unit(unit, [&](auto N) {
      const auto numbers = this->numbers;  // a copy: it stays in registers while floats are stored
      each<N>(row, n, [&](const Index* c) {
        for (int i = 0; i < slots_of_unit<BITS, N>; i++, out += 16) store(out, Numbers<BITS, UNIFORM>::look(numbers, c[i]));
      });
    });
  }

  static constexpr bool DIRECT = BITS <= 5, TOKENS_TOO = DIRECT && P::W >= 2;  // else a table is too large, or a bit too small
  static constexpr int MOST = P::W == 1 ? 8 : 16;                              // bytes of a unit
  // Which rows are read sixteen at a time, a token in each lane; and which ones without a buffer.
  bool by_tokens() const { return TOKENS_TOO && packs == 1 && unit == 16 && slots % 4 == 0 && slots <= 8; }
  bool by_rows() const { return DIRECT && slots % 4 == 0 && unit >= MOST / 2; }
  bool by_fours() const {  // and whose narrower plane's bytes are in a unit's order
    return by_rows() && (!P::REST || (unit == 16 && (narrow.bytes[0] == 8 || narrow.bytes[0] % 16 == 0)) || (unit == 8 && narrow.bytes[0] == 4));
  }
  void take_bytes(const kv_side& s, Wanted wanted) {
    top = (1 << BITS) - 1, step = 1.f, low = -s.mid;
    uint8_t entry[32];
    for (int i = 0; i < 32; i++) entry[i] = (uint8_t)i;
    if (s.kind == KV_TABLE) table_bytes<BITS>(s.table, wanted, *this, entry);
    for (int i = 0; i < 64; i++) as_byte[i] = entry[i & (DIRECT ? (1 << BITS) - 1 : 31)];
  }

  template <int N> struct Place {  // of four slots of a row
    static constexpr int EACH = slots_of_unit<BITS, N>;
    int64_t pack[4 / EACH];
    int unit[4 / EACH];
    Place(const Codes& c, int first) {
      for (int i = 0; i < 4 / EACH; i++) {
        const int u = first / EACH + i, g = u / c.units;
        pack[i] = g * c.pack_bytes, unit[i] = u - g * c.units;
      }
    }
  };
  template <int N> struct Four {  // slots of a row, for direct.h
    const Codes& c;
    const Numbers<BITS, UNIFORM> numbers;
    Place<N> place(int first) const { return {c, first}; }
    KV_INLINE void get(const Four& s, const Place<N>& at, const uint8_t* row, X* x) {
      constexpr int each = Place<N>::EACH;
      KV_UNROLL(4)
      for (int i = 0; i < 4 / each; i++) {
        Index k[each];
        Unpack<BITS, N>::unit(row + at.pack[i], s.c.narrow, at.unit[i], k);
        for (int j = 0; j < each; j++) x[i * each + j] = Numbers<BITS, UNIFORM>::look(s.numbers, k[j]);
      }
    }
  };
  template <class F> bool direct(F f) const {
    if constexpr (DIRECT) return by_rows() && (unit == MOST ? f(Four<MOST>{*this, numbers}) : f(Four<MOST / 2>{*this, numbers}));
    return false;
  }
  bool dot(const float* q, int ldq, int R, const uint8_t* row, float* dots) const override {
    if constexpr (TOKENS_TOO) {
      if (by_tokens()) {
#define KV_CALL(N) by_token<N>(q, ldq, row, dots)
        KV_ROWS(R, KV_CALL)
#undef KV_CALL
        return true;
      }
    }
    return direct([&](auto four) { return dot16_direct(four, q, ldq, R, row, row_bytes, slots, dots), true; });
  }
  // The same with a token in each lane: no sum of lanes is left, and a query's channel is one number. Calls f(codes of four
  // channels of each token, a byte each, place of the first of them) four channels at a time.
  template <class F> KV_INLINE void each_four(const Codes& c, const uint8_t* row, F f) {
    constexpr int WIDE = 8 * P::W;  // bytes of 64 codes
    const int all = c.units * 16, few = c.slots * 2;  // bytes of the widest plane, of one bit a code
    Index wide[WIDE / 4], rest[4];
    if (P::REST && few == 8) columns<8>(row + all, c.row_bytes, rest);
    else if (P::REST) columns<16>(row + all, c.row_bytes, rest);
    for (int b = 0; b < all; b += 4) {
      if (b % WIDE == 0) columns<WIDE>(row + b, c.row_bytes, wide);
      const Index w = wide[b % WIDE / 4], more = P::REST ? Index{shifted(rest[b % few / 4], b / few)} : w;
      const int64_t at = b / 16 * 16 * P::PER + b % 16;
      KV_UNROLL(4)
      for (int i = 0; i < P::PER; i++) {
        Index k = {shifted(w, P::W * i)};
        if (P::REST) k.a = _mm512_ternarylogic_epi32(k.a, shifted(more, P::W * i - P::W), _mm512_set1_epi8((1 << P::W) - 1), 0xE4);
        f(k, at + 16 * i);
      }
    }
  }
  template <int R> void by_token(const float* q, int ldq, const uint8_t* row, float* dots) const {
    const auto numbers = this->numbers;
    const float* y[R];
    for (int r = 0; r < R; r++) y[r] = q + r * ldq;
    X sum[R][2];
    for (auto& s : sum) s[0] = s[1] = set1(0.f);
    each_four(*this, row, [&](Index four, int64_t at) {
      for (int i = 0; i < 4; i++) {
        const X x = Numbers<BITS, UNIFORM>::look(numbers, {shifted(four, 8 * i)});
        for (int r = 0; r < R; r++) sum[r][i % 2] = fma(x, set1(y[r][at + i]), sum[r][i % 2]);
      }
    });
    for (int r = 0; r < R; r++) store(dots + 16 * r, add(sum[r][0], sum[r][1]));
  }
  template <int R> void by_token8(const int8_t* q, int ldq, const uint8_t* row, float* sums) const {
    const __m512i entry = _mm512_load_si512(as_byte);
    const int8_t* y[R];
    for (int r = 0; r < R; r++) y[r] = q + r * ldq;
    __m512i sum[R];
    for (auto& s : sum) s = _mm512_setzero_si512();
    each_four(*this, row, [&](Index four, int64_t at) {
      const __m512i x = _mm512_permutexvar_epi8(four.a, entry);
      for (int r = 0; r < R; r++) {
        int32_t asked;
        std::memcpy(&asked, y[r] + at, 4);
        sum[r] = _mm512_dpbusd_epi32(sum[r], x, _mm512_set1_epi32(asked));
      }
    });
    for (int r = 0; r < R; r++) store(sums + 16 * r, {_mm512_cvtepi32_ps(sum[r])});
  }
  void dot8(const int8_t* q, int ldq, int R, const uint8_t* row, float* sums) const override {
    if constexpr (TOKENS_TOO) {
#define KV_CALL(N) by_token8<N>(q, ldq, row, sums)
      KV_ROWS(R, KV_CALL)
#undef KV_CALL
    }
  }
  bool mix(const Weights<float>& w, int R, const uint8_t* row, int n, float* acc, int lda) const override {
    return direct([&](auto four) { return mix_direct(four, w, R, row, row_bytes, n, slots, acc, lda); });
  }
  // Four tokens at a time, a byte of each in a channel's lane.
  template <int N, int R> void mix8_rows(const Weights<uint8_t>& w, const Weights<float>& by, const uint8_t* row, int n, int first, float* acc, int lda) const {
    constexpr int each = Place<N>::EACH;
    const Place<N> at(*this, first);
    const __m512i entry = _mm512_load_si512(as_byte);
    const int32_t* of = w.of + 16 * first;
    const uint8_t* p[4];
    for (int s = 0; s < 4; s++) p[s] = w.p + (int64_t)of[16 * s] * w.group;
    const int64_t next = w.row;
    __m512i sum[R][4];
    for (auto& s : sum) for (auto& x : s) x = _mm512_setzero_si512();
    for (int64_t t = 0; t < n; t += 4, row += 4 * row_bytes)
      KV_UNROLL(4)
      for (int i = 0; i < 4 / each; i++) {
        Index k[each];
        Unpack<BITS, N>::four(row + at.pack[i], row_bytes, narrow, at.unit[i], k);
        KV_UNROLL(4)
        for (int s = i * each; s < i * each + each; s++) {
          const __m512i x = _mm512_permutexvar_epi8(k[s - i * each].a, entry);
          for (int r = 0; r < R; r++) {
            int32_t four;
            std::memcpy(&four, p[s] + r * next + t, 4);
            sum[r][s] = _mm512_dpbusd_epi32(sum[r][s], _mm512_set1_epi32(four), x);
          }
        }
      }
    for (int r = 0; r < R; r++)
      for (int s = 0; s < 4; s++) {
        float* to = acc + r * lda + 16 * s;
        store(to, fma({_mm512_cvtepi32_ps(sum[r][s])}, set1(by.p[r * by.row + of[16 * s] * by.group]), load(to)));
      }
  }
  void mix8(const Weights<uint8_t>& w, const Weights<float>& by, int R, const uint8_t* row, int n, float* acc, int lda) const override {
    if constexpr (DIRECT) {
      for (int s = 0; s < slots; s += 4) {
#define KV_CALL(M) unit == MOST ? mix8_rows<MOST, M>(w, by, row, n, s, acc + 16 * s, lda) : mix8_rows<MOST / 2, M>(w, by, row, n, s, acc + 16 * s, lda)
        KV_ROWS(R, KV_CALL)
#undef KV_CALL
      }
    }
  }
};
}  // namespace
