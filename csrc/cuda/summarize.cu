// Summaries of whole chunks, one block per (chunk, layer, kv head): the bytes bits2::summarize
// writes.
//
// The K tile comes through shared memory in float32, a slab of dimensions at a time, rows one
// element longer than a chunk so that threads on a column each have a bank. A thread makes the
// levels of whole dimensions, because their sums have an order. Scales need the levels of all
// dimensions before the first code can be written: tiles of one slab are read once, larger ones
// twice.
#include <cmath>
#include <cstdint>

#include "cuda/codes.cuh"
#include "cuda/kernels.h"
#include "cuda/portable.h"
#include "cuda/summarize_steps.cuh"

namespace kvpager::gpu {
namespace {

using namespace scoring;

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kSlabKeys = 8192;
constexpr int kMaxDim = 512;
constexpr int kBits = 2;  // of a code

// What a dimension is summarised by: low and step.
struct Levels {
  double first = 0.0;
  double second = 0.0;
};

struct Job {
  SummarizeParams p;
  int32_t slab_dims = 0;  // a multiple of 32
};

KVP_DEVICE int32_t slab_pitch(const Job& job) { return job.p.shape.chunk_tokens + 1; }

// Keys of dimensions [first, first + slab_dims) as [dim][pitch]; dimensions past the last are
// zeros.
KVP_DEVICE void load_slab(const Job& job, const unsigned char* tile, int first, float* slab) {
  const Shape& shape = job.p.shape;
  const int tokens = shape.chunk_tokens;
  const int pitch = slab_pitch(job);
  const int keys =
      (shape.k_dim - first < job.slab_dims ? shape.k_dim - first : job.slab_dims) * tokens;
  for (int at = thread_index(); codes::coded(shape.k_dtype) && at < keys; at += kThreads) {
    const int token = at % tokens;
    slab[at / tokens * pitch + token] =
        finite(codes::key_of(tile, shape.k_dtype, tokens, shape.k_dim, first + at / tokens, token));
  }
  const int element = shape.k_dtype == DType::kFloat32 ? 4 : 2;
  const int per_load = 16 / element;
  const unsigned char* from = tile + int64_t{first} * tokens * element;
  for (int at = thread_index() * per_load; !codes::coded(shape.k_dtype) && at < keys;
       at += kThreads * per_load) {
    const Words words = load_words(from + int64_t{at} * element);
    float* to = slab + at / tokens * pitch + at % tokens;
    KVP_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (shape.k_dtype == DType::kFloat32) {
        to[i] = finite(bits_to_float(words.w[i]));
      } else {
        to[2 * i] = finite(half_to_float(words.w[i] & 0xFFFFu, shape.k_dtype));
        to[2 * i + 1] = finite(half_to_float(words.w[i] >> 16, shape.k_dtype));
      }
    }
  }
  for (int at = keys + thread_index(); at < job.slab_dims * tokens; at += kThreads) {
    slab[at / tokens * pitch + at % tokens] = 0.0f;
  }
}

KVP_DEVICE Levels range_of(const float* keys, int tokens) {
  float low = keys[0];
  float high = keys[0];
  for (int t = 1; t < tokens; ++t) {
    low = keys[t] < low ? keys[t] : low;
    high = keys[t] > high ? keys[t] : high;
  }
  return {static_cast<double>(low), static_cast<double>(high)};
}

KVP_DEVICE Levels sketch_levels(const float* keys, int tokens) {
  const Levels range = range_of(keys, tokens);
  return {range.first, (range.second - range.first) / 3};
}

// Of every thread's, to every thread; `partial` has one element per warp.
KVP_DEVICE double block_largest(double value, double* partial) {
  for (int mask = 16; mask > 0; mask /= 2) value = larger(value, shuffle_xor(value, mask));
  if (lane_index() == 0) partial[warp_index()] = value;
  sync_block();
  double all = partial[0];
  for (int i = 1; i < kWarps; ++i) all = larger(all, partial[i]);
  return all;
}

struct Shared {
  float* slab;      // [slab_dims][pitch]
  double* partial;  // [2][kWarps]
  Levels* levels;   // [k_dim]
  float* base;      // [slab_dims], sketches: codes count from here
  float* inverse;   // [slab_dims], in steps of 1 / this; 0: no codes
};

constexpr int64_t kLevelsOffset = 2 * kWarps * 8;
constexpr int64_t kBaseOffset = kLevelsOffset + int64_t{kMaxDim} * 16;

KVP_DEVICE Shared shared_parts(const Job& job) {
  unsigned char* bytes = shared_memory();
  Shared shared;
  shared.partial = reinterpret_cast<double*>(bytes);
  shared.levels = reinterpret_cast<Levels*>(bytes + kLevelsOffset);
  shared.base = reinterpret_cast<float*>(bytes + kBaseOffset);
  shared.inverse = shared.base + job.slab_dims;
  shared.slab = shared.inverse + job.slab_dims;
  return shared;
}

int64_t shared_bytes_of(const Job& job) {
  return kBaseOffset + 8 * int64_t{job.slab_dims} +
         4 * int64_t{job.slab_dims} * (job.p.shape.chunk_tokens + 1);
}

struct Page {
  const unsigned char* tile;
  unsigned char* out;
};

KVP_DEVICE Page page_of(const SummarizeParams& p) {
  const int64_t pages = int64_t{p.shape.layers} * p.shape.kv_heads;
  const int64_t chunk = block_index() / pages;
  const int64_t page = block_index() % pages;
  const int64_t layer = page / p.shape.kv_heads;
  const int64_t head = page % p.shape.kv_heads;
  const int64_t summary = int64_t{p.first_layer} * p.shape.kv_heads + page;
  return {static_cast<const unsigned char*>(p.chunks[chunk]) + p.shape.slice_offset +
              layer * p.shape.slice_bytes + head * p.shape.page_bytes,
          static_cast<unsigned char*>(p.summaries[chunk]) + summary * p.summary_page_bytes};
}

KVP_DEVICE uint32_t key_code(float key, float base, float inverse, float top) {
  const float offset = key - base;
  float level = offset * inverse;
  level = level > 0.0f ? level : 0.0f;
  level = level < top ? level : top;
  return static_cast<uint32_t>(static_cast<int32_t>(level + 0.5f));
}

KVP_KERNEL KVP_BOUNDS(kThreads, 4) summarize_sketch(const Job job) {
  const SummarizeParams& p = job.p;
  const Page page = page_of(p);
  const Shared shared = shared_parts(job);
  const int dims = p.shape.k_dim;
  const int pitch = slab_pitch(job);
  const int tokens = p.shape.chunk_tokens;

  Levels largest;
  for (int first = 0; first < dims; first += job.slab_dims) {
    load_slab(job, page.tile, first, shared.slab);
    sync_block();
    const int count = dims - first < job.slab_dims ? dims - first : job.slab_dims;
    for (int i = thread_index(); i < count; i += kThreads) {
      const Levels levels = sketch_levels(shared.slab + i * pitch, tokens);
      largest.first = larger(largest.first, fabs(levels.first));
      largest.second = larger(largest.second, levels.second);
      shared.levels[first + i] = levels;
    }
    sync_block();
  }
  const float low_scale = short_scale(block_largest(largest.first, shared.partial), 32767);
  const float step_scale = short_scale(block_largest(largest.second, shared.partial + kWarps), 255);

  const int padded = (dims + 31) / 32 * 32;
  const int64_t code_bytes = int64_t{padded} * tokens * kBits / 8;
  int16_t* lows = reinterpret_cast<int16_t*>(page.out + code_bytes);
  unsigned char* steps = page.out + code_bytes + 2 * padded;
  constexpr int kFields = 8 / kBits;       // codes per byte
  constexpr int kGroupDims = 4 * kFields;  // dimensions per word
  const float top = static_cast<float>((1 << kBits) - 1);
  for (int first = 0; first < padded; first += job.slab_dims) {
    const int here = padded - first < job.slab_dims ? padded - first : job.slab_dims;
    sync_block();
    if (dims > job.slab_dims) load_slab(job, page.tile, first, shared.slab);
    for (int i = thread_index(); i < here; i += kThreads) {
      const int d = first + i;
      int32_t low = 0;
      int32_t step = 0;
      float base = 0.0f;
      float inverse = 0.0f;
      if (d < dims) {
        low = quantize(shared.levels[d].first, low_scale, 32767);
        step = quantize(shared.levels[d].second, step_scale, 255);
        if (step != 0) {
          // Codes follow the levels as they are stored, not as they were measured.
          base = static_cast<float>(low * static_cast<double>(low_scale));
          inverse = static_cast<float>(1.0 / (step * static_cast<double>(step_scale)));
        }
      }
      lows[d] = static_cast<int16_t>(low);
      steps[d] = static_cast<unsigned char>(step);
      shared.base[i] = base;
      shared.inverse[i] = inverse;
    }
    sync_block();
    uint32_t* codes = reinterpret_cast<uint32_t*>(page.out) + first / kGroupDims * tokens;
    for (int i = thread_index(); i < here / kGroupDims * tokens; i += kThreads) {
      const int group = i / tokens * kGroupDims;
      const float* column = shared.slab + group * pitch + i % tokens;
      uint32_t word = 0;
      for (int s = 0; s < kFields; ++s) {
        for (int b = 0; b < 4; ++b) {
          const int d = 4 * s + b;
          if (shared.inverse[group + d] == 0.0f) continue;  // its step is 0
          word |=
              key_code(column[d * pitch], shared.base[group + d], shared.inverse[group + d], top)
              << (8 * b + kBits * s);
        }
      }
      codes[i] = word;
    }
  }
  const int64_t tail_bytes = (3 * int64_t{padded} + 8 + 63) / 64 * 64 - 3 * int64_t{padded};
  uint32_t* tail = reinterpret_cast<uint32_t*>(steps + padded);
  for (int i = thread_index(); i < tail_bytes / 4; i += kThreads) {
    tail[i] = i == 0 ? float_to_bits(low_scale) : i == 1 ? float_to_bits(step_scale) : 0u;
  }
}

}  // namespace

int summarize(const SummarizeParams& params, void* stream) {
  Job job;
  job.p = params;
  const int padded = (params.shape.k_dim + 31) / 32 * 32;
  const int most = kSlabKeys / params.shape.chunk_tokens;
  job.slab_dims = padded < most ? padded : most;
  Grid grid;
  grid.blocks = int64_t{params.count} * params.shape.layers * params.shape.kv_heads;
  grid.threads = kThreads;
  grid.shared_bytes = shared_bytes_of(job);
  grid.stream = stream;
  return launch(summarize_sketch, grid, job);
}

}  // namespace kvpager::gpu
