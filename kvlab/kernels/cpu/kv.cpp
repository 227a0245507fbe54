// C ABI of the CPU kernels: attention over packed pages, and the mass a slot received. No torch, no Python; loaded with
// ctypes (kernels/cpu/attend.py). Every entry refuses sizes it cannot hold with a negative number and then writes nothing.
#include "abi.h"
#include "encode.h"

#ifndef KV_SOURCE_HASH
#define KV_SOURCE_HASH ""
#endif
KV_API int32_t kv_abi() { return 6; }
KV_API const char* kv_source_hash() { return KV_SOURCE_HASH; }
KV_API const char* kv_isa() {
#if KV_AVX512
  return "avx512";
#elif KV_AVX2
  return "avx2";
#else
  return "generic";
#endif
}

static bool shape_ok(const kv_side& s) {
  if (s.kind < KV_F32 || s.kind > KV_TABLE || s.width <= 0 || s.width > 512) return false;
  if (!is_codes(s)) return s.width % 16 == 0;
  if (s.bits < 1 || s.bits > 8 || s.pack <= 0 || s.pack % 8 || s.width % s.pack) return false;
  return s.pack * unit_bytes(s.bits) / 8 <= 16 * MAX_UNITS;
}

// Fills channel [1024] and returns the slots of a side, negative when the kernels cannot hold it.
KV_API int32_t kv_slots(const kv_side* s, int16_t* channel) {
  int16_t found[MAX_SLOTS * 16];
  if (!shape_ok(*s)) return KV_BAD_FORMAT;
  const int n = slot_channels(*s, found);
  if (n < 1) return KV_BAD_FORMAT;
  std::memcpy(channel, found, sizeof(int16_t) * 16 * n);
  return n;
}

static bool side_ok(const kv_side& s, int block) {
  int16_t found[MAX_SLOTS * 16];
  if (!shape_ok(s) || !s.codes || !s.channel || s.row_bytes < least_row_bytes(s)) return false;
  if (s.slots < 1 || s.slots != slot_channels(s, found) || std::memcmp(s.channel, found, sizeof(int16_t) * 16 * s.slots)) return false;
  if (is_codes(s) && !s.table && (s.kind == KV_TABLE || s.bits <= 5)) return false;
  if (s.axis == KV_NONE) return true;
  if ((s.axis != KV_TOKEN && s.axis != KV_BLOCK) || !s.scale || s.meta < KV_F32 || s.meta > KV_F16 || s.group < 1) return false;
  return s.axis == KV_TOKEN ? s.width % s.group == 0 : s.group % 16 == 0 && block % s.group == 0;
}

// Once a layer at set-up, and once a step for a view. capacity: blocks of the pool.
KV_API int32_t kv_check_format(const kv_format* f) {
  if (f->size != (int32_t)sizeof(kv_format)) return KV_BAD_SIZE;
  if (!f->group_of || !f->offset) return KV_BAD_FORMAT;
  const int keys = f->k[0].width + (f->keys > 1 ? f->k[1].width : 0);
  if (f->turn ? keys % 16 : keys != f->dim) return KV_BAD_FORMAT;
  if (f->back ? f->dim % 16 || f->v.width % 16 : f->v.width != f->dim) return KV_BAD_FORMAT;
  if (f->heads < 1 || f->group < 1 || f->block < 16 || f->block % 16 || f->keys < 1 || f->keys > 2) return KV_BAD_FORMAT;
  for (int i = 0; i < f->keys; i++)
    if (!side_ok(f->k[i], f->block)) return KV_BAD_FORMAT;
  return side_ok(f->v, f->block) ? KV_OK : KV_BAD_FORMAT;
}
KV_API int32_t kv_check_view(const kv_view* s, int32_t block, int32_t capacity) {
  if (s->size != (int32_t)sizeof(kv_view)) return KV_BAD_SIZE;
  const int64_t tables = (int64_t)s->N * s->groups;
  for (int64_t i = 0; i < tables * s->blocks; i++)
    if (s->table[i] < 0 || s->table[i] >= capacity) return KV_BAD_TABLE;
  for (int n = 0; n < s->N; n++) {
    if (s->count[n] < 0 || s->count[n] > s->rows || s->first[n] < 0) return KV_BAD_RANGE;
    for (int g = 0; g < s->groups; g++)
      for (int t = 0; t < s->count[n]; t++) {
        const int64_t i = ((int64_t)n * s->groups + g) * s->rows + t;
        if (s->lo[i] < 0 || s->hi[i] > (int64_t)s->blocks * block) return KV_BAD_RANGE;
      }
  }
  return KV_OK;
}

static bool fits(const kv_format& f, const kv_view& s) {  // every head's table is one of the view's
  for (int h = 0; h < f.heads; h++)
    if (f.group_of[h] < 0 || f.group_of[h] >= s.groups) return false;
  return true;
}

// What the fast arithmetic takes of a format: 1 some keys, 2 values, both, or 0.
KV_API int32_t kv_words(const kv_format* f) {
  if (kv_check_format(f) != KV_OK) return 0;
  Sides d;
  open_sides(*f, d);
  bool keys = false;
  for (int i = 0; i < f->keys; i++) keys = keys || as_bytes(f->k[i], d.of[i], *d.part[i], true);
  return (keys ? 1 : 0) + (as_bytes(f->v, d.of[2], *d.v, false) ? 2 : 0);
}

// What the kernels write of a format: 1 tokens as they come (no scale spans several), 2 whole blocks, both, or 0.
static int written(const kv_format& f) {
  if (!writes_all(f)) return 0;
  return (f.k[0].axis == KV_BLOCK || f.v.axis == KV_BLOCK ? 0 : 1) + (f.turn || f.back ? 0 : 2);
}
KV_API int32_t kv_writes(const kv_format* f) { return kv_check_format(f) == KV_OK ? written(*f) : 0; }

static int64_t part_floats(const kv_format& f) { return (int64_t)f.group * (lanes(f.v) + 1); }
static int splits(const kv_format& f, const kv_view& s) {
  int n = 0;
  while (split_start(n) < (int64_t)s.blocks * f.block) n++;
  return n;
}

// Floats of scratch that kv_attend needs: partials of every split, and the queries of decoding rows in slot order.
KV_API int64_t kv_workspace(const kv_format* f, const kv_view* s) {
  return (int64_t)s->N * f->heads * (splits(*f, *s) * part_floats(*f) + f->group * key_lanes(*f));
}

// q, out [row, head, channel], lse [row, head] (natural log; zeros and -inf where nothing is seen) of the rows of one
// or more views, over what they see of all: a window's few slots keep a thread busy beside the splits of a long body.
// join: out and lse hold a partial over other keys already.
KV_API int32_t kv_attend_all(const kv_source* source, int32_t sources, const float* q, int64_t q_head, int64_t q_row, float* out, int64_t out_head,
                             int64_t out_row, float* lse, int64_t lse_head, int64_t lse_row, int32_t join, float* work, int64_t work_floats,
                             int32_t threads) {
  struct { Sides sides; int parts; int64_t step; float *partials, *asked; } of[MAX_SOURCES];
  if (sources < 1 || sources > MAX_SOURCES) return KV_BAD_RANGE;
  for (int k = 0; k < sources; k++)
    if (source[k].format->size != (int32_t)sizeof(kv_format) || source[k].view->size != (int32_t)sizeof(kv_view)) return KV_BAD_SIZE;
  const kv_format& f = *source[0].format;
  const kv_view& s = *source[0].view;
  const int pairs = s.N * f.heads, chunks = (s.rows * f.group + ROWS - 1) / ROWS;
  int all = 0;
  for (int k = 0; k < sources; k++) {
    const kv_format& g = *source[k].format;
    const kv_view& v = *source[k].view;
    if (!fits(g, v)) return KV_BAD_TABLE;
    if (g.heads != f.heads || g.group != f.group || g.dim != f.dim || v.N != s.N || v.rows != s.rows) return KV_BAD_RANGE;
    for (int n = 0; n < s.N; n++)
      if (v.count[n] != s.count[n] || v.first[n] != s.first[n]) return KV_BAD_RANGE;
    if ((work_floats -= kv_workspace(&g, &v)) < 0) return KV_BAD_SPACE;
    of[k].parts = splits(g, v), of[k].step = part_floats(g), of[k].partials = work;
    of[k].asked = work + (int64_t)pairs * of[k].parts * of[k].step, work += kv_workspace(&g, &v);
    all += of[k].parts;
    open_sides(g, of[k].sides);
  }
  const Queries queries{q, q_head, q_row};
  const Output io{out, lse, out_head, out_row, lse_head, lse_row, join != 0};
  const auto output = [&](int k) { Output o = io; o.join = io.join || k; return o; };
  const int each = all > chunks ? all : chunks;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#pragma omp for schedule(static)
    for (int i = 0; i < pairs * f.group; i++) {
      const int n = i / f.group / f.heads, h = i / f.group % f.heads;
      for (int k = 0; k < sources && s.count[n] == 1; k++)
        take(*source[k].format, queries, h, i % f.group, s.first[n], of[k].asked + (int64_t)i * key_lanes(*source[k].format));
    }
#pragma omp for schedule(dynamic, 1)
    for (int i = 0; i < pairs * each; i++) {
      const int pair = i % pairs, n = pair / f.heads, h = pair % f.heads;
      int j = each - 1 - i / pairs;  // the longest first: what is left at the end is short
      if (s.count[n] != 1) {
        const int left = s.count[n] * f.group - j * ROWS;
        for (int k = 0; k < sources && left > 0; k++)
          chunk_item(*source[k].format, *source[k].view, of[k].sides, queries, output(k), n, h, j * ROWS, left < ROWS ? left : ROWS);
      } else if (j < all) {
        int k = 0;
        while (j >= of[k].parts) j -= of[k++].parts;
        const kv_format& g = *source[k].format;
        decode_item(g, *source[k].view, of[k].sides, of[k].asked + (int64_t)pair * g.group * key_lanes(g), n, h, j,
                    of[k].partials + ((int64_t)pair * of[k].parts + j) * of[k].step);
      }
    }
#pragma omp for schedule(static)
    for (int i = 0; i < pairs * f.group; i++) {
      const int pair = i / f.group, n = pair / f.heads;
      for (int k = 0; k < sources && s.count[n] == 1; k++)
        join_splits(*source[k].format, *source[k].view, output(k), n, pair % f.heads, i % f.group, of[k].parts,
                    of[k].partials + (int64_t)pair * of[k].parts * of[k].step, of[k].step);
    }
  }
  return KV_OK;
}
KV_API int32_t kv_attend(const kv_format* f, const kv_view* s, const float* q, int64_t q_head, int64_t q_row, float* out, int64_t out_head,
                         int64_t out_row, float* lse, int64_t lse_head, int64_t lse_row, int32_t join, float* work, int64_t work_floats, int32_t threads) {
  const kv_source one{f, s};
  return kv_attend_all(&one, 1, q, q_head, q_row, out, out_head, out_row, lse, lse_head, lse_row, join, work, work_floats, threads);
}

// Encodes k, v [T, head, channel] into token rows [heads, T] (slot of each, as in codes). Returns how many vectors hold a
// number that is not finite or does not fit: their slots are not to be used.
KV_API int32_t kv_append(const kv_format* f, const float* k, int64_t k_head, int64_t k_row, const float* v, int64_t v_head, int64_t v_row,
                         const int64_t* rows, int64_t capacity, int32_t T, int32_t threads) {
  if (f->size != (int32_t)sizeof(kv_format)) return KV_BAD_SIZE;
  if (!(written(*f) & 1)) return KV_BAD_FORMAT;
  for (int64_t i = 0; i < (int64_t)f->heads * T; i++)
    if (rows[i] < 0 || rows[i] >= capacity) return KV_BAD_TABLE;
  int32_t bad = 0;
  const int each = f->heads * T;  // keys first, then values: each thread reads one of two matrices
#pragma omp parallel for schedule(static) reduction(+ : bad) num_threads(threads) if (threads > 1 && (f->turn || each > 16))
  for (int i = 0; i < 2 * each; i++) {
    const int h = i % each / T, t = i % T;
    bad += !(i < each ? put_key(*f, k + h * k_head + t * k_row, h, rows[i]) : put_value(*f, v + h * v_head + t * v_row, h, rows[i - each]));
  }
  return bad;
}

// n numbers of kind KV_F32, KV_BF16 or KV_F16 from the first on; n a multiple of 16.
static const float* as_floats(int32_t kind, const void* p, int64_t first, int64_t n) {
  if (kind == KV_F32) return (const float*)p + first;
  float* out = buffer().get((size_t)n);
  const uint16_t* from = (const uint16_t*)p + first;
  for (int64_t i = 0; i < n; i += 16) store(out + i, kind == KV_BF16 ? load_bf16(from + i) : load_half(from + i));
  return out;
}

// Encodes whole blocks: block rows src [count] of the exact arrays k, v [rows, B, width], of a kind of float, to block rows
// dst [count]. Returns the number of bad vectors or blocks, as kv_append does.
KV_API int32_t kv_seal(const kv_format* f, int32_t kind, const void* k, const void* v, const int64_t* src, int64_t src_rows, const int64_t* dst,
                       int64_t dst_rows, int32_t count, int32_t threads) {
  if (f->size != (int32_t)sizeof(kv_format)) return KV_BAD_SIZE;
  if (!(written(*f) & 2) || kind < KV_F32 || kind > KV_F16) return KV_BAD_FORMAT;
  for (int i = 0; i < count; i++)
    if (src[i] < 0 || src[i] >= src_rows || dst[i] < 0 || dst[i] >= dst_rows) return KV_BAD_TABLE;
  int32_t bad = 0;
#pragma omp parallel for schedule(static) reduction(+ : bad) num_threads(threads) if (threads > 1 && count > 1)
  for (int i = 0; i < 2 * count; i++) {
    const kv_side& s = i % 2 ? f->v : f->k[0];
    const int64_t n = (int64_t)f->block * s.width;
    const float* x = as_floats(kind, i % 2 ? v : k, src[i / 2] * n, n);
    if (s.axis == KV_BLOCK) bad += !put_block(s, x, f->block, dst[i / 2]);
    else
      for (int t = 0; t < f->block; t++) bad += !put(s, x + (int64_t)t * s.width, {}, dst[i / 2] * f->block + t);
  }
  return bad;
}

// mass [N, heads, G, columns]: sum over a sequence's rows of exp(logit - lse); lse +inf = the row has no vote.
KV_API int32_t kv_mass(const kv_format* f, const kv_view* s, const float* q, int64_t q_head, int64_t q_row, const float* lse, int64_t lse_head,
                       int64_t lse_row, float* mass, int32_t columns, int32_t threads) {
  if (f->size != (int32_t)sizeof(kv_format) || s->size != (int32_t)sizeof(kv_view)) return KV_BAD_SIZE;
  if (!fits(*f, *s)) return KV_BAD_TABLE;
  Sides d;
  open_sides(*f, d);
  const Queries queries{q, q_head, q_row};
  const Output io{nullptr, const_cast<float*>(lse), 0, 0, lse_head, lse_row, false};
  const int tiles = (columns + TILE - 1) / TILE, pairs = s->N * f->heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int i = 0; i < pairs * tiles; i++)
    mass_item(*f, *s, d, queries, io, i / tiles / f->heads, i / tiles % f->heads, i % tiles * TILE, mass + (int64_t)(i / tiles) * f->group * columns, columns);
  return KV_OK;
}
