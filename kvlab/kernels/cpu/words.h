// Products of int16, whose sums are exact in int32.
#pragma once
#include "simd.h"

namespace {
#if KV_AVX512
struct Sums { __m512i a; };   // sixteen int32
struct Words { __m512i a; };  // sixteen channels x two inputs, int16
KV_INLINE Sums no_sums() { return {_mm512_setzero_si512()}; }
KV_INLINE Words load_words(const int8_t* p) { return {_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p))}; }
KV_INLINE Sums add_products(Sums s, Words w, int32_t two) {
  return {_mm512_dpwssd_epi32(s.a, w.a, _mm512_set1_epi32(two))};
}
KV_INLINE X to_float(Sums s) { return {_mm512_cvtepi32_ps(s.a)}; }
KV_INLINE void store_words(int16_t* p, X x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x.a))); }
#elif KV_AVX2
struct Sums { __m256i a, b; };
struct Words { __m256i a, b; };
KV_INLINE Sums no_sums() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
KV_INLINE Words load_words(const int8_t* p) {
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(p + 16)))};
}
KV_INLINE Sums add_products(Sums s, Words w, int32_t two) {
  const __m256i x = _mm256_set1_epi32(two);
  return {_mm256_add_epi32(s.a, _mm256_madd_epi16(w.a, x)), _mm256_add_epi32(s.b, _mm256_madd_epi16(w.b, x))};
}
KV_INLINE X to_float(Sums s) { return {_mm256_cvtepi32_ps(s.a), _mm256_cvtepi32_ps(s.b)}; }
KV_INLINE void store_words(int16_t* p, X x) {
  const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xD8));
}
#else
struct Sums { int32_t v[16]; };
struct Words { int16_t v[32]; };
KV_INLINE Sums no_sums() { return {}; }
KV_INLINE Words load_words(const int8_t* p) { Words r; for (int i = 0; i < 32; i++) r.v[i] = p[i]; return r; }
KV_INLINE Sums add_products(Sums s, Words w, int32_t two) {
  int16_t x[2];
  std::memcpy(x, &two, 4);
  for (int i = 0; i < 16; i++) s.v[i] += w.v[2 * i] * x[0] + w.v[2 * i + 1] * x[1];
  return s;
}
KV_INLINE X to_float(Sums s) { X r; for (int i = 0; i < 16; i++) r.v[i] = (float)s.v[i]; return r; }
KV_INLINE void store_words(int16_t* p, X x) {
  for (int i = 0; i < 16; i++) {
    const float v = std::nearbyint(x.v[i]);
    p[i] = (int16_t)(v != v ? 0.f : v < -32768.f ? -32768.f : v > 32767.f ? 32767.f : v);
  }
}
#endif

}  // namespace
