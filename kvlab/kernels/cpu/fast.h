// The fast arithmetic of decoding rows: codes, or a table's entries as integers up to TOP, stay bytes and are multiplied by
// bytes. Queries become integers up to TOP, the largest channel; the weights of TOKENS tokens integers whose sum leaves
// room in int16. No product is rounded and no sum overflows.
#pragma once
#include "sums.h"

namespace {
// Sums16: sixteen int16, of pairs of neighbouring products of an unsigned and a signed byte. Laced (bytes.h): 32 bytes.
#if KV_AVX512  // codes are multiplied where they are unpacked: Decoder::dot8, mix8
KV_INLINE void store_queries(int8_t* out, const float* x) {  // two slots of whole numbers, word by word (units.h: byte_of)
  const __m128i words = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (int i = 0; i < 32; i += 16)
    _mm_storeu_si128((__m128i*)(out + i), _mm_shuffle_epi8(_mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_loadu_ps(x + i))), words));
}
KV_INLINE void store_row(uint8_t* out, X x) { _mm_storeu_si128((__m128i*)out, _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(x.a))); }
#elif KV_AVX2
struct Sums16 { __m256i a; };
KV_INLINE Sums16 no_sums16() { return {_mm256_setzero_si256()}; }
KV_INLINE Sums16 add_pairs(Sums16 s, Laced x, Laced y) { return {_mm256_add_epi16(s.a, _mm256_maddubs_epi16(x.a, y.a))}; }
KV_INLINE Laced all_pairs(const uint8_t* two) { int16_t v; std::memcpy(&v, two, 2); return {_mm256_set1_epi16(v)}; }
KV_INLINE void interleave(Laced x, Laced y, Laced* out) { out[0].a = _mm256_unpacklo_epi8(x.a, y.a), out[1].a = _mm256_unpackhi_epi8(x.a, y.a); }
struct Sums8 { __m256i a; };  // eight int32
KV_INLINE Sums8 no_sums8() { return {_mm256_setzero_si256()}; }
KV_INLINE Sums8 add_sums(Sums8 s, Sums16 x) { return {_mm256_add_epi32(s.a, _mm256_madd_epi16(x.a, _mm256_set1_epi16(1)))}; }
KV_INLINE void sum16(const Sums8* x, float* out) {  // of each of sixteen
  for (int i = 0; i < 16; i += 8, x += 8) {
    __m256 s[8];
    for (int j = 0; j < 8; j++) s[j] = _mm256_cvtepi32_ps(x[j].a);
    _mm256_storeu_ps(out + i, eight_sums(s));
  }
}
KV_INLINE __m256 upper_halves(__m256i x) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(x, 16)); }
KV_INLINE void floats(Sums16 s, float* out) {  // of interleaved bytes, in the order of slots
  _mm256_storeu_ps(out, upper_halves(_mm256_unpacklo_epi16(s.a, s.a))), _mm256_storeu_ps(out + 8, upper_halves(_mm256_unpackhi_epi16(s.a, s.a)));
}
KV_INLINE void store_queries(int8_t* out, const float* x) {  // two slots of whole numbers as two runs of bytes
  __m256i v[4];
  for (int i = 0; i < 4; i++) v[i] = _mm256_cvtps_epi32(_mm256_loadu_ps(x + 8 * i));
  _mm256_storeu_si256((__m256i*)out, _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3])));
}
KV_INLINE void store_row(uint8_t* out, X x) {  // sixteen whole numbers in a row
  const __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)), 0xD8);
  _mm_storeu_si128((__m128i*)out, _mm_packus_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}
#else
struct Sums16 { int16_t v[16]; };
KV_INLINE Sums16 no_sums16() { return {}; }
KV_INLINE Sums16 add_pairs(Sums16 s, Laced x, Laced y) {
  KV_EACH s.v[i] = (int16_t)(s.v[i] + x.v[2 * i] * (int8_t)y.v[2 * i] + x.v[2 * i + 1] * (int8_t)y.v[2 * i + 1]);
  return s;
}
KV_INLINE Laced all_pairs(const uint8_t* two) { Laced r; for (int i = 0; i < 32; i++) r.v[i] = two[i % 2]; return r; }
KV_INLINE void interleave(Laced x, Laced y, Laced* out) {
  for (int i = 0; i < 32; i++) {
    Laced& to = out[i % 16 / 8];
    const int at = i / 16 * 16 + i % 8 * 2;
    to.v[at] = x.v[i], to.v[at + 1] = y.v[i];
  }
}
struct Sums8 { int32_t v[8]; };
KV_INLINE Sums8 no_sums8() { return {}; }
KV_INLINE Sums8 add_sums(Sums8 s, Sums16 x) { for (int i = 0; i < 8; i++) s.v[i] += x.v[2 * i] + x.v[2 * i + 1]; return s; }
KV_INLINE void sum16(const Sums8* x, float* out) {
  KV_EACH {
    out[i] = 0.f;
    for (int j = 0; j < 8; j++) out[i] += (float)x[i].v[j];
  }
}
KV_INLINE void floats(Sums16 s, float* out) { KV_EACH out[i] = s.v[laced_run(i) * 8 + laced_code(0, i)]; }
KV_INLINE int8_t whole(float x) { return (int8_t)(x != x ? 0.f : x < -128.f ? -128.f : x > 127.f ? 127.f : x); }
KV_INLINE void store_queries(int8_t* out, const float* x) {
  for (int i = 0; i < 32; i++) out[laced_run(i % 16) * 16 + laced_code(i / 16, i % 16)] = whole(x[i]);
}
KV_INLINE void store_row(uint8_t* out, X x) { KV_EACH out[i] = (uint8_t)(x.v[i] >= 0.f && x.v[i] < 256.f ? x.v[i] : 0.f); }
#endif

#if !KV_AVX512
// scores [R] of queries [R][W] and sixteen tokens [16][W]. SMALL: products of a whole row fit int16.
template <int R, bool SMALL> static void dot16_bytes(const int8_t* q, int ldq, const uint8_t* x, int ldx, int W, float* scores, int ld) {
  Sums8 sum[R][16];
  for (int t = 0; t < 16; t++, x += ldx) {
    Sums16 a[R];
    Sums8 all[R];
    for (int r = 0; r < R; r++) a[r] = no_sums16(), all[r] = no_sums8();
    for (int c = 0; c < W; c += 32) {
      const Laced u = load_both(x + c);
      for (int r = 0; r < R; r++) {
        a[r] = add_pairs(SMALL ? a[r] : no_sums16(), u, load_both((const uint8_t*)q + r * ldq + c));
        if (!SMALL) all[r] = add_sums(all[r], a[r]);
      }
    }
    for (int r = 0; r < R; r++) sum[r][t] = SMALL ? add_sums(no_sums8(), a[r]) : all[r];
  }
  for (int r = 0; r < R; r++) sum16(sum[r], scores + r * ld);
}

// acc[r] += by[r] * p[r][t] x[t] over n tokens, an even number of at most TOKENS; 32 lanes.
template <int R> static void mix_bytes(const uint8_t* p, int ldp, const float* by, int ldb, const uint8_t* x, int ldx, int n, float* acc, int lda) {
  Sums16 a[R][2];
  for (auto& row : a) row[0] = row[1] = no_sums16();
  KV_UNROLL(2)
  for (int t = 0; t < n; t += 2) {
    Laced two[2];
    interleave(load_both(x + t * ldx), load_both(x + (t + 1) * ldx), two);
    for (int r = 0; r < R; r++) {
      const Laced weight = all_pairs(p + r * ldp + t);
      for (int i = 0; i < 2; i++) a[r][i] = add_pairs(a[r][i], weight, two[i]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < 2; i++) {
      alignas(64) float sum[16];
      floats(a[r][i], sum);
      float* to = acc + r * lda + 16 * i;
      store(to, fma(load(sum), set1(by[r * ldb]), load(to)));
    }
}

#endif

struct Query8 {  // up to MAX_R queries of a side in slot order; a part of their lanes has a step of its own
  static constexpr int LANES = MAX_SLOTS * 16;
  alignas(64) int8_t q[MAX_R][LANES];
  float step[MAX_GROUPS][MAX_R], sum[MAX_GROUPS][MAX_R];  // of an integer; of all integers times step
  void take(const float* from, int ld, int R, int lanes, int parts) {
    for (int i = 0; i < R * parts; i++) {
      const int r = i % R, p = i / R, W = lanes / parts;
      const float* x = from + r * ld + p * W;
      X most = set1(0.f), odd = set1(0.f), total = set1(0.f);
      for (int c = 0; c < W; c += 16) most = max(most, max(load(x + c), sub(set1(0.f), load(x + c)))), odd = fma(load(x + c), set1(0.f), odd);
      const float largest = hmax(most), inverse = largest > TINY ? TOP / largest : 0.f;
      step[p][r] = largest / TOP + hsum(odd);  // NaN if a number is not finite
      for (int c = 0; c < W; c += 32) {
        alignas(64) float v[32];
        for (int k = 0; k < 32; k += 16) {
          const X n = nearest(mul(load(x + c + k), set1(inverse)));
          store(v + k, n), total = add(total, n);
        }
        store_queries(q[r] + p * W + c, v);
      }
      sum[p][r] = hsum(total) * step[p][r];
    }
  }
  // dots [R][n] with the stored numbers of n tokens, W lanes: part p. n a multiple of 16.
  void dot(const Decoder& d, const Stored& from, int n, int W, int p, int R, float* dots, int ld) const {
#if KV_AVX512
    d.dot8(q[0] + p * W, LANES, R, from, n, dots, ld);
#else
    alignas(64) uint8_t x[16 * MAX_SLOTS * 16];
    for (int t = 0; t < n; t += 16) {
      d.bytes(Stored::row(from, t), 16, x);
#define KV_CALL(N) W / 16 * d.top * TOP <= 32767 ? dot16_bytes<N, true>(q[0] + p * W, LANES, x, W, W, dots + t, ld) \
                                                 : dot16_bytes<N, false>(q[0] + p * W, LANES, x, W, W, dots + t, ld)
      KV_ROWS(R, KV_CALL)
#undef KV_CALL
    }
#endif
    for (int r = 0; r < R; r++) {
      const X a = set1(d.step * step[p][r]), b = set1(d.low * sum[p][r]);
      for (int t = 0; t < n; t += 16) store(dots + r * ld + t, fma(load(dots + r * ld + t), a, b));
    }
  }
};

// In [0, 1), evenly, whichever of them meet: a weight is rounded down after one is added, so that many small ones are kept.
struct Dither {
  float v[SPLIT];
  Dither() { for (int t = 0; t < SPLIT; t++) v[t] = (float)((t + 1) * 0.6180339887498949 - std::floor((t + 1) * 0.6180339887498949)); }
};

struct Weights8 {  // of a split: probability times scale, per group of channels
  uint8_t p[MAX_GROUPS][MAX_R][PITCH];
  float by[MAX_GROUPS][MAX_R][SPLIT / TOKENS];
  // Weights of group g and row r. Returns the sum over tokens of weight * d.low. A token without weight may hold anything.
  float take(const Decoder& d, int g, int r, const float* from, int n) {
    static const Dither dither;
    float rest = 0.f;
    for (int t = 0; t < n; t += TOKENS) {
      const int m = f_min(TOKENS, n - t);
      X most = set1(0.f), total = set1(0.f), kept = set1(0.f);
      for (int i = 0; i < m; i += 16) most = max(most, load(from + t + i)), total = add(total, load(from + t + i));
      const float largest = hmax(most), all = hsum(total), room = KV_AVX512 ? 1e30f : 32767 / d.top - TOKENS;
      const float inverse = largest > TINY ? std::fmin(254.f / largest, room / all) : 0.f;
      for (int i = 0; i < m; i += 16) {
        const X x = floor_of(fma(load(from + t + i), set1(inverse), load(dither.v + t + i)));
        store_row(p[g][r] + t + i, x);
        kept = add(kept, x);
      }
      const float step = inverse > 0.f ? all / hsum(kept) : 0.f;  // the sum of all weights is kept exactly
      by[g][r][t / TOKENS] = step * d.step;
      rest += all;
    }
    return rest * d.low;
  }
  // out[r] += weights times the stored numbers of all n tokens, W lanes each.
  void mix(const Decoder& d, const Lanes& of, const Stored& from, int W, int n, int R, float* out, int ldo) const {
#if KV_AVX512
    d.mix8({p[0][0], PITCH, MAX_R * PITCH, of.group}, {by[0][0], SPLIT / TOKENS, MAX_R * SPLIT / TOKENS, of.group}, R, from, n, out, ldo);
#else
    alignas(64) uint8_t x[TOKENS * MAX_SLOTS * 16];
    for (int t = 0; t < n; t += TOKENS) {
      const int some = f_min(TOKENS, n - t);
      for (int i = 0; i < some; i += 16) d.bytes(Stored::row(from, t + i), 16, x + i * W);
      for (int c = 0; c < W; c += 32) {
        const int g = of.group[c];
#define KV_CALL(N) mix_bytes<N>(&p[g][0][t], PITCH, &by[g][0][t / TOKENS], SPLIT / TOKENS, x + c, W, some, out + c, ldo)
        KV_ROWS(R, KV_CALL)
#undef KV_CALL
      }
    }
#endif
  }
};
}  // namespace
