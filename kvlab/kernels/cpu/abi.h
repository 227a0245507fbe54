// What both halves of the library export with: kv.cpp (pages) and step.cpp (a model's layer).
#pragma once
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(_WIN32)
#define KV_API extern "C" __declspec(dllexport)
#else
#define KV_API extern "C" __attribute__((visibility("default")))
#endif

#include <cstdint>

enum { KV_OK = 0, KV_BAD_SIZE = -1, KV_BAD_FORMAT = -2, KV_BAD_TABLE = -3, KV_BAD_RANGE = -4, KV_BAD_SPACE = -5 };

// Of kv.cpp, which says what they mean.
struct kv_format;
struct kv_view;
struct kv_source {
  const kv_format* format;
  const kv_view* view;
};
enum { MAX_SOURCES = 2 };
KV_API int32_t kv_attend_all(const kv_source* source, int32_t sources, const float* q, int64_t q_head, int64_t q_row, float* out, int64_t out_head,
                             int64_t out_row, float* lse, int64_t lse_head, int64_t lse_row, int32_t join, float* work, int64_t work_floats,
                             int32_t threads);
KV_API int32_t kv_append(const kv_format* f, const float* k, int64_t k_head, int64_t k_row, const float* v, int64_t v_head, int64_t v_row,
                         const int64_t* rows, int64_t capacity, int32_t T, int32_t threads);
KV_API int32_t kv_seal(const kv_format* f, int32_t kind, const void* k, const void* v, const int64_t* src, int64_t src_rows, const int64_t* dst,
                       int64_t dst_rows, int32_t count, int32_t threads);
