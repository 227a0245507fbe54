// Decoders: rows of a page as numbers, one type per way to store them. What a side is: slots.h.
#pragma once
#include <new>

#include "direct.h"
#if KV_AVX512
#include "unit_codes.h"
#else
#include "laced.h"
#endif

namespace {
// Lane -> channel of every slot; returns the number of slots, or -1 when there are more than the kernels hold.
static int slot_channels(const kv_side& s, int16_t* channel) {
#if KV_AVX512
  if (is_codes(s)) return code_channels(s, channel);
#endif
  if (is_codes(s) && s.bits < 8) return code_channels(s, channel);
  const int width = is_codes(s) ? (s.width + 15) / 16 * 16 : s.width;  // a lane a byte or more
  for (int c = 0; c < width; c++) channel[c] = (int16_t)(c < s.width ? c : -1);
  return width % 16 || width > MAX_SLOTS * 16 ? -1 : width / 16;
}

template <int KIND> struct Plain final : Decoder {
  const int width;
  const int64_t row_bytes;
  explicit Plain(const kv_side& s) : width(s.width), row_bytes(s.row_bytes) { asks = KV_AVX512 && width % 64 == 0; }
  KV_INLINE X number(const uint8_t* row, int c) {  // sixteen from channel c on
    if constexpr (KIND == KV_F32) return load((const float*)row + c);
    if constexpr (KIND == KV_BF16) return load_bf16((const uint16_t*)row + c);
    if constexpr (KIND == KV_F16) return load_half((const uint16_t*)row + c);
    if constexpr (KIND == KV_E4M3) return mul(from_e_bits<7, 0xBF80>(load_bytes(row + c)), set1(256.f));
    if constexpr (KIND == KV_E5M2) return from_e_bits<8, 0xFF00>(load_bytes(row + c));
    if constexpr (KIND == KV_I8) return from_int8(load_bytes(row + c));
  }
  void rows(const uint8_t* row, int n, float* out) const override {
    for (int t = 0; t < n; t++, row += row_bytes)
      for (int c = 0; c < width; c += 16, out += 16) store(out, number(row, c));
  }
#if KV_AVX512
  struct Four {
    static int place(int first) { return 16 * first; }
    KV_INLINE void get(const Four&, int channel, const uint8_t* row, X* x) { for (int i = 0; i < 4; i++) x[i] = number(row, channel + 16 * i); }
  };
  bool dot(const float* q, int ldq, int R, const Stored& from, const Soon* soon, int n, float* dots, int ld) const override {
    return width % 64 == 0 && (dot_direct(Four(), q, ldq, R, from, soon, n, width / 16, dots, ld), true);
  }
  bool mix(const Weights<float>& w, int R, const Stored& rows, int from, int to, float* acc, int lda) const override {
    return width % 64 == 0 && (mix_direct(Four(), w, R, rows, from, to, width / 16, acc, lda), true);
  }
#endif
};

// Built once a call; the one place where a format becomes a type. `storage` must outlive it.
struct Storage { alignas(64) char bytes[sizeof(Codes<7, false>)]; };

static const Decoder* decoder(const kv_side& s, Storage& at, Wanted bytes) {
  void* p = at.bytes;
  switch (s.kind) {
    case KV_F32: return new (p) Plain<KV_F32>(s);
    case KV_BF16: return new (p) Plain<KV_BF16>(s);
    case KV_F16: return new (p) Plain<KV_F16>(s);
    case KV_E4M3: return new (p) Plain<KV_E4M3>(s);
    case KV_E5M2: return new (p) Plain<KV_E5M2>(s);
    case KV_I8: return new (p) Plain<KV_I8>(s);
  }
  switch (s.bits) {
    case 1: return new (p) Codes<1, false>(s, bytes);
    case 2: return new (p) Codes<2, false>(s, bytes);
    case 3: return new (p) Codes<3, false>(s, bytes);
    case 4: return new (p) Codes<4, false>(s, bytes);
    case 5: return new (p) Codes<5, false>(s, bytes);
    case 6: return s.kind == KV_TABLE ? (Decoder*)new (p) Codes<6, false>(s, bytes) : new (p) Codes<6, true>(s, bytes);
    case 7: return s.kind == KV_TABLE ? (Decoder*)new (p) Codes<7, false>(s, bytes) : new (p) Codes<7, true>(s, bytes);
    default: return s.kind == KV_TABLE ? (Decoder*)new (p) Codes<8, false>(s, bytes) : new (p) Codes<8, true>(s, bytes);
  }
}

KV_INLINE float meta_at(const uint8_t* p, int32_t type, int64_t i) {
  if (type == KV_F32) { float f; std::memcpy(&f, p + 4 * i, 4); return f; }
  uint16_t h;
  std::memcpy(&h, p + 2 * i, 2);
  return type == KV_F16 ? half_to_float(h) : bf16_to_float(h);
}
KV_INLINE X meta_load(const uint8_t* p, int32_t type, int64_t i) {  // sixteen in a row
  if (type == KV_F32) return load((const float*)p + i);
  const uint16_t* h = (const uint16_t*)p + i;
  return type == KV_F16 ? load_half(h) : load_bf16(h);
}

KV_INLINE X meta_few(const uint8_t* p, int32_t type, int64_t i, int n) {  // n <= 16 in a row, as the first lanes
  if (type == KV_F16) return half_few((const uint16_t*)p + i, n);
  float x[16] = {};
  for (int j = 0; j < n; j++) x[j] = meta_at(p, type, i + j);
  return load(x);
}
}  // namespace
