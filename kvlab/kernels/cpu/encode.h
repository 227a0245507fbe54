// Writing tokens: a vector's scale is found, rounded to its stored type FIRST, and the codes are chosen with the stored
// number, as in kernels/affine.py, fp8.py and codebook.py, step by step the same float32 operations (the rotation of a
// codebook's input is a sum in another order than a BLAS takes). Codes go to planes in order `split`.
#pragma once
#include "chunk.h"

enum kv_fit : int32_t {  // how the scale of a vector is found; 0 = the kernels do not write this side
  KV_AS_IS = 1, KV_ABSMAX, KV_MINMAX, KV_NORM_NONE, KV_NORM_KEEP, KV_EDEN_MSE, KV_EDEN_UNBIASED, KV_CONST_UNBIASED, KV_SKETCH
};

namespace {
KV_INLINE uint16_t to_half(float x) {
#if KV_AVX512 || KV_AVX2
  return (uint16_t)_cvtss_sh(x, 0);
#else
  uint32_t b;
  std::memcpy(&b, &x, 4);
  const uint16_t sign = (uint16_t)(b >> 16 & 0x8000);
  b &= 0x7FFFFFFF;
  if (b > 0x7F800000) return sign | 0x7E00;
  if (b >= 0x477FF000) return sign | 0x7C00;  // rounds to infinity
  if (b < 0x38800000) {                       // subnormal: let float32 arithmetic round at 2**-24
    float f;
    std::memcpy(&f, &b, 4);
    f += 0.5f;
    std::memcpy(&b, &f, 4);
    return sign | (uint16_t)(b - 0x3F000000);
  }
  return sign | (uint16_t)((b - 0x38000000 + 0xFFF + (b >> 13 & 1)) >> 13);
#endif
}
KV_INLINE uint16_t to_bf16(float x) {
  uint32_t b;
  std::memcpy(&b, &x, 4);
  if ((b & 0x7FFFFFFF) > 0x7F800000) return 0x7FC0;
  return (uint16_t)((b + 0x7FFF + (b >> 16 & 1)) >> 16);
}
// |x| <= the type's maximum; nearest, ties to even.
template <int MAN, int BIAS> KV_INLINE uint8_t to_fp8(float x) {
  uint32_t b;
  std::memcpy(&b, &x, 4);
  const uint8_t sign = (uint8_t)(b >> 24 & 0x80);
  b &= 0x7FFFFFFF;
  constexpr int CUT = 23 - MAN;
  if (b < (uint32_t)(128 - BIAS) << 23) {  // subnormal there: a multiple of 2**(1 - BIAS - MAN)
    float f;
    std::memcpy(&f, &b, 4);
    return sign | (uint8_t)std::nearbyint(f * (float)(1 << (BIAS + MAN - 1)));
  }
  b += (1u << (CUT - 1)) - 1 + (b >> CUT & 1);
  return sign | (uint8_t)((b >> CUT) - ((uint32_t)(127 - BIAS) << MAN));
}

// Rounds x to the metadata's type, writes it, and returns what was written.
KV_INLINE float put_meta(const uint8_t* base, int32_t type, int64_t i, float x) {
  uint8_t* p = const_cast<uint8_t*>(base);
  if (type == KV_F32) {
    std::memcpy(p + 4 * i, &x, 4);
    return x;
  }
  const uint16_t h = type == KV_F16 ? to_half(x) : to_bf16(x);
  std::memcpy(p + 2 * i, &h, 2);
  return type == KV_F16 ? half_to_float(h) : bf16_to_float(h);
}

KV_INLINE uint8_t* row_of(const kv_side& s, int64_t token) { return const_cast<uint8_t*>(s.codes) + token * s.row_bytes; }

// Codes of one row, [width], to planes.
static void put_codes(const kv_side& s, const uint8_t* codes, uint8_t* row) {
  for (int g = 0; g < s.width; g += s.pack, codes += s.pack) {
    int low = 0;
    for (int w = 8; w; w /= 2) {
      if (!(s.bits & w)) continue;
      const int nb = s.pack * w / 8;
      for (int j = 0; j < nb; j++) {
        uint8_t b = 0;
        for (int i = 0; i < 8 / w; i++) b |= (uint8_t)((codes[i * nb + j] >> low & ((1 << w) - 1)) << (w * i));
        row[j] = b;
      }
      row += nb, low += w;
    }
  }
}

KV_INLINE bool finite(float x) { return x - x == 0.f; }

static bool put_plain(const kv_side& s, const float* x, uint8_t* row) {
  bool ok = true;
  for (int c = 0; c < s.width; c++) {
    if (s.kind == KV_F32) std::memcpy(row + 4 * c, x + c, 4);
    else {
      const uint16_t h = s.kind == KV_F16 ? to_half(x[c]) : to_bf16(x[c]);
      if (s.kind == KV_F16 && (h & 0x7C00) == 0x7C00) ok = false;
      std::memcpy(row + 2 * c, &h, 2);
    }
  }
  return ok;
}

static bool put_scaled(const kv_side& s, const float* x, int64_t token, uint8_t* row) {
  const int groups = s.width / s.group, top = (1 << s.bits) - 1;
  uint8_t codes[512];
  bool ok = true;
  for (int g = 0; g < groups; g++, x += s.group) {
    float lo = x[0], hi = x[0];
    bool number = true;
    for (int c = 0; c < s.group; c++) {
      lo = x[c] < lo ? x[c] : lo, hi = x[c] > hi ? x[c] : hi;
      number = number && finite(x[c]);
    }
    if (s.fit == KV_MINMAX) {
      const float step = put_meta(s.scale, s.meta, token * groups + g, (hi - lo) / (float)top);
      const float zero = put_meta(s.zero, s.meta, token * groups + g, lo), by = step == 0.f ? INFINITY : step;
      ok = ok && number && finite(step) && finite(zero);
      for (int c = 0; c < s.group && ok; c++) {
        const float q = std::nearbyint((x[c] - zero) / by);
        codes[g * s.group + c] = (uint8_t)(q < 0.f ? 0.f : q > (float)top ? (float)top : q);
      }
      continue;
    }
    const float most = std::fabs(hi > -lo ? hi : lo), limit = s.kind == KV_E4M3 ? 448.f : s.kind == KV_E5M2 ? 57344.f : 127.f;
    const float step = put_meta(s.scale, s.meta, token * groups + g, most / limit), by = step == 0.f ? INFINITY : step;
    ok = ok && number && finite(step);
    for (int c = 0; c < s.group && ok; c++) {
      float q = x[c] / by;
      if (s.kind == KV_I8) q = std::nearbyint(q);
      q = q < -limit ? -limit : q > limit ? limit : q;
      row[g * s.group + c] = s.kind == KV_I8 ? (uint8_t)(int8_t)q : s.kind == KV_E4M3 ? to_fp8<3, 7>(q) : to_fp8<2, 15>(q);
    }
  }
  if (s.fit == KV_MINMAX && ok) put_codes(s, codes, row);
  return ok;
}

// The cell of each number: how many of the edges, which ascend, it reaches. Few edges are counted without a branch, since
// where a number lies cannot be foreseen.
static void cells_of(const kv_side& s, const float* z, int32_t* code) {
  const int cells = 1 << s.bits;
  if (s.bits <= 5) {
    std::memset(code, 0, sizeof(int32_t) * (size_t)s.width);
    for (int k = 0; k < cells - 1; k++)
      for (int c = 0; c < s.width; c++) code[c] += z[c] >= s.edges[k];
    return;
  }
  for (int c = 0; c < s.width; c++) {
    int at = 0;
    for (int half = cells / 2; half; half /= 2)
      if (z[c] >= s.edges[at + half - 1]) at += half;
    code[c] = at;
  }
}

struct Basis {  // in which a codec stores: z = x matrix, its rows `row` floats apart, or x times its transpose
  const float* matrix;
  int row;
  bool transposed;
  void take(const float* x, int width, float* z) const {
    if (!transposed) times(x, matrix, width, row, width, z);
    else for (int i = 0; i < width; i += 16) dot16<1>(x, 0, matrix + (int64_t)i * row, row, width, z + i, 0);
  }
};

// -> |x|, and x / |x|: zeros for a vector whose 1 / |x|, or the sum of it, may overflow.
static float normed(const float* x, int width, float* unit) {
  float n = 0.f;
  for (int c = 0; c < width; c++) n += x[c] * x[c];
  n = std::sqrt(n);
  for (int c = 0; c < width; c++) unit[c] = n < TINY ? 0.f : x[c] * (1.f / n);
  return n;
}

// The cells of z to planes, the first one everywhere for a vector of nothing; value: the numbers they stand for.
static void put_cells(const kv_side& s, const float* z, bool nothing, int64_t token, float* value) {
  alignas(64) int32_t cell[512];
  uint8_t codes[512];
  cells_of(s, z, cell);
  for (int c = 0; c < s.width; c++) value[c] = s.table[cell[c]], codes[c] = (uint8_t)(nothing ? 0 : cell[c]);
  put_codes(s, codes, row_of(s, token));
}

// x -> n = |x|, z = x / n in its basis, the cell of each coordinate (edges belong to the upper one), and the number stored.
static bool put_table(const kv_side& s, const float* x, const Basis& basis, int64_t token) {
  alignas(64) float unit[512], z[512], value[512];
  const float n = normed(x, s.width, unit);
  if (!finite(n)) return false;
  const bool nothing = n < TINY;
  basis.take(unit, s.width, z);
  put_cells(s, z, nothing, token, value);
  float dot = 0.f, square = 0.f;
  for (int c = 0; c < s.width; c++) dot += z[c] * value[c], square += value[c] * value[c];
  float keep = n;
  if (s.fit == KV_NORM_KEEP) keep = n / std::sqrt(square);
  if (s.fit == KV_EDEN_MSE) keep = n * dot / square;
  if (s.fit == KV_EDEN_UNBIASED) keep = n / dot;
  if (s.fit == KV_CONST_UNBIASED) keep = n * s.factor;
  return finite(put_meta(s.scale, s.meta, token, nothing ? 0.f : keep));
}

// A key whose last part is a sketch: n = |x|, of both parts, and the cells of z, if there is one for them; the signs of what
// those leave of x / n, along the sketch's columns of the basis, and its length. The basis is orthogonal but for these.
static bool put_sketch(const kv_format& f, const float* x, const float* turn, int64_t token) {
  alignas(64) float rest[512], z[512], value[512];
  const kv_side& s = f.k[f.keys - 1];
  const int W = s.width, row = W * f.keys;
  uint8_t signs[512];
  const float n = normed(x, W, rest);
  if (!finite(n)) return false;
  const bool nothing = n < TINY;
  float left = 0.f;
  if (f.keys == 2) {
    Basis{turn, row, false}.take(rest, W, z);
    put_cells(f.k[0], z, nothing, token, value);
    for (int c = 0; c < W; c++) value[c] = z[c] - value[c], left += value[c] * value[c];
    Basis{turn, row, true}.take(value, W, rest);
  } else
    for (int c = 0; c < W; c++) left += rest[c] * rest[c];
  Basis{turn + (row - W), row, false}.take(rest, W, z);
  for (int c = 0; c < W; c++) signs[c] = !nothing && z[c] >= 0.f;
  put_codes(s, signs, row_of(s, token));
  put_meta(s.scale2, s.meta, token, nothing ? 0.f : std::sqrt(left));
  return finite(put_meta(s.scale, s.meta, token, nothing ? 0.f : n));
}

// A block of one head: steps per channel over `group` tokens. x [B, width].
static bool put_block(const kv_side& s, const float* x, int block, int64_t row) {
  const int W = s.width, groups = block / s.group, top = (1 << s.bits) - 1;
  uint8_t codes[512];
  float lo[512], hi[512], by[512];
  bool ok = true;
  for (int g = 0; g < groups; g++, x += s.group * W) {
    std::memcpy(lo, x, sizeof(float) * W), std::memcpy(hi, x, sizeof(float) * W);
    for (int t = 0; t < s.group; t++)
      for (int c = 0; c < W; c++) {
        const float y = x[t * W + c];
        lo[c] = y < lo[c] ? y : lo[c], hi[c] = y > hi[c] ? y : hi[c];
        ok = ok && finite(y);
      }
    for (int c = 0; c < W; c++) {
      const int64_t at = (row * groups + g) * W + c;
      const float step = put_meta(s.scale, s.meta, at, (hi[c] - lo[c]) / (float)top);
      lo[c] = put_meta(s.zero, s.meta, at, lo[c]), by[c] = step == 0.f ? INFINITY : step;
      ok = ok && finite(step) && finite(lo[c]);
    }
    if (!ok) return false;
    for (int t = 0; t < s.group; t++) {
      for (int c = 0; c < W; c++) {
        const float q = std::nearbyint((x[t * W + c] - lo[c]) / by[c]);
        codes[c] = (uint8_t)(q < 0.f ? 0.f : q > (float)top ? (float)top : q);
      }
      put_codes(s, codes, row_of(s, row * block + g * s.group + t));
    }
  }
  return ok;
}

// One token of one head; false when something does not fit its type or is not a number.
static bool put(const kv_side& s, const float* x, const Basis& basis, int64_t token) {
  if (s.fit == KV_AS_IS) return put_plain(s, x, row_of(s, token));
  return s.fit <= KV_MINMAX ? put_scaled(s, x, token, row_of(s, token)) : put_table(s, x, basis, token);
}
static bool put_key(const kv_format& f, const float* x, int h, int64_t token) {
  const float* turn = f.turn ? f.turn + h * f.turn_head : nullptr;
  return f.k[f.keys - 1].fit == KV_SKETCH ? put_sketch(f, x, turn, token) : put(f.k[0], x, {turn, f.dim, false}, token);
}
static bool put_value(const kv_format& f, const float* x, int h, int64_t token) {
  return put(f.v, x, {f.back ? f.back + h * f.back_head : nullptr, f.dim, true}, token);
}

// Whether `put` writes a side, along a basis or not: its arrays, tables and sizes are there.
static bool writes(const kv_side& s, bool turned, int dim) {
  if (s.scale2 && s.fit != KV_SKETCH) return false;
  switch (s.fit) {
    case KV_AS_IS: return !turned && s.kind <= KV_F16;
    case KV_ABSMAX: return !turned && s.kind >= KV_E4M3 && s.kind <= KV_I8 && s.axis == KV_TOKEN;
    case KV_MINMAX: return !turned && s.kind == KV_UNIFORM && s.axis != KV_NONE && s.zero;
  }
  if (s.fit < KV_MINMAX || s.fit > KV_SKETCH || !turned || s.width != dim || s.axis != KV_TOKEN || s.group != s.width) return false;
  return s.kind == KV_TABLE && (s.fit == KV_SKETCH ? s.bits == 1 && s.scale2 : s.edges != nullptr);
}
static bool writes_all(const kv_format& f) {
  for (int i = 0; i < f.keys; i++)
    if (!writes(f.k[i], f.turn, f.dim)) return false;
  const bool parts = f.keys == 1 || (f.k[0].fit == KV_NORM_NONE && f.k[1].fit == KV_SKETCH && f.k[0].scale == f.k[1].scale);
  return parts && writes(f.v, f.back, f.dim) && f.v.fit != KV_SKETCH;
}
}  // namespace
