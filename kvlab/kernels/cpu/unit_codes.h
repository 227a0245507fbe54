// Decoders of codes for AVX-512: numbers by a permute of up to 32 table entries, scores and sums straight from the units.
#pragma once
#include <type_traits>

#include "beside.h"
#include "direct.h"

namespace {
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
  Beside<BITS> beside;
  alignas(64) uint8_t as_byte[64];
  Codes(const kv_side& s, Wanted wanted)
      : unit(unit_size(s)), packs(s.width / s.pack), units(s.pack * P::W / 8 / unit), slots(s.slots), row_bytes(s.row_bytes),
        pack_bytes(s.pack * BITS / 8), numbers(s), beside(s) {
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
  bool by_tokens() const {
    return TOKENS_TOO && packs == 1 && unit == 16 && (P::REST ? slots == 4 || slots == 8 : slots % 4 == 0 || slots == 2);
  }
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
  bool dot(const float* q, int ldq, int R, const Stored& from, const Soon*, int n, float* dots, int ld) const override {
    if constexpr (TOKENS_TOO) {
#define KV_CALL(N) by_token<N>(q, ldq, from, n, dots, ld)
      if (by_tokens()) KV_ROWS(R, KV_CALL)
#undef KV_CALL
    }
    return by_tokens();
  }
  // With a token in each lane no sum of lanes is left, and a query's channel is one number. Words are turned a piece of a row
  // ahead of their products, which would wait for them. Calls f(codes of four channels of each token, a byte each, their
  // slot's first lane, which word of it they are) for all channels of sixteen tokens, then done(the first of them).
  static constexpr int HALVES = BITS == 4 ? 1 : 2, APART = BITS == 5 ? 1 : 2, WIDE = 8 * P::W;  // WIDE: bytes of 64 codes
  struct Piece { Index word[WIDE / 4][P::REST ? 2 : 1]; };
  KV_INLINE void turn(const uint8_t* row, int64_t row_bytes, int b, int all, int few, Index* rest, Piece& to) {
    Index wide[WIDE / 4];
    if (P::REST && !b) few == 8 ? columns<8>(row + all, row_bytes, rest) : columns<16>(row + all, row_bytes, rest);
    WIDE == 32 && all == 16 ? columns<16>(row, row_bytes, wide) : columns<WIDE>(row + b, row_bytes, wide);  // 32 codes may be all there are
    KV_UNROLL(8)
    for (int c = 0; c < WIDE / 4; c++) {
      to.word[c][0] = wide[c];
      if (!P::REST) continue;
      const __m512i low = _mm512_set1_epi8(P::W == 4 ? 0x0F : 0x33), more = _mm512_srl_epi32(rest[(b / 4 + c) % (few / 4)].a, _mm_cvtsi32_si128((b + 4 * c) / few));
      to.word[c][0].a = _mm512_ternarylogic_epi32(wide[c].a, _mm512_slli_epi32(more, P::W), low, 0xE4);
      to.word[c][P::REST ? 1 : 0].a = _mm512_ternarylogic_epi32(_mm512_srli_epi32(wide[c].a, P::W), more, low, 0xE4);
    }
  }
  template <class F, class E> KV_INLINE void each_four(const Codes& c, const Stored& from, int n, F f, E done) {
    const int all = c.units * 16, few = c.slots * 2, piece = f_min(all, WIDE);  // bytes of the widest plane, of the narrow one
    const int64_t row_bytes = c.row_bytes;
    Index rest[4];
    Piece pieces[2];
    turn(Stored::row(from, 0), row_bytes, 0, all, few, rest, pieces[0]);
    int now = 0;
    for (int t = 0; t < n; done(t), t += 16)
      for (int b = 0; b < all; b += piece, now ^= 1) {
        const bool last = b + piece == all;
        if (!last || t + 16 < n) turn(Stored::row(from, last ? t + 16 : t), row_bytes, last ? 0 : b + piece, all, few, rest, pieces[now ^ 1]);
        for (int64_t at = b; at < b + piece; at += 4) {
          const Index* word = pieces[now].word[(at - b) / 4];
          const int64_t slot = at / 16 * 16 * P::PER, which = at % 16 / 4;
          KV_UNROLL(2)
          for (int h = 0; h < HALVES; h++)
            KV_UNROLL(2)
            for (int k = 0; k < APART; k++) f(Index{shifted(word[P::REST ? h : 0], 4 * k + (P::REST ? 0 : P::W * h))}, slot + 16 * (h + k * 4 / P::W), which);
        }
      }
  }
  template <int R> void by_token(const float* q, int ldq, const Stored& from, int n, float* dots, int ld) const {
    const auto numbers = this->numbers;
    const float* y[R];
    for (int r = 0; r < R; r++) y[r] = q + r * ldq;
    constexpr int SUMS = BITS == 5 ? 2 : 4;  // of a query
    X sum[R][SUMS];
    for (auto& s : sum) for (auto& x : s) x = set1(0.f);
    each_four(*this, from, n, [&](Index four, int64_t at, int64_t word) {
      KV_UNROLL(4)
      for (int i = 0; i < 4; i++) {
        const X x = Numbers<BITS, UNIFORM>::look(numbers, {shifted(four, 8 * i)});
        for (int r = 0; r < R; r++) sum[r][i % SUMS] = fma(x, set1(y[r][at + word + 4 * i]), sum[r][i % SUMS]);
      }
    }, [&](int t) {
      for (int r = 0; r < R; r++) {
        store(dots + r * ld + t, SUMS == 2 ? add(sum[r][0], sum[r][1]) : add(add(sum[r][0], sum[r][1]), add(sum[r][SUMS - 2], sum[r][SUMS - 1])));
        for (auto& x : sum[r]) x = set1(0.f);
      }
    });
  }
  template <int R> void by_token8(const int8_t* q, int ldq, const Stored& from, int n, float* sums, int ld) const {
    const __m512i entry = _mm512_load_si512(as_byte);
    const int8_t* y[R];
    for (int r = 0; r < R; r++) y[r] = q + r * ldq;
    __m512i sum[R];
    for (auto& s : sum) s = _mm512_setzero_si512();
    each_four(*this, from, n, [&](Index four, int64_t at, int64_t word) {
      const __m512i x = _mm512_permutexvar_epi8(four.a, entry);
      for (int r = 0; r < R; r++) {
        int32_t asked;
        std::memcpy(&asked, y[r] + at + 4 * word, 4);
        sum[r] = _mm512_dpbusd_epi32(sum[r], x, _mm512_set1_epi32(asked));
      }
    }, [&](int t) {
      for (int r = 0; r < R; r++) store(sums + r * ld + t, {_mm512_cvtepi32_ps(sum[r])}), sum[r] = _mm512_setzero_si512();
    });
  }
  void dot8(const int8_t* q, int ldq, int R, const Stored& from, int n, float* sums, int ld) const override {
    if constexpr (TOKENS_TOO) {
#define KV_CALL(N) by_token8<N>(q, ldq, from, n, sums, ld)
      KV_ROWS(R, KV_CALL)
#undef KV_CALL
    }
  }
  bool mix(const Weights<float>& w, int R, const Stored& rows, int from, int to, float* acc, int lda) const override {
    const auto with = [&](const auto& four) { mix_direct(four, w, R, rows, from, to, slots, acc, lda); };
    if constexpr (TOKENS_TOO) {
      bool done = false;
#define KV_CALL(N) done = Beside<BITS>::template mix<N>(beside, numbers, w, rows, (to + 15) & ~15, acc, lda)
      if (beside.tokens) KV_ROWS(R, KV_CALL)
#undef KV_CALL
      if (done) return true;
    }
    if constexpr (DIRECT) {
      if (by_rows()) unit == MOST ? with(Four<MOST>{*this, numbers}) : with(Four<MOST / 2>{*this, numbers});
    }
    return by_rows();
  }
  // Four tokens at a time, a byte of each in a channel's lane.
  template <int N, int R> void mix8_rows(const Weights<uint8_t>& w, const Weights<float>& by, const Stored& from, int n, int first, float* acc, int lda) const {
    constexpr int each = Place<N>::EACH;
    const Place<N> at(*this, first);
    const __m512i entry = _mm512_load_si512(as_byte);
    const int32_t* of = w.of + 16 * first;
    const uint8_t* p[4];
    for (int s = 0; s < 4; s++) p[s] = w.p + (int64_t)of[16 * s] * w.group;
    const int64_t next = w.row;
    X o[R][4];
    for (int r = 0; r < R; r++)
      for (int s = 0; s < 4; s++) o[r][s] = load(acc + r * lda + 16 * s);
    for (int64_t t = 0; t < n;) {
      const float* step = by.p + t / TOKENS;
      __m512i sum[R][4];
      for (auto& s : sum) for (auto& x : s) x = _mm512_setzero_si512();
      for (const int64_t end = f_min((int)t + TOKENS, n); t < end;) {
        const uint8_t* row = Stored::row(from, (int)t);
        for (const int64_t stop = t + 16; t < stop; t += 4, row += 4 * row_bytes)
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
      }
      for (int r = 0; r < R; r++)
        for (int s = 0; s < 4; s++) o[r][s] = fma({_mm512_cvtepi32_ps(sum[r][s])}, set1(step[r * by.row + of[16 * s] * by.group]), o[r][s]);
    }
    for (int r = 0; r < R; r++)
      for (int s = 0; s < 4; s++) store(acc + r * lda + 16 * s, o[r][s]);
  }
  void mix8(const Weights<uint8_t>& w, const Weights<float>& by, int R, const Stored& from, int n, float* acc, int lda) const override {
    if constexpr (DIRECT) {
      for (int s = 0; s < slots; s += 4) {
#define KV_CALL(M) unit == MOST ? mix8_rows<MOST, M>(w, by, from, n, s, acc + 16 * s, lda) : mix8_rows<MOST / 2, M>(w, by, from, n, s, acc + 16 * s, lda)
        KV_ROWS(R, KV_CALL)
#undef KV_CALL
      }
    }
  }
};
}  // namespace
