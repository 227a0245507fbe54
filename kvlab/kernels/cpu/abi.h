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

enum { KV_OK = 0, KV_BAD_SIZE = -1, KV_BAD_FORMAT = -2, KV_BAD_TABLE = -3, KV_BAD_RANGE = -4, KV_BAD_SPACE = -5 };
