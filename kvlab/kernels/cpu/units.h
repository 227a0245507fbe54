// Codes as AVX-512 reads them: sixteen at a time, a byte with the code in each lane of 32 bits, shifted and looked up there.
// A row's widest plane is read in UNITs of N bytes, the largest power of two that divides a packed row and has at most 64
// codes; so no unit crosses packed rows. Lane l of a unit's slot s is field 16 / N * s + l / N of a byte: all sixteen lanes
// are codes unless a unit has but eight. Of sixteen bytes lanes take the first ones of four words, then the second ones
// (byte_of): what several words lying side by side have in common is one register then (beside.h).
#pragma once
#include "slots.h"

namespace {
static int unit_size(const kv_side& s) {
  const int w = unit_bytes(s.bits), bytes = s.pack * w / 8;
  int n = w == 1 ? 8 : 16;
  while (bytes % n) n /= 2;
  return n;
}
template <int BITS, int N> constexpr int slots_of_unit = N * 8 / Bits<BITS>::W / 16 ? N * 8 / Bits<BITS>::W / 16 : 1;
constexpr int field_of(int N, int s, int l) { return 16 / N * s + l / N; }
constexpr int byte_of(int N, int l) { return N == 16 ? l % 4 * 4 + l / 4 : l % N; }

static int code_channels(const kv_side& s, int16_t* channel) {
  const int w = unit_bytes(s.bits), n = unit_size(s), each = f_max(n * 8 / w / 16, 1), bytes = s.pack * w / 8;
  if (s.width / s.pack * (bytes / n) * each > MAX_SLOTS) return -1;
  int slot = 0;
  for (int row = 0; row < s.width; row += s.pack)
    for (int b = 0; b < bytes; b += n)
      for (int i = 0; i < each; i++, slot++)
        for (int l = 0; l < 16; l++) {
          const int run = field_of(n, i, l);
          channel[slot * 16 + l] = (int16_t)(run * w < 8 ? row + run * bytes + b + byte_of(n, l) : -1);
        }
  return slot;
}

struct Index { __m512i a; };  // a code in each lane; what is above it may be anything
template <int N, int M = N> KV_INLINE Index spread(const uint8_t* p) {  // M bytes, again and again, in the order of a unit of N
  if constexpr (N == 16) {
    alignas(64) static constexpr struct By { int32_t v[16]; constexpr By() : v() { for (int l = 0; l < 16; l++) v[l] = l / 4 * 8; } } by;
    __m512i x;
    if constexpr (M == 16) x = _mm512_broadcast_i32x4(load_bytes(p).a);
    if constexpr (M == 8) { int64_t v; std::memcpy(&v, p, 8); x = _mm512_set1_epi64(v); }
    if constexpr (M == 4) { int32_t v; std::memcpy(&v, p, 4); x = _mm512_set1_epi32(v); }
    return {_mm512_srlv_epi32(x, _mm512_load_si512(by.v))};
  }
  if constexpr (M == 8) { int64_t v; std::memcpy(&v, p, 8); return {_mm512_cvtepu8_epi32(_mm_set1_epi64x(v))}; }
  if constexpr (M == 4) { int32_t v; std::memcpy(&v, p, 4); return {_mm512_cvtepu8_epi32(_mm_set1_epi32(v))}; }
  if constexpr (M == 2) { int16_t v; std::memcpy(&v, p, 2); return {_mm512_cvtepu8_epi32(_mm_set1_epi16(v))}; }
  if constexpr (M == 1) return {_mm512_set1_epi32(*p)};
}

// The narrower planes of a packed row (kernels/packing.py, order `split`): which byte a lane's bits are in, and how far it is
// turned until they lie above the ones that the lane has.
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
        t.at[plane][u][l] = (int16_t)((u * n + byte_of(n, l)) % m);
        for (int i = 0; i < each; i++) {
          const int channel = field_of(n, i, l) * bytes + u * n + byte_of(n, l);
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
    alignas(64) static constexpr struct By { uint8_t v[64]; constexpr By() : v() { for (int i = 0; i < 64; i++) v[i] = (uint8_t)(i % 4 * 16 + byte_of(N, i / 4) % M); } } by;
    __m128i x[4];
    for (int i = 0; i < 4; i++, p += row_bytes) x[i] = M == 16 ? load_bytes(p).a : M == 8 ? load_eight(p).a : load_four(p).a;
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
    if constexpr (N == 16) if (m % 16 == 0) return spread<16>(from + u * 16 % m).a;
    if constexpr (N >= 8) if (m == 8) return spread<N, 8>(from).a;
    if constexpr (N >= 4) if (m == 4) return spread<N, 4>(from).a;
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
}  // namespace
