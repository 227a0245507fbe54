// C ABI of a model's layer around its attention, for packed rows x [T, width] of float32:
//   kv_front  norm -> q, k, v -> norm of q and k -> rope         kv_back  x += o(attention); x += down(silu(gate) * up)
//   kv_head   norm -> logits                                     kv_step   all layers, their attention in between
// Widths of x, qkv and logits are padded to a multiple of 32 (kv_width); what lies beyond stays zero.
#include "abi.h"
#include "dense.h"

struct kv_layer {
  int32_t size, turned, dim, wide;  // turned: heads that rope turns, the first of qkv; wide: outputs of gate, of up
  float eps, qk_eps;
  const float *norm, *mlp_norm, *qk_norm;  // [inputs], [inputs], [turned, dim] or null
  kv_matrix qkv, o, gate_up, down;
};

static bool matrix_ok(const kv_matrix& m) {
  if (m.size != (int32_t)sizeof(kv_matrix) || m.kind < KV_DENSE_F32 || m.kind > KV_DENSE_INT8 || !m.weight) return false;
  if (m.inputs < 1 || m.outputs < 1 || m.inputs > 1 << 20) return false;
  return m.kind != KV_DENSE_INT8 || (m.scale && m.top >= 1.f && m.top <= 32767.f);
}

static int32_t kv_width(int32_t outputs) { return (outputs + UNIT - 1) / UNIT * UNIT; }

KV_API int32_t kv_check_matrix(const kv_matrix* m) {
  return m->size != (int32_t)sizeof(kv_matrix) ? KV_BAD_SIZE : matrix_ok(*m) ? KV_OK : KV_BAD_FORMAT;
}
KV_API int32_t kv_check_layer(const kv_layer* l) {
  if (l->size != (int32_t)sizeof(kv_layer)) return KV_BAD_SIZE;
  for (const kv_matrix* m : {&l->qkv, &l->o, &l->gate_up, &l->down})
    if (!matrix_ok(*m)) return KV_BAD_FORMAT;
  if (!l->norm || !l->mlp_norm || l->dim < 2 || l->dim % 2 || l->turned < 0) return KV_BAD_FORMAT;
  if ((int64_t)l->turned * l->dim > l->qkv.outputs || l->qkv.inputs != l->o.outputs || l->o.outputs != l->down.outputs) return KV_BAD_FORMAT;
  if (l->gate_up.inputs != l->qkv.inputs || l->down.inputs != l->wide || l->gate_up.outputs != kv_width(2 * ((l->wide + 15) / 16 * 16))) return KV_BAD_FORMAT;
  return KV_OK;
}

// Bytes of scratch for T rows of a layer, and of one matrix alone: prepared rows, their scales, what gate and up give.
static int64_t scale_bytes(int64_t T) { return (4 * T + 63) / 64 * 64; }
static int64_t input_bytes(int inputs, int64_t T) { return scale_bytes(T) + 4 * T * row_elements(inputs); }
static int64_t inner(const kv_layer& l) { return (int64_t)kv_width(l.gate_up.outputs) / 2; }
KV_API int64_t kv_layer_bytes(const kv_layer* l, int32_t T) {
  int most = l->qkv.inputs;
  for (const kv_matrix* m : {&l->o, &l->down}) most = m->inputs > most ? m->inputs : most;
  return input_bytes(most, T) + 4 * T * inner(*l);
}
KV_API int64_t kv_matrix_bytes(const kv_matrix* m, int32_t T) { return input_bytes(m->inputs, T); }

static Inputs inputs_of(const kv_matrix& m, char* work, int64_t T) {
  return {work + scale_bytes(T), (float*)work, row_elements(m.inputs) * (m.kind == KV_DENSE_INT8 ? 2 : 4)};
}

// x [T] -> out, by all threads of a parallel region; `in` is theirs together.
static void multiply(const kv_matrix& m, const float* x, int64_t x_row, const float* norm, float eps, int T, const Inputs& in, const Out& out) {
#pragma omp for schedule(static)
  for (int t = 0; t < T; t++) prepare(m, x + t * x_row, norm, eps, in, t);
#pragma omp for schedule(static)
  for (int u = 0; u < units(m); u++) unit_of(m, in, out, u, T);
}

// Channel j of a head turns with j + dim / 2; before that, each head's RMS norm where the model has one.
static void turn(const kv_layer& l, float* x, const float* weight, const float* rope) {
  const int half = l.dim / 2;
  if (weight) {
    float sum = 0.f;
    for (int i = 0; i < l.dim; i++) sum += x[i] * x[i];
    const float factor = 1.f / std::sqrt(sum / (float)l.dim + l.qk_eps);
    for (int i = 0; i < l.dim; i++) x[i] = x[i] * factor * weight[i];
  }
  for (int i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half];
    x[i] = a * rope[i] - b * rope[i + half];
    x[i + half] = b * rope[i] + a * rope[i + half];
  }
}

// x [T, x_row] -> qkv [T, qkv_row]: heads side by side, q, k and v. rope [T, dim]: dim / 2 cosines, then as many sines.
KV_API int32_t kv_front(const kv_layer* l, const float* x, int64_t x_row, int32_t T, const float* rope, float* qkv, int64_t qkv_row,
                        void* work, int64_t work_bytes, int32_t threads) {
  if (l->size != (int32_t)sizeof(kv_layer)) return KV_BAD_SIZE;
  if (T < 0 || x_row < l->qkv.inputs || qkv_row < kv_width(l->qkv.outputs)) return KV_BAD_RANGE;
  if (work_bytes < kv_layer_bytes(l, T)) return KV_BAD_SPACE;
  const Inputs in = inputs_of(l->qkv, (char*)work, T);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    multiply(l->qkv, x, x_row, l->norm, l->eps, T, in, {qkv, qkv_row, STORE});
#pragma omp for schedule(static)
    for (int i = 0; i < T * l->turned; i++) {
      const int t = i / l->turned, h = i % l->turned;
      turn(*l, qkv + t * qkv_row + h * l->dim, l->qk_norm ? l->qk_norm + h * l->dim : nullptr, rope + (int64_t)t * l->dim);
    }
  }
  return KV_OK;
}

// attended [T, a_row] and x [T, x_row], which becomes the next layer's.
KV_API int32_t kv_back(const kv_layer* l, const float* attended, int64_t a_row, float* x, int64_t x_row, int32_t T, void* work, int64_t work_bytes,
                       int32_t threads) {
  if (l->size != (int32_t)sizeof(kv_layer)) return KV_BAD_SIZE;
  if (T < 0 || a_row < l->o.inputs || x_row < kv_width(l->o.outputs)) return KV_BAD_RANGE;
  if (work_bytes < kv_layer_bytes(l, T)) return KV_BAD_SPACE;
  float* h = (float*)work;
  char* rest = (char*)(h + T * inner(*l));
  const Inputs a = inputs_of(l->o, rest, T), b = inputs_of(l->gate_up, rest, T), c = inputs_of(l->down, rest, T);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    multiply(l->o, attended, a_row, nullptr, 0.f, T, a, {x, x_row, ADD});
    multiply(l->gate_up, x, x_row, l->mlp_norm, l->eps, T, b, {h, inner(*l), GATE});
    multiply(l->down, h, inner(*l), nullptr, 0.f, T, c, {x, x_row, ADD});
  }
  return KV_OK;
}

KV_API int32_t kv_head(const kv_matrix* m, const float* norm, float eps, const float* x, int64_t x_row, int32_t T, float* out, int64_t out_row, void* work,
                       int64_t work_bytes, int32_t threads) {
  if (m->size != (int32_t)sizeof(kv_matrix)) return KV_BAD_SIZE;
  if (T < 0 || x_row < m->inputs || out_row < kv_width(m->outputs)) return KV_BAD_RANGE;
  if (work_bytes < kv_matrix_bytes(m, T)) return KV_BAD_SPACE;
  const Inputs in = inputs_of(*m, (char*)work, T);
#pragma omp parallel num_threads(threads) if (threads > 1)
  multiply(*m, x, x_row, norm, eps, T, in, {out, out_row, STORE});
  return KV_OK;
}

// What a step writes and reads of pages, for all layers. Pointers by layer, [layers]; null where a layer is of another class.
struct kv_write {
  const kv_format* const* format;
  const int64_t* const* rows;
  int64_t capacity;
};
struct kv_moved {  // blocks that are encoded after the writes
  const kv_format* const* format;
  const int64_t* const* src;
  const int64_t* const* dst;
  const void *k, *v;
  int64_t kind, src_rows, dst_rows, count;
};
struct kv_read {  // in this order; join: what the rows of the one before read besides
  const kv_format* const* format;
  const kv_view* view;
  int64_t join;
};
struct kv_turn {
  int32_t size, layers, T, heads, kv_heads, dim, writes, moves, reads, threads;
  const kv_layer* const* layer;
  const kv_write* write;
  const kv_moved* move;
  const kv_read* read;
  float *x, *qkv, *attended, *lse;  // [T, x_row], [T, qkv_row], [T, heads * dim], [T, heads]
  const float* rope;
  int64_t x_row, qkv_row, pages_floats, work_bytes;
  float* pages_work;
  void* work;
};

// Returns 0, a refusal, or 1 + the layer whose keys or values hold a number that cannot be written: x means nothing then.
KV_API int32_t kv_step(const kv_turn* s) {
  if (s->size != (int32_t)sizeof(kv_turn)) return KV_BAD_SIZE;
  if (s->heads < 1 || s->kv_heads < 1 || s->dim < 1 || s->qkv_row < (int64_t)(s->heads + 2 * s->kv_heads) * s->dim) return KV_BAD_RANGE;
  const int64_t width = (int64_t)s->heads * s->dim;
  const float *k = s->qkv + width, *v = k + (int64_t)s->kv_heads * s->dim;
  for (int l = 0; l < s->layers; l++)
    if (s->layer[l]->size != (int32_t)sizeof(kv_layer) || s->layer[l]->dim != s->dim || s->layer[l]->o.inputs != width ||
        s->layer[l]->qkv.outputs != (s->heads + 2 * s->kv_heads) * s->dim)
      return KV_BAD_FORMAT;
  for (int l = 0; l < s->layers; l++) {
    int32_t code = kv_front(s->layer[l], s->x, s->x_row, s->T, s->rope, s->qkv, s->qkv_row, s->work, s->work_bytes, s->threads);
    for (const kv_write* w = s->write; !code && w < s->write + s->writes; w++)
      if (w->format[l]) code = kv_append(w->format[l], k, s->dim, s->qkv_row, v, s->dim, s->qkv_row, w->rows[l], w->capacity, s->T, s->threads);
    for (const kv_moved* m = s->move; !code && m < s->move + s->moves; m++)
      if (m->format[l]) code = kv_seal(m->format[l], (int32_t)m->kind, m->k, m->v, m->src[l], m->src_rows, m->dst[l], m->dst_rows, (int32_t)m->count, s->threads);
    if (code > 0) return 1 + l;
    for (int i = 0; !code && i < s->reads;) {
      kv_source source[MAX_SOURCES];
      const int join = s->read[i].join != 0;
      int n = 0;
      do source[n++] = {s->read[i].format[l], s->read[i].view};
      while (++i < s->reads && s->read[i].join && n < MAX_SOURCES);
      if (source[0].format)
        code = kv_attend_all(source, n, s->qkv, s->dim, s->qkv_row, s->attended, s->dim, width, s->lse, 1, s->heads, join, s->pages_work,
                             s->pages_floats, s->threads);
    }
    if (!code) code = kv_back(s->layer[l], s->attended, width, s->x, s->x_row, s->T, s->work, s->work_bytes, s->threads);
    if (code) return code;
  }
  return KV_OK;
}
