// X: sixteen floats, the one vector type of every kernel: a zmm, two ymm, or an array that the compiler vectorises.
// Code above this file has no intrinsics. Products and sums are fused where the instruction set has FMA, never elsewhere
// (-ffp-contract=off), so a result does not depend on which loop the compiler found.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
#define KV_AVX512 1
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define KV_AVX2 1
#include <immintrin.h>
#endif
#ifndef KV_AVX512
#define KV_AVX512 0
#endif
#if defined(__GNUC__)
#define KV_INLINE static inline __attribute__((always_inline))
#define KV_PREFETCH(p) __builtin_prefetch(p, 0, 2)  // no nearer than L2: more of these are under way at once
#define KV_UNROLL(n) _Pragma(KV_TEXT(GCC unroll n))
#define KV_TEXT(x) #x
#else
#define KV_INLINE static inline
#define KV_PREFETCH(p) ((void)(p))
#define KV_UNROLL(n)
#endif

namespace {
constexpr float NEG_INF = -INFINITY;
constexpr float TINY = 1e-30f;  // a largest number below is taken for zero: top / largest must be finite


#if KV_AVX512 || KV_AVX2
KV_INLINE float half_to_float(uint16_t h) { return _cvtsh_ss(h); }
#else
KV_INLINE float half_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = (h >> 10) & 31, man = h & 1023, bits;
  float f;
  if (exp == 0) {  // zero or subnormal: man * 2**-24
    f = (float)man * 5.9604644775390625e-8f;
    std::memcpy(&bits, &f, 4);
    bits |= sign;
  } else {
    bits = sign | (exp == 31 ? 0x7F800000u : (exp + 112) << 23) | man << 13;
  }
  std::memcpy(&f, &bits, 4);
  return f;
}
#endif
KV_INLINE float bf16_to_float(uint16_t h) {
  uint32_t bits = (uint32_t)h << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

#if KV_AVX512 || KV_AVX2
KV_INLINE __m256 eight_sums(const __m256* s) {  // of the lanes of each; a blend does not wait for a shuffle port as hadd does
  __m256 u[4], v[2];
  for (int i = 0; i < 4; i++)
    u[i] = _mm256_add_ps(_mm256_blend_ps(s[2 * i], s[2 * i + 1], 0xCC), _mm256_shuffle_ps(s[2 * i], s[2 * i + 1], 0x4E));
  for (int i = 0; i < 2; i++) v[i] = _mm256_add_ps(_mm256_shuffle_ps(u[2 * i], u[2 * i + 1], 0x88), _mm256_shuffle_ps(u[2 * i], u[2 * i + 1], 0xDD));
  return _mm256_add_ps(_mm256_blend_ps(v[0], v[1], 0xF0), _mm256_permute2f128_ps(v[0], v[1], 0x21));
}
#endif

#if KV_AVX512
struct X { __m512 a; };
KV_INLINE X set1(float v) { return {_mm512_set1_ps(v)}; }
KV_INLINE X load(const float* p) { return {_mm512_loadu_ps(p)}; }
KV_INLINE void store(float* p, X x) { _mm512_storeu_ps(p, x.a); }
KV_INLINE X add(X x, X y) { return {_mm512_add_ps(x.a, y.a)}; }
KV_INLINE X sub(X x, X y) { return {_mm512_sub_ps(x.a, y.a)}; }
KV_INLINE X mul(X x, X y) { return {_mm512_mul_ps(x.a, y.a)}; }
KV_INLINE X div(X x, X y) { return {_mm512_div_ps(x.a, y.a)}; }
KV_INLINE X nearest(X x) { return {_mm512_roundscale_ps(x.a, 0)}; }
KV_INLINE X floor_of(X x) { return {_mm512_roundscale_ps(x.a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)}; }
KV_INLINE X fma(X x, X y, X z) { return {_mm512_fmadd_ps(x.a, y.a, z.a)}; }
KV_INLINE X max(X x, X y) { return {_mm512_max_ps(x.a, y.a)}; }
KV_INLINE float hsum(X x) { return _mm512_reduce_add_ps(x.a); }
KV_INLINE float hmax(X x) { return _mm512_reduce_max_ps(x.a); }
KV_INLINE X load_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
KV_INLINE X load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
KV_INLINE X exp2_in_range(X x) {  // x in [-126, 0]
  __m512 n = _mm512_roundscale_ps(x.a, 0), f = _mm512_sub_ps(x.a, n);
  __m512 p = _mm512_set1_ps(1.54660e-4f);
  for (float c : {1.33904634e-3f, 9.61855426e-3f, 5.55033247e-2f, 0.240226462f, 0.693147182f, 1.f})
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
  return {_mm512_scalef_ps(p, n)};
}
using Y = __m512;  // what the machine holds in one register
KV_INLINE Y y_zero() { return _mm512_setzero_ps(); }
KV_INLINE Y y_set1(float v) { return _mm512_set1_ps(v); }
KV_INLINE Y y_load(const float* p) { return _mm512_loadu_ps(p); }
KV_INLINE void y_store(float* p, Y x) { _mm512_storeu_ps(p, x); }
KV_INLINE Y y_fma(Y x, Y y, Y z) { return _mm512_fmadd_ps(x, y, z); }
KV_INLINE void deal(X a, X b, X* out) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  out[0].a = _mm512_permutex2var_ps(a.a, even, b.a), out[1].a = _mm512_permutex2var_ps(a.a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b.a);
}
// Sums of lanes, as few shuffles as there can be: four vectors -> one that holds four partial sums of each, four of those -> sums.
KV_INLINE X fold(X a, X b, X c, X d) {
  const __m512 x = _mm512_add_ps(_mm512_shuffle_f32x4(a.a, b.a, 0x44), _mm512_shuffle_f32x4(a.a, b.a, 0xEE));
  const __m512 y = _mm512_add_ps(_mm512_shuffle_f32x4(c.a, d.a, 0x44), _mm512_shuffle_f32x4(c.a, d.a, 0xEE));
  return {_mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xDD))};
}
KV_INLINE X folded(const X* f) {  // f[k] = fold of vectors k, k + 4, k + 8, k + 12
  const __m512 x = _mm512_add_ps(_mm512_unpacklo_ps(f[0].a, f[2].a), _mm512_unpackhi_ps(f[0].a, f[2].a));
  const __m512 y = _mm512_add_ps(_mm512_unpacklo_ps(f[1].a, f[3].a), _mm512_unpackhi_ps(f[1].a, f[3].a));
  return {_mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y))};
}
KV_INLINE void reduce16(const Y* x, float* out) {
  X f[4];
  for (int k = 0; k < 4; k++) f[k] = fold({x[k]}, {x[k + 4]}, {x[k + 8]}, {x[k + 12]});
  store(out, folded(f));
}
#elif KV_AVX2
struct X { __m256 a, b; };
KV_INLINE X set1(float v) { __m256 a = _mm256_set1_ps(v); return {a, a}; }
KV_INLINE X load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
KV_INLINE void store(float* p, X x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
KV_INLINE X add(X x, X y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
KV_INLINE X sub(X x, X y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
KV_INLINE X mul(X x, X y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
KV_INLINE X div(X x, X y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
KV_INLINE X nearest(X x) {
  constexpr int how = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, how), _mm256_round_ps(x.b, how)};
}
KV_INLINE X floor_of(X x) {
  constexpr int how = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, how), _mm256_round_ps(x.b, how)};
}
KV_INLINE X fma(X x, X y, X z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
KV_INLINE X max(X x, X y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
KV_INLINE float hsum(X x) {
  __m256 h = _mm256_add_ps(x.a, x.b);
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
KV_INLINE float hmax(X x) {
  __m256 h = _mm256_max_ps(x.a, x.b);
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
KV_INLINE X load_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
KV_INLINE X load_bf16(const uint16_t* p) {
  __m256i lo = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  __m256i hi = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
}
KV_INLINE __m256 exp2_in_range(__m256 x) {
  __m256 n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = _mm256_sub_ps(x, n);
  __m256 p = _mm256_set1_ps(1.54660e-4f);
  for (float c : {1.33904634e-3f, 9.61855426e-3f, 5.55033247e-2f, 0.240226462f, 0.693147182f, 1.f})
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(c));
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
}
KV_INLINE X exp2_in_range(X x) { return {exp2_in_range(x.a), exp2_in_range(x.b)}; }
using Y = __m256;  // what the machine holds in one register
KV_INLINE Y y_zero() { return _mm256_setzero_ps(); }
KV_INLINE Y y_set1(float v) { return _mm256_set1_ps(v); }
KV_INLINE Y y_load(const float* p) { return _mm256_loadu_ps(p); }
KV_INLINE void y_store(float* p, Y x) { _mm256_storeu_ps(p, x); }
KV_INLINE Y y_fma(Y x, Y y, Y z) { return _mm256_fmadd_ps(x, y, z); }
KV_INLINE void lace(X a, X b, X* out) {  // two runs of sixteen in the order of bytes.h
  out[0] = {_mm256_permute2f128_ps(a.a, b.a, 0x20), _mm256_permute2f128_ps(a.a, b.a, 0x31)};
  out[1] = {_mm256_permute2f128_ps(a.b, b.b, 0x20), _mm256_permute2f128_ps(a.b, b.b, 0x31)};
}
KV_INLINE __m256 every_other(__m256 a, __m256 b, bool odd) {
  const __m256 x = odd ? _mm256_shuffle_ps(a, b, 0xDD) : _mm256_shuffle_ps(a, b, 0x88);
  return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xD8));
}
KV_INLINE void deal(X a, X b, X* out) {  // lanes of both in turn: those of even places, those of odd ones
  for (int i = 0; i < 2; i++) out[i] = {every_other(a.a, a.b, i), every_other(b.a, b.b, i)};
}
KV_INLINE void reduce16(const Y* s, float* out) { _mm256_storeu_ps(out, eight_sums(s)), _mm256_storeu_ps(out + 8, eight_sums(s + 8)); }
#else
struct X { float v[16]; };
#define KV_EACH for (int i = 0; i < 16; i++)
KV_INLINE X set1(float v) { X r; KV_EACH r.v[i] = v; return r; }
KV_INLINE X load(const float* p) { X r; KV_EACH r.v[i] = p[i]; return r; }
KV_INLINE void store(float* p, X x) { KV_EACH p[i] = x.v[i]; }
KV_INLINE X add(X x, X y) { KV_EACH x.v[i] += y.v[i]; return x; }
KV_INLINE X sub(X x, X y) { KV_EACH x.v[i] -= y.v[i]; return x; }
KV_INLINE X mul(X x, X y) { KV_EACH x.v[i] *= y.v[i]; return x; }
KV_INLINE X div(X x, X y) { KV_EACH x.v[i] /= y.v[i]; return x; }
KV_INLINE X nearest(X x) { KV_EACH x.v[i] = std::nearbyint(x.v[i]); return x; }
KV_INLINE X floor_of(X x) { KV_EACH x.v[i] = std::floor(x.v[i]); return x; }
KV_INLINE X fma(X x, X y, X z) { KV_EACH z.v[i] += x.v[i] * y.v[i]; return z; }
KV_INLINE X max(X x, X y) { KV_EACH x.v[i] = x.v[i] > y.v[i] ? x.v[i] : y.v[i]; return x; }
KV_INLINE float hsum(X x) {
  for (int n = 8; n; n /= 2) for (int i = 0; i < n; i++) x.v[i] += x.v[i + n];
  return x.v[0];
}
KV_INLINE float hmax(X x) { float m = x.v[0]; KV_EACH m = x.v[i] > m ? x.v[i] : m; return m; }
KV_INLINE X load_half(const uint16_t* p) { X r; KV_EACH r.v[i] = half_to_float(p[i]); return r; }
KV_INLINE X load_bf16(const uint16_t* p) { X r; KV_EACH r.v[i] = bf16_to_float(p[i]); return r; }
KV_INLINE X exp2_in_range(X x) {
  X r;
  KV_EACH {
    float n = std::nearbyint(x.v[i]), f = x.v[i] - n, p = 1.54660e-4f;
    for (float c : {1.33904634e-3f, 9.61855426e-3f, 5.55033247e-2f, 0.240226462f, 0.693147182f, 1.f}) p = p * f + c;
    int32_t bits;
    std::memcpy(&bits, &p, 4);
    bits += (int32_t)n * (1 << 23);
    std::memcpy(&r.v[i], &bits, 4);
  }
  return r;
}
using Y = X;
KV_INLINE Y y_zero() { return set1(0.f); }
KV_INLINE Y y_set1(float v) { return set1(v); }
KV_INLINE Y y_load(const float* p) { return load(p); }
KV_INLINE void y_store(float* p, Y x) { store(p, x); }
KV_INLINE Y y_fma(Y x, Y y, Y z) { return fma(x, y, z); }
KV_INLINE void lace(X a, X b, X* out) { KV_EACH out[i / 8].v[i % 8 + i % 8 / 4 * 4] = a.v[i], out[i / 8].v[i % 8 + i % 8 / 4 * 4 + 4] = b.v[i]; }
KV_INLINE void deal(X a, X b, X* out) { KV_EACH out[i % 2].v[i / 2] = a.v[i], out[i % 2].v[i / 2 + 8] = b.v[i]; }
KV_INLINE void reduce16(const Y* x, float* out) { KV_EACH out[i] = hsum(x[i]); }
#endif

// Lanes [from, to) of x, `other` elsewhere.
KV_INLINE X between(X x, int from, int to, float other) {
  alignas(64) float v[16];
  store(v, x);
  for (int i = 0; i < 16; i++) v[i] = i >= from && i < to ? v[i] : other;
  return load(v);
}

// t[at[l]] per lane, at < n <= 16; and n <= 16 float16 numbers as the first lanes.
#if KV_AVX512
KV_INLINE X permute(X t, const int32_t* at, int) { return {_mm512_permutexvar_ps(_mm512_loadu_si512(at), t.a)}; }
KV_INLINE X half_few(const uint16_t* p, int n) {
  uint16_t h[16] = {};
  std::memcpy(h, p, 2 * (size_t)n);
  return load_half(h);
}
#elif KV_AVX2
KV_INLINE X permute(X t, const int32_t* at, int n) {
  __m256i a = _mm256_loadu_si256((const __m256i*)at), b = _mm256_loadu_si256((const __m256i*)(at + 8));
  X r = {_mm256_permutevar8x32_ps(t.a, a), _mm256_permutevar8x32_ps(t.a, b)};
  if (n <= 8) return r;
  __m256i seven = _mm256_set1_epi32(7);
  r.a = _mm256_blendv_ps(r.a, _mm256_permutevar8x32_ps(t.b, a), _mm256_castsi256_ps(_mm256_cmpgt_epi32(a, seven)));
  r.b = _mm256_blendv_ps(r.b, _mm256_permutevar8x32_ps(t.b, b), _mm256_castsi256_ps(_mm256_cmpgt_epi32(b, seven)));
  return r;
}
KV_INLINE X half_few(const uint16_t* p, int n) {  // straight into a register: a detour over memory stalls
  if (n == 2) {
    int32_t two;
    std::memcpy(&two, p, 4);
    return {_mm256_cvtph_ps(_mm_cvtsi32_si128(two)), _mm256_setzero_ps()};
  }
  if (n == 4) return {_mm256_cvtph_ps(_mm_loadl_epi64((const __m128i*)p)), _mm256_setzero_ps()};
  uint16_t h[16] = {};
  std::memcpy(h, p, 2 * (size_t)n);
  return load_half(h);
}
#else
KV_INLINE X permute(X t, const int32_t* at, int) {
  X r;
  for (int i = 0; i < 16; i++) r.v[i] = t.v[at[i]];
  return r;
}
KV_INLINE X half_few(const uint16_t* p, int n) {
  X r = {};
  for (int i = 0; i < n; i++) r.v[i] = half_to_float(p[i]);
  return r;
}
#endif

// x [n, width] -> out [width, n]; both multiples of 16 and of 8.
static inline void transpose(const float* x, int n, int width, float* out) {
#if KV_AVX2 || KV_AVX512
  for (int i = 0; i < n; i += 8)
    for (int j = 0; j < width; j += 8) {
      __m256 r[8], t[8];
      for (int k = 0; k < 8; k++) r[k] = _mm256_loadu_ps(x + (i + k) * width + j);
      for (int k = 0; k < 8; k += 2) t[k] = _mm256_unpacklo_ps(r[k], r[k + 1]), t[k + 1] = _mm256_unpackhi_ps(r[k], r[k + 1]);
      for (int k = 0; k < 8; k += 4) {
        r[k] = _mm256_shuffle_ps(t[k], t[k + 2], 0x44), r[k + 1] = _mm256_shuffle_ps(t[k], t[k + 2], 0xEE);
        r[k + 2] = _mm256_shuffle_ps(t[k + 1], t[k + 3], 0x44), r[k + 3] = _mm256_shuffle_ps(t[k + 1], t[k + 3], 0xEE);
      }
      for (int k = 0; k < 4; k++) {
        _mm256_storeu_ps(out + (j + k) * n + i, _mm256_permute2f128_ps(r[k], r[k + 4], 0x20));
        _mm256_storeu_ps(out + (j + k + 4) * n + i, _mm256_permute2f128_ps(r[k], r[k + 4], 0x31));
      }
    }
#else
  for (int i = 0; i < n; i++)
    for (int j = 0; j < width; j++) out[j * n + i] = x[i * width + j];
#endif
}

KV_INLINE X exp2_of(X x) { return exp2_in_range(max(x, set1(-126.f))); }  // below 2**-126: 2**-126
}  // namespace
