// Products of packed rows with a matrix of float32, bfloat16 or int8, and what goes before and after them.
//
// A matrix is panels of 16 outputs, an even number of them; outputs and inputs that there are not are zero:
//   f32, bf16  [panel][input][16]
//   int8       [panel][input / 2][16][2], a scale per output. Inputs become int16 with one scale per row: `top` is the
//              largest that no int32 sum can overflow, so sums are exact and a product costs a rounding of its input
//              by 1 / (2 top) of the row's largest.
// The order of a sum depends on nothing but its length: a row's bits are the same in every batch and for all threads.
#pragma once
#include <type_traits>

#include "words.h"

struct kv_matrix {
  int32_t size, kind, inputs, outputs;
  float top;
  int32_t reserved;
  const void* weight;
  const float* scale;  // int8: [outputs, padded]
  const float* bias;   // [outputs, padded] or null
};
enum { KV_DENSE_F32 = 0, KV_DENSE_BF16 = 1, KV_DENSE_INT8 = 2 };

namespace {
constexpr int PANEL = 16, UNIT = 2 * PANEL;
// What registers hold: of AVX2, sixteen, a panel's sums; of AVX-512, 32, those of both panels of a unit.
constexpr int tile_rows(int kind) { return KV_AVX512 ? 8 : kind == KV_DENSE_INT8 ? 4 : 6; }

KV_INLINE X negative(X x) { return sub(set1(0.f), x); }
KV_INLINE X load_up_to(const float* p, int n) {
  if (n >= 16) return load(p);
  float v[16] = {};
  std::memcpy(v, p, sizeof(float) * (size_t)n);
  return load(v);
}

inline int units(const kv_matrix& m) { return (m.outputs + UNIT - 1) / UNIT; }
inline int64_t row_elements(int inputs) { return (inputs + 31) / 32 * 32; }  // of a prepared row: int16 or float
inline int64_t panel_bytes(const kv_matrix& m) {
  return m.kind == KV_DENSE_INT8 ? (int64_t)(m.inputs + 1) / 2 * 32 : (int64_t)m.inputs * (m.kind == KV_DENSE_F32 ? 64 : 32);
}

// Rows as a matrix takes them.
struct Inputs { char* row; float* scale; int64_t bytes; };

// x, times weight / sqrt(mean(x^2) + eps) where there is a weight (RMS norm), in the form that m takes.
inline void prepare(const kv_matrix& m, const float* x, const float* weight, float eps, const Inputs& to, int t) {
  const int n = m.inputs;
  float factor = 1.f;
  if (weight) {
    X sum = set1(0.f);
    for (int i = 0; i < n; i += 16) { const X v = load_up_to(x + i, n - i); sum = fma(v, v, sum); }
    factor = 1.f / std::sqrt(hsum(sum) / (float)n + eps);
  }
  auto value = [&](int i) {
    const X v = mul(load_up_to(x + i, n - i), set1(factor));
    return weight ? mul(v, load_up_to(weight + i, n - i)) : v;
  };
  if (m.kind != KV_DENSE_INT8) {
    for (int i = 0; i < n; i += 16) store((float*)(to.row + t * to.bytes) + i, value(i));
    return;
  }
  X most = set1(0.f), odd = set1(0.f);
  for (int i = 0; i < n; i += 16) {
    const X v = value(i);
    most = max(most, max(v, negative(v)));
    odd = fma(v, set1(0.f), odd);  // NaN if a number is not finite: so is the row's result then
  }
  const float largest = hmax(most), inverse = largest > TINY ? m.top / largest : 0.f;
  to.scale[t] = largest / m.top + hsum(odd);
  int16_t* out = (int16_t*)(to.row + t * to.bytes);
  for (int i = 0; i < n; i += 16) store_words(out + i, mul(value(i), set1(inverse)));
}

// What is asked for while a panel is read: `pace` bytes more with each line of 64. The hardware stops where a memory page
// ends, and a panel that several tiles read leaves memory idle after the first. Two panels of float32 keep it busy without.
struct Soon { const char* p; int pace; };
template <int KIND, int P> KV_INLINE void ask(const Soon& soon, int k, int64_t away) {
  constexpr int line = KIND == KV_DENSE_F32 ? 1 : 2;  // steps of a line
  if ((KIND != KV_DENSE_F32 || P == 1) && k % line == 0) KV_PREFETCH(soon.p + away + (int64_t)k / line * soon.pace);
}

// Sums of R rows over P panels that lie `next` bytes apart.
template <int KIND, int R, int P>
KV_INLINE void dots(const char* w, int64_t next, const Soon& soon, const char* x, int64_t bytes, int inputs, X (*out)[2]) {
  if constexpr (KIND == KV_DENSE_INT8) {
    Sums sum[R][P];
    for (auto& r : sum) for (auto& s : r) s = no_sums();
    KV_UNROLL(2) for (int k = 0; k < (inputs + 1) / 2; k++) {
      Words a[P];
      for (int p = 0; p < P; p++) ask<KIND, P>(soon, k, p * next), a[p] = load_words((const int8_t*)w + p * next + 32 * (int64_t)k);
      KV_UNROLL(8) for (int r = 0; r < R; r++) {
        int32_t two;
        std::memcpy(&two, x + r * bytes + 4 * (int64_t)k, 4);
        for (int p = 0; p < P; p++) sum[r][p] = add_products(sum[r][p], a[p], two);
      }
    }
    for (int r = 0; r < R; r++) for (int p = 0; p < P; p++) out[r][p] = to_float(sum[r][p]);
  } else {
    X sum[R][P];
    for (auto& r : sum) for (auto& s : r) s = set1(0.f);
    for (int k = 0; k < inputs; k++) {
      X a[P];
      for (int p = 0; p < P; p++)
        ask<KIND, P>(soon, k, p * next), a[p] = KIND == KV_DENSE_F32 ? load((const float*)(w + p * next) + PANEL * (int64_t)k) : load_bf16((const uint16_t*)(w + p * next) + PANEL * (int64_t)k);
      KV_UNROLL(8) for (int r = 0; r < R; r++) {
        const X v = set1(((const float*)(x + r * bytes))[k]);
        for (int p = 0; p < P; p++) sum[r][p] = fma(a[p], v, sum[r][p]);
      }
    }
    for (int r = 0; r < R; r++) for (int p = 0; p < P; p++) out[r][p] = sum[r][p];
  }
}

enum Finish { STORE, ADD, GATE };  // GATE: of a unit, the first panel is gate, the second up; silu(gate) * up is kept
struct Out { float* p; int64_t row; Finish how; };

KV_INLINE X silu(X g) {  // g / (1 + e^-g), with no power above 1
  const X log2e = set1(1.44269504f), zero = set1(0.f), low = negative(max(negative(g), zero)), size = max(g, negative(g));
  return div(mul(g, exp2_of(mul(low, log2e))), add(set1(1.f), exp2_of(negative(mul(size, log2e)))));
}

// Rows [t, t + R), the i-th of some tiles of rows.
template <int KIND, int R>
void tile(const kv_matrix& m, const Inputs& in, const Out& out, int unit, int t, int i, int tiles) {
  const int64_t next = panel_bytes(m);
  const char *w = (const char*)m.weight + 2 * unit * next, *x = in.row + t * in.bytes;
  Soon soon = {w + 2 * next + next * i / tiles, 64 / tiles};
  X sum[R][2];
  if constexpr (R <= 2 || KV_AVX512) {
    dots<KIND, R, 2>(w, next, soon, x, in.bytes, m.inputs, sum);
  } else {
    X one[R][2];
    for (int p = 0; p < 2; p++) {
      dots<KIND, R, 1>(w + p * next, next, soon, x, in.bytes, m.inputs, one);
      soon.p += next;
      for (int r = 0; r < R; r++) sum[r][p] = one[r][0];
    }
  }
  for (int r = 0; r < R; r++) {
    X y[2];
    for (int p = 0; p < 2; p++) {
      const int c = unit * UNIT + p * PANEL;
      y[p] = KIND == KV_DENSE_INT8 ? mul(mul(sum[r][p], set1(in.scale[t + r])), load(m.scale + c)) : sum[r][p];
      if (m.bias) y[p] = add(y[p], load(m.bias + c));
    }
    float* to = out.p + (t + r) * out.row + (int64_t)unit * (out.how == GATE ? PANEL : UNIT);
    if (out.how == GATE) {
      store(to, mul(silu(y[0]), y[1]));
    } else {
      for (int p = 0; p < 2; p++) store(to + p * PANEL, out.how == ADD ? add(load(to + p * PANEL), y[p]) : y[p]);
    }
  }
}

template <int MOST, class F> KV_INLINE void with_rows(int rows, F& f) {  // f(rows as a type), of 1 to MOST
  if constexpr (MOST == 1) f(std::integral_constant<int, 1>());
  else rows == MOST ? f(std::integral_constant<int, MOST>()) : with_rows<MOST - 1>(rows, f);
}
// One unit of outputs for T rows, in tiles of nearly equal height.
template <int KIND> void unit_of(const kv_matrix& m, const Inputs& in, const Out& out, int unit, int T) {
  const int tiles = (T + tile_rows(KIND) - 1) / tile_rows(KIND);
  for (int i = 0; i < tiles; i++) {
    const int t = (int)((int64_t)T * i / tiles), rows = (int)((int64_t)T * (i + 1) / tiles) - t;
    const auto call = [&](auto of) { tile<KIND, of>(m, in, out, unit, t, i, tiles); };
    with_rows<tile_rows(KIND)>(rows, call);
  }
}
inline void unit_of(const kv_matrix& m, const Inputs& in, const Out& out, int unit, int T) {
  if (m.kind == KV_DENSE_F32) unit_of<KV_DENSE_F32>(m, in, out, unit, T);
  else if (m.kind == KV_DENSE_BF16) unit_of<KV_DENSE_BF16>(m, in, out, unit, T);
  else unit_of<KV_DENSE_INT8>(m, in, out, unit, T);
}
}  // namespace
