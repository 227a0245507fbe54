// Weighted sums of codes whose tokens lie beside each other: a register holds the widest plane of one, two or four of them as
// it lies in memory, sixteen words, and is shifted for every field of a word; nothing is spread over lanes. Each lane
// multiplies by its token's weight, and lanes of different tokens meet once, at the end.
#pragma once
#include <type_traits>

#include "units.h"

namespace {
template <int BITS> struct Beside {
  using P = Bits<BITS>;
  int tokens = 0;            // in a register; 0: rows do not fit
  int64_t bytes = 0, step;   // of a register; from one to the next
  int units = 0;             // of sixteen bytes, of a row
  alignas(64) int32_t seat[16][16];                    // of a register of sixteen tokens: whose weight a lane takes
  alignas(64) int32_t wide[16], narrow[16], turn[16];  // its words of both planes, and how far the narrow ones are turned

  explicit Beside(const kv_side& s) {
    const int own = s.pack * P::W / 8, row = s.width / s.pack * own, all = s.pack * BITS / 8;
    units = row / 16;
    if (BITS < 2 || BITS > 5 || own % 16 || (units > 4 && (units % 4 || P::REST))) return;
    const int t = units == 1 ? 4 : units == 2 ? 2 : 1;
    if (P::REST && t * s.row_bytes > 128) return;
    tokens = t, step = t * s.row_bytes, bytes = units > 4 ? 64 : step;
    const int m = s.pack / 8, words = f_min(row / 4, 16), second = f_max((int)bytes / 4 - 16, 0);
    const auto of_two = [&](int word) { return word < 16 ? word : word - second + 16; };  // loads of sixteen words
    for (int l = 0; l < 16; l++) {
      for (int i = 0; i < 16; i++) seat[i][l] = i * t + l * t / 16;
      const int in = l % words * 4, at = (l / words * (int)s.row_bytes + in / own * all) / 4;
      wide[l] = l < t * words ? of_two(at + in % own / 4) : 0;
      narrow[l] = l < t * words ? of_two(at + (own + in % own % m) / 4) : 0;
      turn[l] = in % own / m;
    }
  }

  // Both planes in one: words whose fields lie four bits apart (3 bits) or eight (5), every second field in either half.
  static constexpr int REGISTERS = 64, HALF = REGISTERS * 64;  // of each half: they stay in the first-level cache
  struct Merged {
    alignas(64) uint8_t half[2][P::REST ? HALF : 64];
    int64_t token[REGISTERS * 4 / 16];
  };
  static void merge(const Beside& b, const Stored& rows, int64_t n, Merged& to) {
    const __m512i wide = _mm512_load_si512(b.wide), narrow = _mm512_load_si512(b.narrow), turn = _mm512_load_si512(b.turn);
    const __m512i low = _mm512_set1_epi8(P::W == 4 ? 0x0F : 0x33);
    const __mmask16 some = words(b);
    const int64_t rest = b.bytes > 64 ? b.bytes - 64 : 0;
    for (int64_t t = 0, at = 0; t < n;) {
      const uint8_t* row = Stored::row(rows, (int)t);
      to.token[t / 16] = t;
      for (const int64_t end = t + 16; t < end; t += b.tokens, row += b.step, at += 64) {
        const __m512i x = _mm512_maskz_loadu_epi32(some, row), y = _mm512_maskz_loadu_epi32(some, row + rest);
        const __m512i w = _mm512_permutex2var_epi32(x, wide, y), v = _mm512_rorv_epi32(_mm512_permutex2var_epi32(x, narrow, y), turn);
        _mm512_store_si512(to.half[0] + at, _mm512_ternarylogic_epi32(w, _mm512_slli_epi32(v, P::W), low, 0xE4));
        _mm512_store_si512(to.half[1] + at, _mm512_ternarylogic_epi32(_mm512_srli_epi32(w, P::W), v, low, 0xE4));
      }
    }
  }
  KV_INLINE __mmask16 words(const Beside& b) { return (__mmask16)((1u << (b.bytes < 64 ? b.bytes / 4 : 16)) - 1); }

  // Four words' fields by byte, of up to four units -> slots.
  static void slots(const float (*sums)[16], int tokens, X* out) {
    const X a[4] = {load(sums[0]), load(sums[1]), load(sums[2]), load(sums[3])};
    const auto pick = [](X x, X y, auto how) { return X{_mm512_shuffle_f32x4(x.a, y.a, decltype(how)::value)}; };
    using Low = std::integral_constant<int, 0x44>; using High = std::integral_constant<int, 0xEE>;
    using Even = std::integral_constant<int, 0x88>; using Odd = std::integral_constant<int, 0xDD>;
    if (tokens == 4) { out[0] = fold(a[0], a[1], a[2], a[3]); return; }
    const X low[2] = {pick(a[0], a[1], Low()), pick(a[2], a[3], Low())}, high[2] = {pick(a[0], a[1], High()), pick(a[2], a[3], High())};
    if (tokens == 2) {
      const X x = add(low[0], high[0]), y = add(low[1], high[1]);
      out[0] = pick(x, y, Even()), out[1] = pick(x, y, Odd());
      return;
    }
    out[0] = pick(low[0], low[1], Even()), out[1] = pick(low[0], low[1], Odd());
    out[2] = pick(high[0], high[1], Even()), out[3] = pick(high[0], high[1], Odd());
  }

  // K fields of a byte, the first of them FIELD, of four units from `first` on.
  template <int R, int K, int FIELD, bool ONE, class N> static void some(const Beside& b, const N& numbers, const Weights<float>& w, const Stored& rows, int64_t n, int first, float* acc, int lda) {
    constexpr int BIT = BITS == 5 ? 0 : BITS == 3 ? FIELD / 2 * 4 : P::W * FIELD, NEXT = BITS == 5 ? 0 : 4, FIELDS = 4 / P::W;
    const auto table = numbers;
    const __mmask16 mask = words(b);
    const int64_t next = w.row, step = P::REST ? 64 : b.step, each = 16 / b.tokens;
    const float* p[K];
    for (int k = 0; k < K; k++) p[k] = w.p + (int64_t)w.of[16 * (first * P::PER + FIELD + k * FIELDS)] * w.group;
    X o[R][K][4];
    for (auto& r : o) for (auto& k : r) for (auto& x : k) x = set1(0.f);
    for (int64_t t = 0; t < n; t += 16) {
      const uint8_t* row = Stored::row(rows, (int)t) + first * 16;
      for (int64_t i = 0; i < each; i++, row += step) {
        const __m512i at = _mm512_load_si512(b.seat[i]);
        __m512i word;
        X by[R];
        KV_UNROLL(2)
        for (int k = 0; k < K; k++) {
          if (!k || BITS == 5) word = _mm512_maskz_loadu_epi32(mask, row + k * HALF);
          if (!k || !ONE) for (int r = 0; r < R; r++) by[r].a = _mm512_permutexvar_ps(at, _mm512_loadu_ps(p[k] + r * next + t));
          KV_UNROLL(4)
          for (int j = 0; j < 4; j++) {
            const X v = N::look(table, {shifted({word}, 8 * j + BIT + NEXT * k)});
            for (int r = 0; r < R; r++) o[r][k][j] = fma(v, by[r], o[r][k][j]);
          }
        }
      }
    }
    alignas(64) float sums[R][K][4][16];  // the compiler keeps o in registers if it is read nowhere else
    for (int r = 0; r < R; r++)
      for (int k = 0; k < K; k++)
        for (int j = 0; j < 4; j++) store(sums[r][k][j], o[r][k][j]);
    for (int r = 0; r < R; r++)
      for (int k = 0; k < K; k++) {
        X out[4];
        slots(sums[r][k], b.tokens, out);
        for (int u = 0; u < f_min(b.units - first, 4); u++) {
          float* to = acc + r * lda + 16 * ((first + u) * P::PER + FIELD + k * FIELDS);
          store(to, add(load(to), out[u]));
        }
      }
  }
  // acc [R] += w times n tokens, a multiple of 16. False: not done.
  template <int R, class N> static bool mix(const Beside& b, const N& numbers, const Weights<float>& w, const Stored& rows, int64_t n, float* acc, int lda) {
    constexpr int K = R < 4 ? 2 : 1;
    for (int s = 0; w.group && s < b.units * P::PER; s++)  // a lane's weight is its token's: units may not differ
      if (w.of[16 * s] != w.of[16 * (s % P::PER)]) return false;
    if (!b.tokens) return false;
    Merged merged;
    const int64_t most = P::REST ? REGISTERS * b.tokens : n;
    for (int64_t t = 0; t < n; t += most) {
      const int64_t m = n - t < most ? n - t : most;
      Weights<float> weights = w;
      weights.p += t;
      const Stored here{rows.codes, rows.token + t / 16, rows.row_bytes};
      if (P::REST) merge(b, here, m, merged);
      const auto one = [&](auto field, int first) {
        constexpr int FIELD = decltype(field)::value;
        if constexpr (FIELD < (K == 2 ? 4 / P::W : P::PER)) {
          const Stored from = P::REST ? Stored{merged.half[BITS == 5 ? FIELD : FIELD % 2], merged.token, 64 / b.tokens} : here;
          w.group ? some<R, K, FIELD, false>(b, numbers, weights, from, m, first, acc, lda) : some<R, K, FIELD, true>(b, numbers, weights, from, m, first, acc, lda);
        }
      };
      for (int first = 0; first < b.units; first += 4)
        one(std::integral_constant<int, 0>(), first), one(std::integral_constant<int, 1>(), first), one(std::integral_constant<int, 2>(), first), one(std::integral_constant<int, 3>(), first);
    }
    return true;
  }
};
}  // namespace
