// How one side (K or V) of a page is stored, and in which order it is read. `kv_side` is filled by kernels/cpu/attend.py from a
// codec's own description (kernels/format.py); nothing here knows a method by name.
//
// A row (one token of one head) is read sixteen bytes of its widest plane at a time: a UNIT. A unit of w-bit codes holds
// 8 / w runs of sixteen. Two runs are unpacked at once (bytes.h) and make two SLOTS of sixteen lanes: the same run of two
// neighbouring units where a packed row has an even number of them, else two runs of one. `channel` says
// which channel each lane of each slot is (-1: padding). Queries are brought into slot order once, outputs back into channel order once; rows never.
#pragma once
#include "bytes.h"

enum kv_kind : int32_t { KV_F32, KV_BF16, KV_F16, KV_E4M3, KV_E5M2, KV_I8, KV_UNIFORM, KV_TABLE };
enum kv_axis : int32_t { KV_NONE, KV_TOKEN, KV_BLOCK };

struct kv_side {
  int32_t kind, bits;      // kv_kind; bits of a code (1..8) for KV_UNIFORM and KV_TABLE
  int32_t width, pack;     // channels; channels packed as one row of planes (divides width)
  int32_t axis, group;     // scales: KV_TOKEN per token and `group` channels, KV_BLOCK per channel and `group` tokens
  int32_t meta, slots;     // type of scale and zero (KV_F32, KV_BF16, KV_F16); number of slots
  float mid;               // rows come out as code - mid: value = scale * row + (zero + scale * mid)
  int32_t fit;             // kv_fit of encode.h: how tokens are written
  int64_t row_bytes;       // bytes of one token
  const uint8_t* codes;    // [block rows, B, row_bytes]
  const uint8_t *scale, *scale2, *zero;  // [block rows, B, width / group] or [block rows, B / group, width]; null = none
  const float* table;      // KV_TABLE: [2**bits], mid taken off already
  const int16_t* channel;  // [slots * 16]
  const float* edges;      // KV_TABLE: [2**bits - 1] between the cells
  float factor;            // of KV_CONST_UNBIASED
  int32_t reserved;
};

namespace {
constexpr int MAX_UNITS = 16, MAX_SLOTS = 64;

template <int BITS> struct Bits {  // planes of the binary expansion, widest first
  static constexpr int W = BITS == 8 ? 8 : BITS >= 4 ? 4 : BITS >= 2 ? 2 : 1;
  static constexpr int REST = BITS - W, PER = 8 / W;
};

KV_INLINE int unit_bytes(int bits) { return bits == 8 ? 8 : bits >= 4 ? 4 : bits >= 2 ? 2 : 1; }
KV_INLINE bool is_codes(const kv_side& s) { return s.kind == KV_UNIFORM || s.kind == KV_TABLE; }
static int64_t least_row_bytes(const kv_side& s) {
  if (is_codes(s)) return (int64_t)s.width * s.bits / 8;
  return (int64_t)s.width * (s.kind == KV_F32 ? 4 : s.kind == KV_BF16 || s.kind == KV_F16 ? 2 : 1);
}

// Calls f(byte, run, byte, run) for every two runs of `span` bytes, in the order in which they are unpacked.
template <class F> static void each_pair(int span, bool paired, int per, F f) {
  if (paired) {
    for (int b = 0; b < span; b += 32)
      for (int i = 0; i < per; i++) f(b, i, b + 16, i);
  } else {
    for (int b = 0; b < span; b += 16)
      for (int i = 0; i < per; i += 2) f(b, i, b, i + 1);
  }
}

// How units are read: two neighbours at once; one by one; one by one, and the last one is not full.
enum Units { PAIRS, WHOLE, ENDS };

// Rows of `pack` codes of one plane follow each other without a gap: they are read as one.
struct Spans {
  int bytes, count, span, stride;  // of a row's widest plane; rows; bytes read as one; from one to the next
  bool paired;                     // runs of neighbouring units, which lie in one row then
  explicit Spans(const kv_side& s) {
    const int w = unit_bytes(s.bits), rows = s.width / s.pack;
    const bool flat = s.bits == w;
    bytes = s.pack * w / 8, count = flat ? 1 : rows, span = flat ? bytes * rows : bytes, stride = s.pack / 8 * s.bits;
    paired = bytes % 32 == 0;
  }
  bool odd() const { return !paired && span % 16 > 0; }  // the last unit is not full
  Units units() const { return paired ? PAIRS : odd() ? ENDS : WHOLE; }
};

// Lane -> channel of every slot; returns the number of slots, or -1 when there are more than the kernels hold.
static int slot_channels(const kv_side& s, int16_t* channel) {
  const bool whole = !is_codes(s) || s.bits == 8;  // a lane a byte or more
  int n = 0;
  if (whole) {
    const int width = is_codes(s) ? (s.width + 15) / 16 * 16 : s.width;
    for (int c = 0; c < width; c++) channel[c] = (int16_t)(c < s.width ? c : -1);
    return width % 16 || width > MAX_SLOTS * 16 ? -1 : width / 16;
  }
  const Spans at(s);
  const int per = 8 / unit_bytes(s.bits);
  for (int r = 0; r < at.count; r++)
    each_pair(at.span, at.paired, per, [&](int b0, int i0, int b1, int i1) {
      for (int x = 0; x < (at.span - b0 > 8 ? 2 : 1) && n >= 0; x++) {
        if (n == MAX_SLOTS) { n = -1; return; }
        for (int l = 0; l < 16; l++) {
          const int b = (laced_run(l) ? b1 : b0) + laced_code(x, l), row = at.count > 1 ? r : b / at.bytes;
          channel[n * 16 + l] = (int16_t)(b < at.span ? row * s.pack + (laced_run(l) ? i1 : i0) * at.bytes + b % at.bytes : -1);
        }
        n++;
      }
    });
  return n;
}

// Where the narrower planes of two runs lie (see kernels/packing.py, order `split`): a code's bits are v neighbouring ones of
// a byte, at W * run + `by`. Runs of the units of a pair come one after another, so only W * run changes between them.
struct Narrow {  // empty for formats of one plane
  int offset[2], bytes[2];
  uint8_t at[MAX_UNITS][2][32], by[MAX_UNITS][2][32];  // of each pair of runs that a row's bytes are read for
};

template <int BITS> static void narrow_of(const kv_side& s, Narrow& t) {
  using P = Bits<BITS>;
  const int wide = s.pack * P::W / 8;
  const bool paired = wide % 32 == 0;
  int start = wide, plane = 0;
  for (int v = 2; v; v /= 2) {
    if (!(P::REST & v)) continue;
    const int m = s.pack * v / 8;
    t.offset[plane] = start, t.bytes[plane] = m;
    for (int b = 0, u = 0; b < wide; b += paired ? 32 : 16, u++)
      for (int l = 0; l < 32; l++) {
        const int j = b + (paired ? l : l % 16), in = j < wide ? j : 0;
        t.at[u][plane][l] = (uint8_t)(in % m), t.by[u][plane][l] = (uint8_t)(v * (in / m) + (paired || l < 16 ? 0 : P::W));
      }
    start += m, plane++;
  }
}

// The bits of a plane for the u-th pair of units (or twice a unit), shifted so that run I's begin at bit W * I.
KV_INLINE Laced narrow_bits(const uint8_t* row, const Narrow& t, int u, int plane) {
  const uint8_t *p = row + t.offset[plane], *at = t.at[u][plane], *by = t.by[u][plane];
  const int m = t.bytes[plane];
  if (m == 8) return shift_fours(all_eight(p), by);
  if (m % 16 == 0) return shift_fours(both(load_bytes(p + at[0]), load_bytes(p + at[16])), by);
  if (m == 4) return shift_fours(all_four(p), by);
  uint8_t b[32];
  for (int l = 0; l < 32; l++) b[l] = (uint8_t)(p[at[l]] >> by[l]);
  return load_both(b);
}
}  // namespace
