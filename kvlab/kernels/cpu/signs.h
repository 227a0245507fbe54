// Scores of keys of one bit a channel: two bits of a row choose one of four sums of two channels, made once a split, or
// with AVX-512 four bits one of sixteen sums of four channels.
// Sixteen tokens at a time; no bit becomes a float.
#pragma once
#include "sums.h"

namespace {
#if KV_AVX512
constexpr int SOME = 4;  // bits at once
struct Words { __m512i a; };  // of sixteen tokens
KV_INLINE Words next_bits(Words w) { return {_mm512_srli_epi32(w.a, SOME)}; }
KV_INLINE X pick(const float* sums, Words w) { return {_mm512_permutexvar_ps(w.a, _mm512_load_ps(sums))}; }  // by the lowest bits
KV_INLINE Words words(const uint32_t* w) { return {_mm512_loadu_si512(w)}; }
KV_INLINE int two_words(const uint8_t* p, Words* w) {  // of sixteen rows of eight bytes
  const __m512i x = _mm512_loadu_si512(p), y = _mm512_loadu_si512(p + 64);
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  w[0].a = _mm512_permutex2var_epi32(x, even, y), w[1].a = _mm512_permutex2var_epi32(x, _mm512_add_epi32(even, _mm512_set1_epi32(1)), y);
  return 2;
}
#elif KV_AVX2
constexpr int SOME = 2;
struct Words { __m256i a, b; };
KV_INLINE Words next_bits(Words w) { return {_mm256_srli_epi32(w.a, 2), _mm256_srli_epi32(w.b, 2)}; }
KV_INLINE X pick(const float* sums, Words w) {
  const __m256 t = _mm256_broadcast_ps((const __m128*)sums);
  return {_mm256_permutevar_ps(t, w.a), _mm256_permutevar_ps(t, w.b)};
}
KV_INLINE Words words(const uint32_t* w) { return {_mm256_loadu_si256((const __m256i*)w), _mm256_loadu_si256((const __m256i*)(w + 8))}; }
KV_INLINE int two_words(const uint8_t* p, Words* w) {  // of sixteen rows of eight bytes
  const auto half = [&](const uint8_t* p, __m256i* first, __m256i* second) {
    const __m256 x = _mm256_loadu_ps((const float*)p), y = _mm256_loadu_ps((const float*)(p + 32));
    *first = _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(x, y, 0x88)), 0xD8);
    *second = _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(x, y, 0xDD)), 0xD8);
  };
  half(p, &w[0].a, &w[1].a), half(p + 64, &w[0].b, &w[1].b);
  return 2;
}
#else
constexpr int SOME = 2;
struct Words { uint32_t v[16]; };
KV_INLINE Words next_bits(Words w) { KV_EACH w.v[i] >>= 2; return w; }
KV_INLINE X pick(const float* sums, Words w) { X r; KV_EACH r.v[i] = sums[w.v[i] & 3]; return r; }
KV_INLINE Words words(const uint32_t* w) { Words r; std::memcpy(r.v, w, 64); return r; }
KV_INLINE int two_words(const uint8_t* p, Words* w) {
  for (int i = 0; i < 32; i++) std::memcpy(w[i % 2].v + i / 2, p + 4 * i, 4);
  return 2;
}
#endif

struct Signs {
  static constexpr int EACH = 32 / SOME, SUMS = 1 << SOME;  // of a word; of those channels
  alignas(64) float sum[16 * EACH][MAX_R][SUMS];
  static bool takes(const kv_side& s, const Lanes& of) {
    return is_codes(s) && s.bits == 1 && s.width % 16 == 0 && of.parts == 1 && (folds(s) || s.axis == KV_NONE);
  }
  // Queries q [R] in slot order. Bit i of byte j of a packed row of nb bytes is channel i * nb + j.
  void take(const kv_side& s, const float* q, int ldq, int R) {
    const int nb = s.pack / 8;
    alignas(64) float by_bit[SOME][SUMS];
    for (int b = 0; b < SOME; b++)
      for (int i = 0; i < SUMS; i++) by_bit[b][i] = s.table[i >> b & 1];
    for (int r = 0; r < R; r++) {
      float by_channel[512];
      for (int c = 0; c < lanes(s); c++)
        if (s.channel[c] >= 0) by_channel[s.channel[c]] = q[r * ldq + c];
      int g = 0;
      for (const float* row = by_channel; row < by_channel + s.width; row += s.pack)
        for (int j = 0; j < nb; j++)
          for (const float* x = row + j; x < row + s.pack; x += SOME * nb, g++) {
            float all[SUMS] = {};
            KV_UNROLL(4)
            for (int b = 0; b < SOME; b++) {
              const float one = x[b * nb];
              for (int i = 0; i < SUMS; i++) all[i] += one * by_bit[b][i];
            }
            std::memcpy(sum[g][r], all, sizeof all);
          }
      for (; g % EACH; g++) std::memset(sum[g][r], 0, sizeof sum[g][r]);
    }
  }
  // dots [R][n] with the stored numbers of n tokens, a multiple of 16.
  template <int R> void dot(const kv_side& s, const Stored& from, int n, float* dots, int ld) const {
    for (int t = 0; t < n; t += 16) dot16<R>(s, Stored::row(from, t), dots + t, ld);
  }
  template <int R> void dot16(const kv_side& s, const uint8_t* row, float* dots, int ld) const {
    X a[R];
    for (auto& x : a) x = set1(0.f);
    const int bytes = s.width / 8;
    for (int j = 0, g = 0; j < bytes;) {
      Words w[2];
      const int more = bytes == 8 && s.row_bytes == 8 ? two_words(row, w) : one_word(row + j, s.row_bytes, bytes - j, w);
      for (int k = 0; k < more; k++, j += 4)
        for (int i = 0; i < EACH; i++, g++, w[k] = next_bits(w[k]))
          for (int r = 0; r < R; r++) a[r] = add(a[r], pick(sum[g][r], w[k]));
    }
    for (int r = 0; r < R; r++) store(dots + r * ld, a[r]);
  }
  static int one_word(const uint8_t* row, int64_t row_bytes, int left, Words* w) {  // of sixteen rows
    alignas(64) uint32_t v[16];
    for (int t = 0; t < 16; t++, row += row_bytes) {
      if (left >= 4) std::memcpy(v + t, row, 4);
      else v[t] = (uint32_t)(row[0] | row[1] << 8);
    }
    w[0] = words(v);
    return 1;
  }
};
}  // namespace
