// What each (row, kv head) attends to, given scores: one block each. Shares of the ledger.
#pragma once

#include "cuda/score_items.cuh"
#include "cuda/select_keys.cuh"
#include "cuda/tables.cuh"

namespace kvpager::gpu::scoring {

struct SelectJob {
  SelectParams p;
  const double* scores = nullptr;
  int64_t stride = 0;
  int32_t first_slot = 0;
  int32_t slots = 0;
  int32_t cached = 0;  // keys
  int32_t words = 0;   // bitmap words of the most chunks
};

// Softmax over the scores of one row and head, in units of 2^-40, by one block. Writes the extremes,
// which nobody reads after the first barrier of choose(), and the sums, which are its own.
KVP_DEVICE void add_shares(const SelectParams& p, const SelectShared& shared, const Part& part,
                           int32_t row, int32_t head, const double* scores) {
  const Range range = ledger_range(p, part, p.tables.rows[row].position);
  if (range.begin >= range.end) return;
  const double size = static_cast<double>(largest_query(p, row, head));
  const double scale = static_cast<double>(p.scaling) * (size < kNegligible ? 0.0 : size / 127.0);
  double top = scores[range.begin];
  for (int64_t i = range.begin + thread_index(); i < range.end; i += kSelectThreads) {
    top = larger(top, scores[i]);
  }
  for (int mask = 16; mask > 0; mask /= 2) top = larger(top, shuffle_xor(top, mask));
  double* tops = reinterpret_cast<double*>(shared.extremes);
  if (lane_index() == 0) tops[warp_index()] = top;
  sync_block();
  for (int i = 0; i < kSelectWarps; ++i) top = larger(top, tops[i]);
  const auto weight = [&](int64_t i) {
    constexpr float kLog2E = 1.44269504f;
    const float below = static_cast<float>((scores[i] - top) * scale);
    return exp2_approximate(below * kLog2E);
  };
  float sum = 0.0f;
  for (int64_t i = range.begin + thread_index(); i < range.end; i += kSelectThreads) {
    sum += weight(i);
  }
  for (int mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  if (lane_index() == 0) shared.sums[warp_index()] = sum;
  sync_block();
  sum = 0.0f;
  for (int i = 0; i < kSelectWarps; ++i) sum += shared.sums[i];
  for (int64_t i = range.begin + thread_index(); i < range.end; i += kSelectThreads) {
    const double share = static_cast<double>(weight(i)) / static_cast<double>(sum);
    if (!(share > 0.0 && share <= 1.0)) continue;  // scores that are not finite give none
    atomic_add(p.mass + part.first + i, static_cast<uint64_t>(share * 0x1p40 + 0.5));
  }
}

KVP_KERNEL KVP_BOUNDS(kSelectThreads, 4) select_rows(const SelectJob job) {
  const SelectParams& p = job.p;
  const int32_t slot = static_cast<int32_t>(block_index() / p.shape.kv_heads);
  const int32_t head = static_cast<int32_t>(block_index() % p.shape.kv_heads);
  if (job.first_slot + slot >= ordered_rows(p.tables)) return;
  const int32_t row = p.tables.order[job.first_slot + slot];
  const Row& own = p.tables.rows[row];
  const Part& part = p.tables.parts[own.part];
  const Spans spans = spans_of(p, own.position);
  const SelectShared shared = select_shared(job.cached, job.words);
  const double* scores = job.scores == nullptr
                             ? nullptr
                             : job.scores + (int64_t{slot} * p.shape.kv_heads + head) * job.stride;

  const int64_t sinks_end = least(spans.sinks_end, spans.end);
  const int64_t middle_begin = most(spans.low, sinks_end);
  const int64_t middle_end = p.kind == 0 ? spans.low : most(middle_begin, spans.recent_begin);
  const bool scored = p.kind == 1 && middle_begin < middle_end;
  if (scored) {
    Middle middle{scores,
                  middle_begin,
                  middle_end,
                  static_cast<int32_t>(middle_begin / 32),
                  static_cast<int32_t>((middle_end + 31) / 32),
                  job.cached,
                  shared};
    const int64_t tokens = p.shape.chunk_tokens;
    // Until choose() is done, a warp alone reads and writes its words.
    for (int32_t word = middle.first_word + warp_index() + kSelectWarps * lane_index();
         word < middle.last_word; word += kSelectThreads) {
      uint32_t bits = 0;
      for (int32_t i = 0; i < p.always_count; ++i) {
        bits |= bits_of_range(int64_t{word} * 32, p.always[2 * i] / tokens,
                              (p.always[2 * i + 1] + tokens - 1) / tokens);
      }
      shared.always[word] = bits & bits_of_range(int64_t{word} * 32, middle_begin, middle_end);
    }
    sync_warp();
    const Threshold threshold = find_threshold(middle, p.k);
    choose(middle, threshold);
  }
  const int64_t line = (int64_t{row} * p.shape.kv_heads + head) * p.selected_stride;
  for (int64_t word = thread_index(); word * 32 < most(spans.end, p.selected_stride * 8);
       word += kSelectThreads) {
    const int64_t first = word * 32;
    uint32_t bits =
        bits_of_range(first, spans.low, sinks_end) | bits_of_range(first, middle_end, spans.end);
    if (scored && first < middle_end && first + 32 > middle_begin) {
      bits |= shared.always[word] | shared.above[word];
    }
    if (p.selected != nullptr && word * 4 < p.selected_stride) {
      reinterpret_cast<uint32_t*>(p.selected + line)[word] = bits;
    }
    if (p.read == nullptr) continue;
    for (; bits != 0; bits &= bits - 1) {
      p.read[part.first + first + count_bits((bits & (0u - bits)) - 1)] = 1;
    }
  }
  if (p.kind == 1 && p.mass != nullptr && part.score_row == row) {
    add_shares(p, shared, part, row, head, scores);
  }
}

// Dense rows: the ledger's shares alone, a slot per part.
KVP_KERNEL KVP_BOUNDS(kSelectThreads, 4) share_mass(const SelectJob job) {
  const SelectParams& p = job.p;
  const int32_t slot = static_cast<int32_t>(block_index() / p.shape.kv_heads);
  const int32_t head = static_cast<int32_t>(block_index() % p.shape.kv_heads);
  if (job.first_slot + slot >= p.tables.header->parts) return;
  const Part& part = p.tables.parts[job.first_slot + slot];
  if (part.score_row < 0) return;
  add_shares(p, select_shared(job.cached, job.words), part, part.score_row, head,
             job.scores + (int64_t{slot} * p.shape.kv_heads + head) * job.stride);
}

}  // namespace kvpager::gpu::scoring
