// Scores of sealed summaries at one layer, for the rows of a forward: rows of one sequence share one
// reading of its summaries, and the work is divided over threads by chunks and kv heads, so that a
// lone row keeps all of them busy. Which thread scores what changes no score.
#pragma once

#include <cstddef>
#include <vector>

#include "kvpager/selection.h"
#include "kvpager/tensor.h"
#include "kvpager/thread_pool.h"

namespace kvpager {

// A row of the queries, and which of a sequence's summaries it is held against.
struct ScanRow {
  int64_t row = 0;
  const std::vector<const std::byte*>* summaries = nullptr;  // [chunks] a chunk's first page
  CandidateRange range;
};

// Where summaries lie.
struct ScanLayout {
  const Layout* layout = nullptr;
  int64_t page_bytes = 0;  // of one (chunk, layer, kv head)
};

// Buffers grow to what was asked for and are reused, until released. Not thread-safe.
class Scan {
 public:
  // REQUIRES: every range lies within its summaries; q is [rows, a multiple of kv_heads, k_dim].
  void run(const ScanLayout& where, int layer, const TensorView& q,
           const std::vector<ScanRow>& rows, ThreadPool& threads);

  int64_t bytes() const;
  void release() noexcept { *this = Scan(); }

  // Of rows[i] as given to run(): [range.end - range.begin].
  const double* scores(size_t i, int kv_head) const {
    return scores_.data() + first_[i * heads_ + static_cast<size_t>(kv_head)];
  }
  // A score times this is about a dot product.
  double scale(size_t i, int kv_head) const {
    return scales_[i * heads_ + static_cast<size_t>(kv_head)];
  }

 private:
  struct Item {
    size_t first_row, last_row;  // of order_
    int head;
    int64_t begin, end;  // chunks
  };

  // What a thread needs beside the others.
  struct Lane {
    std::vector<float> query;  // [group][k_dim]
    std::vector<const std::byte*> queries;
    std::vector<double*> scores;
  };

  void prepare(const ScanLayout& where, int layer, const TensorView& q,
               const std::vector<ScanRow>& rows, ThreadPool& threads);
  void score(const ScanLayout& where, int layer, const std::vector<ScanRow>& rows, const Item& item,
             Lane* lane);

  std::vector<Lane> lanes_;
  size_t heads_ = 0;
  int group_ = 0;
  int64_t query_bytes_ = 0;
  std::vector<size_t> order_;  // rows of one sequence follow each other
  std::vector<Item> items_;
  std::vector<std::byte> queries_;  // [rows][kv_heads]
  std::vector<double> scales_;      // [rows][kv_heads]
  std::vector<double> scores_;
  std::vector<int64_t> first_;  // [rows][kv_heads] where in scores_ a range begins
};

// The queries of heads [first, first + count) of a row as float32, [count][k_dim].
void read_query(const TensorView& q, int64_t row, int64_t first, int64_t count, float* out);

}  // namespace kvpager
