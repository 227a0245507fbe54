// Products of int16, whose sums are exact in int32: of matrices (Sums, Words) and of pages (Pairs, Row16).
#pragma once
#include "bytes.h"

namespace {
#if KV_AVX512
struct Sums { __m512i a; };   // sixteen int32
struct Words { __m512i a; };  // sixteen channels x two inputs, int16
KV_INLINE Sums no_sums() { return {_mm512_setzero_si512()}; }
KV_INLINE Words load_words(const int8_t* p) { return {_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p))}; }
KV_INLINE Sums add_products(Sums s, Words w, int32_t two) {
  return {_mm512_add_epi32(s.a, _mm512_madd_epi16(w.a, _mm512_set1_epi32(two)))};
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

// Row16: sixteen channels of one token. Pairs: eight sums, of two channels each (dot), or of one channel over two tokens.
#if KV_AVX512 || KV_AVX2
struct Row16 { __m256i a; };
struct Pairs { __m256i a; };
KV_INLINE Row16 load_row(const int16_t* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
KV_INLINE Row16 all_pairs(const int16_t* two) { int32_t v; std::memcpy(&v, two, 4); return {_mm256_set1_epi32(v)}; }
KV_INLINE Pairs no_pairs() { return {_mm256_setzero_si256()}; }
KV_INLINE Pairs add_pairs(Pairs s, Row16 x, Row16 y) { return {_mm256_add_epi32(s.a, _mm256_madd_epi16(x.a, y.a))}; }
KV_INLINE void interleave(Row16 x, Row16 y, Row16* out) { out[0].a = _mm256_unpacklo_epi16(x.a, y.a), out[1].a = _mm256_unpackhi_epi16(x.a, y.a); }
KV_INLINE void store_pairs(const Pairs* s, int32_t* out) {  // of interleaved rows, in channel order
  _mm256_storeu_si256((__m256i*)out, _mm256_permute2x128_si256(s[0].a, s[1].a, 0x20));
  _mm256_storeu_si256((__m256i*)(out + 8), _mm256_permute2x128_si256(s[0].a, s[1].a, 0x31));
}
KV_INLINE void sum16(const Pairs* x, float* out) {  // of each of sixteen
  for (int i = 0; i < 16; i += 8, x += 8) {
    __m256 s[8];
    for (int j = 0; j < 8; j++) s[j] = _mm256_cvtepi32_ps(x[j].a);
    _mm256_storeu_ps(out + i, eight_sums(s));
  }
}
#if KV_AVX512
KV_INLINE X from_int32(const int32_t* p) { return {_mm512_cvtepi32_ps(_mm512_loadu_si512(p))}; }
#else
KV_INLINE X from_int32(const int32_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i*)p)), _mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i*)(p + 8)))};
}
#endif
KV_INLINE void store_words(int16_t* out, __m256i low, __m256i high) {  // of two laced runs
  _mm256_storeu_si256((__m256i*)out, _mm256_permute4x64_epi64(_mm256_unpacklo_epi8(low, high), 0xD8));
  _mm256_storeu_si256((__m256i*)(out + 16), _mm256_permute4x64_epi64(_mm256_unpackhi_epi8(low, high), 0xD8));
}
KV_INLINE void store_codes(int16_t* out, Laced c) { store_words(out, c.a, _mm256_setzero_si256()); }
KV_INLINE void store_looked(int16_t* out, Bytes lo, Bytes hi, Laced c) {  // two bytes of each number
  store_words(out, _mm256_shuffle_epi8(twice(lo).a, c.a), _mm256_shuffle_epi8(twice(hi).a, c.a));
}
KV_INLINE void store_codes(int16_t* out, Bytes b) { _mm256_storeu_si256((__m256i*)out, _mm256_cvtepu8_epi16(b.a)); }
KV_INLINE void store_int8(int16_t* out, Bytes b) { _mm256_storeu_si256((__m256i*)out, _mm256_cvtepi8_epi16(b.a)); }
#else
struct Row16 { int16_t v[16]; };
struct Pairs { int32_t v[8]; };
KV_INLINE Row16 load_row(const int16_t* p) { Row16 r; std::memcpy(r.v, p, 32); return r; }
KV_INLINE Row16 all_pairs(const int16_t* two) { Row16 r; for (int i = 0; i < 16; i++) r.v[i] = two[i % 2]; return r; }
KV_INLINE Pairs no_pairs() { return {}; }
KV_INLINE Pairs add_pairs(Pairs s, Row16 x, Row16 y) {
  for (int i = 0; i < 8; i++) s.v[i] += x.v[2 * i] * y.v[2 * i] + x.v[2 * i + 1] * y.v[2 * i + 1];
  return s;
}
KV_INLINE void interleave(Row16 x, Row16 y, Row16* out) {
  for (int i = 0; i < 16; i++) out[i / 8].v[i % 8 * 2] = x.v[i], out[i / 8].v[i % 8 * 2 + 1] = y.v[i];
}
KV_INLINE void store_pairs(const Pairs* s, int32_t* out) { for (int i = 0; i < 16; i++) out[i] = s[i / 8].v[i % 8]; }
KV_INLINE void sum16(const Pairs* x, float* out) {
  for (int i = 0; i < 16; i++) {
    out[i] = 0.f;
    for (int j = 0; j < 8; j++) out[i] += (float)x[i].v[j];
  }
}
KV_INLINE X from_int32(const int32_t* p) { X r; for (int i = 0; i < 16; i++) r.v[i] = (float)p[i]; return r; }
KV_INLINE void store_codes(int16_t* out, Bytes b) { for (int i = 0; i < 16; i++) out[i] = b.v[i]; }
KV_INLINE void store_codes(int16_t* out, Laced c) {
  Bytes b[2];
  unlace(c, b);
  for (int x = 0; x < 2; x++) store_codes(out + 16 * x, b[x]);
}
KV_INLINE void store_looked(int16_t* out, Bytes lo, Bytes hi, Laced c) {
  Bytes b[2];
  unlace(c, b);
  for (int i = 0; i < 32; i++) out[i] = (int16_t)(lo.v[b[i / 16].v[i % 16] & 15] | hi.v[b[i / 16].v[i % 16] & 15] << 8);
}
KV_INLINE void store_int8(int16_t* out, Bytes b) { for (int i = 0; i < 16; i++) out[i] = (int8_t)b.v[i]; }
#endif

// x [n], n a multiple of 16, as integers up to `top`: x is about step * out, step NaN if a number is not finite. CARRY: what
// rounding takes from one number is added to the next but fifteen, so that sums of many small ones are kept too.
constexpr float TINY = 1e-30f;  // numbers below are taken for zeros: top / largest must be finite
template <bool CARRY> KV_INLINE float to_words(const float* x, int n, float top, int16_t* out) {
  X most = set1(0.f), odd = set1(0.f);
  for (int i = 0; i < n; i += 16) {
    const X v = load(x + i);
    most = max(most, max(v, sub(set1(0.f), v))), odd = fma(v, set1(0.f), odd);
  }
  const float largest = hmax(most), inverse = largest > TINY ? top / largest : 0.f;
  X left = set1(0.f);
  for (int i = 0; i < n; i += 16) {
    X v = mul(load(x + i), set1(inverse));
    if (CARRY) {
      v = add(v, left);
      const X whole = nearest(v);
      left = sub(v, whole), v = whole;
    }
    store_words(out + i, v);
  }
  return largest / top + hsum(odd);
}
}  // namespace
