// Bytes: sixteen of them, one unit of a page's row. Laced (not with AVX-512, units.h): two runs of sixteen codes at once, which
// become 32 floats in the order that unpacking costs nothing: every eight are four of the first run and the same four of the second.
#pragma once
#include "simd.h"

namespace {
// Lane l of float vector x (0, 1) made of two runs: which of the sixteen codes, of which run.
constexpr int laced_code(int x, int l) { return 8 * x + l / 8 * 4 + l % 4; }
constexpr int laced_run(int l) { return l % 8 / 4; }

#if KV_AVX512 || KV_AVX2
struct Bytes { __m128i a; };
KV_INLINE Bytes load_bytes(const uint8_t* p) { return {_mm_loadu_si128((const __m128i*)p)}; }
KV_INLINE Bytes load_eight(const uint8_t* p) { return {_mm_loadl_epi64((const __m128i*)p)}; }
KV_INLINE Bytes load_four(const uint8_t* p) { int32_t v; std::memcpy(&v, p, 4); return {_mm_cvtsi32_si128(v)}; }
#else
struct Bytes { uint8_t v[16]; };
KV_INLINE Bytes load_bytes(const uint8_t* p) { Bytes r; std::memcpy(r.v, p, 16); return r; }
KV_INLINE Bytes load_eight(const uint8_t* p) { Bytes r = {}; std::memcpy(r.v, p, 8); return r; }
#endif

#if KV_AVX2
struct Laced { __m256i a; };
KV_INLINE Laced both(Bytes a, Bytes b) { return {_mm256_inserti128_si256(_mm256_castsi128_si256(a.a), b.a, 1)}; }
KV_INLINE Laced twice(Bytes a) { return {_mm256_broadcastsi128_si256(a.a)}; }
KV_INLINE Laced load_both(const uint8_t* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
KV_INLINE void store_both(uint8_t* p, Laced b) { _mm256_storeu_si256((__m256i*)p, b.a); }
KV_INLINE Laced shuffle(Bytes table, Laced at) { return {_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table.a), at.a)}; }
KV_INLINE Laced shuffle32(Bytes lo, Bytes hi, Laced at) {  // of two halves, by bit 4
  const Laced low = {_mm256_and_si256(at.a, _mm256_set1_epi8(15))};
  return {_mm256_blendv_epi8(shuffle(lo, low).a, shuffle(hi, low).a, _mm256_slli_epi16(at.a, 3))};
}
template <int S, int T, int MASK>  // the first run's bytes >> S & MASK, the second's >> T & MASK
KV_INLINE Laced shift_mask(Laced b) {
  const __m256i x = S == T ? _mm256_srli_epi16(b.a, S) : _mm256_srlv_epi32(b.a, _mm256_setr_epi32(S, S, S, S, T, T, T, T));
  return {_mm256_and_si256(x, _mm256_set1_epi8((char)MASK))};
}
template <int SHIFT, int MASK>  // c | (b >> SHIFT & MASK), byte by byte; a negative shift goes to the left
KV_INLINE Laced or_bits(Laced c, Laced b) {
  const __m256i x = SHIFT < 0 ? _mm256_slli_epi16(b.a, SHIFT < 0 ? -SHIFT : 0) : _mm256_srli_epi16(b.a, SHIFT < 0 ? 0 : SHIFT);
  return {_mm256_or_si256(c.a, _mm256_and_si256(x, _mm256_set1_epi8((char)MASK)))};
}
KV_INLINE Laced all_four(const uint8_t* p) { int32_t v; std::memcpy(&v, p, 4); return {_mm256_set1_epi32(v)}; }
KV_INLINE Laced all_eight(const uint8_t* p) { int64_t v; std::memcpy(&v, p, 8); return {_mm256_set1_epi64x(v)}; }
// b >> by[l], by less than 8 and the same in each four bytes; what comes in at a byte's upper end is for the caller to mask.
KV_INLINE Laced shift_fours(Laced b, const uint8_t* by) {
  const __m256i one = _mm256_and_si256(_mm256_loadu_si256((const __m256i*)by), _mm256_set1_epi32(7));
  return {_mm256_srlv_epi32(b.a, one)};
}
KV_INLINE void unlace(Laced c, Bytes* out) {  // codes of each of the two float vectors, in its order
  const __m128i a = _mm256_castsi256_si128(c.a), b = _mm256_extracti128_si256(c.a, 1);
  out[0].a = _mm_unpacklo_epi32(a, b), out[1].a = _mm_unpackhi_epi32(a, b);
}
#elif !KV_AVX512
struct Laced { uint8_t v[32]; };  // the first run, the second
KV_INLINE Laced both(Bytes a, Bytes b) { Laced r; std::memcpy(r.v, a.v, 16), std::memcpy(r.v + 16, b.v, 16); return r; }
KV_INLINE Laced twice(Bytes a) { return both(a, a); }
KV_INLINE Laced load_both(const uint8_t* p) { Laced r; std::memcpy(r.v, p, 32); return r; }
KV_INLINE void store_both(uint8_t* p, Laced b) { std::memcpy(p, b.v, 32); }
KV_INLINE Laced shuffle(Bytes table, Laced at) { for (int i = 0; i < 32; i++) at.v[i] = table.v[at.v[i] & 15]; return at; }
KV_INLINE Laced shuffle32(Bytes lo, Bytes hi, Laced at) {
  for (int i = 0; i < 32; i++) at.v[i] = (at.v[i] & 16 ? hi : lo).v[at.v[i] & 15];
  return at;
}
template <int S, int T, int MASK>
KV_INLINE Laced shift_mask(Laced b) { for (int i = 0; i < 32; i++) b.v[i] = (b.v[i] >> (i < 16 ? S : T)) & MASK; return b; }
template <int SHIFT, int MASK>
KV_INLINE Laced or_bits(Laced c, Laced b) {
  for (int i = 0; i < 32; i++) c.v[i] |= (SHIFT < 0 ? b.v[i] << (SHIFT < 0 ? -SHIFT : 0) : b.v[i] >> (SHIFT < 0 ? 0 : SHIFT)) & MASK;
  return c;
}
KV_INLINE Laced all_four(const uint8_t* p) { Laced r; for (int i = 0; i < 32; i++) r.v[i] = p[i % 4]; return r; }
KV_INLINE Laced all_eight(const uint8_t* p) { Laced r; for (int i = 0; i < 32; i++) r.v[i] = p[i % 8]; return r; }
KV_INLINE Laced shift_fours(Laced b, const uint8_t* by) { for (int i = 0; i < 32; i++) b.v[i] >>= by[i]; return b; }
KV_INLINE void unlace(Laced c, Bytes* out) {
  for (int x = 0; x < 2; x++) KV_EACH out[x].v[i] = c.v[laced_run(i) * 16 + laced_code(x, i)];
}
#endif

// Partial rows: only `n` bytes are read, the rest is zero. No memcpy: a call would push sums out of their registers.
KV_INLINE Bytes load_bytes(const uint8_t* p, int n) {
  if (n == 8) return load_eight(p);
#if KV_AVX512 || KV_AVX2
  uint64_t v[2] = {};
  for (int i = 0; i < n; i++) v[i / 8] |= (uint64_t)p[i] << 8 * (i % 8);
  return {_mm_set_epi64x((long long)v[1], (long long)v[0])};
#else
  Bytes r = {};
  std::memcpy(r.v, p, (size_t)n);
  return r;
#endif
}

// Numbers: of bytes as they are, and of codes by their table (`low`: the lower two bytes of some entry are not zero).
#if KV_AVX512
KV_INLINE X from_int8(Bytes b) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b.a))}; }
template <int SHIFT, int MASK>
KV_INLINE X from_e_bits(Bytes b) {  // sign-extended byte << SHIFT & MASK, as float16
  return {_mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(b.a), SHIFT), _mm256_set1_epi16((short)MASK)))};
}
#elif KV_AVX2
KV_INLINE X from_int8(Bytes b) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b.a)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(b.a, 8)))};
}
KV_INLINE X from_uint8(Bytes b) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(b.a)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(b.a, 8)))};
}
template <int SHIFT, int MASK>
KV_INLINE X from_e_bits(Bytes b) {
  const __m256i h = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(b.a), SHIFT), _mm256_set1_epi16((short)MASK));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(h)), _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))};
}
// The four bytes of sixteen floats, one plane each: a byte shuffle looks 32 codes up at once, exactly. Numbers whose low
// two bytes are zero (a code minus the middle is one) need half of it.
struct Table16 { __m256i t[4]; bool low; };
KV_INLINE Table16 table16(const float* t, int n) {
  uint8_t b[4][16];
  Table16 r;
  r.low = false;
  for (int i = 0; i < 16; i++) {
    uint32_t u;
    std::memcpy(&u, t + (i & (n - 1)), 4);
    for (int k = 0; k < 4; k++) b[k][i] = (uint8_t)(u >> (8 * k));
    r.low = r.low || (u & 0xFFFF);
  }
  for (int k = 0; k < 4; k++) r.t[k] = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)b[k]));
  return r;
}
template <bool LOW> KV_INLINE void join(const __m256i* b, X* out) {
  const __m256i zero = _mm256_setzero_si256(), h0 = _mm256_unpacklo_epi8(b[2], b[3]), h1 = _mm256_unpackhi_epi8(b[2], b[3]);
  const __m256i l0 = LOW ? _mm256_unpacklo_epi8(b[0], b[1]) : zero, l1 = LOW ? _mm256_unpackhi_epi8(b[0], b[1]) : zero;
  out[0] = {_mm256_castsi256_ps(_mm256_unpacklo_epi16(l0, h0)), _mm256_castsi256_ps(_mm256_unpackhi_epi16(l0, h0))};
  out[1] = {_mm256_castsi256_ps(_mm256_unpacklo_epi16(l1, h1)), _mm256_castsi256_ps(_mm256_unpackhi_epi16(l1, h1))};
}
template <bool LOW> KV_INLINE void look16(Laced c, const Table16& t, X* out) {
  __m256i plane[4];
  for (int k = LOW ? 0 : 2; k < 4; k++) plane[k] = _mm256_shuffle_epi8(t.t[k], c.a);
  join<LOW>(plane, out);
}
KV_INLINE void look32(Laced c, const Table16& lo, const Table16& hi, X* out) {
  const __m256i upper = _mm256_slli_epi16(c.a, 3), code = _mm256_and_si256(c.a, _mm256_set1_epi8(15));
  __m256i plane[4];
  for (int k = 0; k < 4; k++)
    plane[k] = _mm256_blendv_epi8(_mm256_shuffle_epi8(lo.t[k], code), _mm256_shuffle_epi8(hi.t[k], code), upper);
  join<true>(plane, out);
}
// Of a table whose upper half is the lower one's mirror image, negated: the lower one alone, and a sign.
template <bool LOW> KV_INLINE void look_mirrored(Laced c, const Table16& lo, const Table16&, X* out) {
  const __m256i code = _mm256_min_epu8(c.a, _mm256_sub_epi8(_mm256_set1_epi8(31), c.a));
  __m256i plane[4];
  for (int k = LOW ? 0 : 2; k < 4; k++) plane[k] = _mm256_shuffle_epi8(lo.t[k], code);
  plane[3] = _mm256_xor_si256(plane[3], _mm256_and_si256(_mm256_slli_epi16(c.a, 3), _mm256_set1_epi8((char)0x80)));
  join<LOW>(plane, out);
}
KV_INLINE X look(Bytes code, const float* t) {
  return {_mm256_i32gather_ps(t, _mm256_cvtepu8_epi32(code.a), 4), _mm256_i32gather_ps(t, _mm256_cvtepu8_epi32(_mm_srli_si128(code.a, 8)), 4)};
}
#else
KV_INLINE X from_int8(Bytes b) { X r; KV_EACH r.v[i] = (float)(int8_t)b.v[i]; return r; }
KV_INLINE X from_uint8(Bytes b) { X r; KV_EACH r.v[i] = (float)b.v[i]; return r; }
template <int SHIFT, int MASK>
KV_INLINE X from_e_bits(Bytes b) {
  X r;
  KV_EACH r.v[i] = half_to_float((uint16_t)(((uint32_t)(int32_t)(int8_t)b.v[i] << SHIFT) & MASK));
  return r;
}
struct Table16 { float t[16]; bool low; };
KV_INLINE Table16 table16(const float* t, int n) { Table16 r; r.low = true; KV_EACH r.t[i] = t[i & (n - 1)]; return r; }
KV_INLINE X look(Bytes code, const float* t) { X r; KV_EACH r.v[i] = t[code.v[i]]; return r; }
template <bool LOW> KV_INLINE void look16(Laced c, const Table16& t, X* out) {
  Bytes b[2];
  unlace(c, b);
  for (int x = 0; x < 2; x++) KV_EACH out[x].v[i] = t.t[b[x].v[i] & 15];
}
KV_INLINE void look32(Laced c, const Table16& lo, const Table16& hi, X* out) {
  Bytes b[2];
  unlace(c, b);
  for (int x = 0; x < 2; x++) KV_EACH out[x].v[i] = (b[x].v[i] & 16 ? hi : lo).t[b[x].v[i] & 15];
}
template <bool LOW> KV_INLINE void look_mirrored(Laced c, const Table16& lo, const Table16& hi, X* out) { look32(c, lo, hi, out); }
#endif
}  // namespace
