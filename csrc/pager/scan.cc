#include "pager/scan.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "base/capacity.h"
#include "base/float_environment.h"
#include "base/half.h"
#include "kernels/kernel_table.h"
#include "kvpager/require.h"

namespace kvpager {
namespace {

// Chunks of one piece of work: some 160 KiB of two-bit sketches, some 5 us.
constexpr int64_t kPiece = 64;

// About what one thread takes. A page is read at 20 GB/s and costs each head as if at 50.
int64_t nanoseconds(int64_t page_bytes, int64_t pages, int64_t heads) {
  return pages * page_bytes * (5 + 2 * heads) / 100;
}

// Summaries are of keys as they are stored.
void rotate_queries(int64_t dim, int group, float* q) {
  const FloatEnvironment environment;
  for (int head = 0; head < group; ++head) kernels().rotate(q + head * dim, dim);
}

}  // namespace

void read_query(const TensorView& q, int64_t row, int64_t first, int64_t count, float* out) {
  for (int64_t h = 0; h < count; ++h) {
    const int64_t offset = row * q.row_stride + (first + h) * q.head_stride;
    for (int64_t d = 0; d < q.dim; ++d) {
      float& value = out[h * q.dim + d];
      if (q.dtype == DType::kFloat32) {
        value = static_cast<const float*>(q.data)[offset + d];
      } else {
        const uint16_t bits = static_cast<const uint16_t*>(q.data)[offset + d];
        value = q.dtype == DType::kFloat16 ? float16_to_float(bits) : bfloat16_to_float(bits);
      }
    }
  }
}

void Scan::prepare(const ScanLayout& where, int layer, const TensorView& q,
                   const std::vector<ScanRow>& rows, ThreadPool& threads) {
  const Layout layout = where.layout->of_layer(layer);
  const int group = group_;
  query_bytes_ = bits2::query_bytes(layout, group);
  const size_t count = rows.size() * heads_;
  queries_.resize(count * static_cast<size_t>(query_bytes_));
  scales_.assign(count, 0.0);
  const int64_t work = static_cast<int64_t>(count) * group * layout.k_dim * 2;  // 2 ns a number
  threads.run(
      static_cast<int64_t>(count),
      [&](int64_t item, int thread) {
        const size_t i = static_cast<size_t>(item);
        const ScanRow& row = rows[i / heads_];
        if (row.range.end <= row.range.begin) return;
        float* const numbers = lanes_[static_cast<size_t>(thread)].query.data();
        std::byte* query = queries_.data() + item * query_bytes_;
        read_query(q, row.row, static_cast<int64_t>(i % heads_) * group, group, numbers);
        if (layout.k_rotated) rotate_queries(layout.k_dim, group, numbers);
        bits2::prepare(layout, group, numbers, query);
        scales_[i] = bits2::query_scale(query);
      },
      threads.worth_waking(work));
}

int64_t Scan::bytes() const {
  int64_t lanes = 0;
  for (const Lane& lane : lanes_) {
    lanes +=
        capacity_bytes(lane.query) + capacity_bytes(lane.queries) + capacity_bytes(lane.scores);
  }
  return lanes + capacity_bytes(lanes_) + capacity_bytes(order_) + capacity_bytes(items_) +
         capacity_bytes(queries_) + capacity_bytes(scales_) + capacity_bytes(scores_) +
         capacity_bytes(first_);
}

void Scan::run(const ScanLayout& where, int layer, const TensorView& q,
               const std::vector<ScanRow>& rows, ThreadPool& threads) {
  KVPAGER_REQUIRE(q.heads > 0 && q.heads % where.layout->kv_heads == 0 &&
                  q.dim == where.layout->k_dim);
  heads_ = static_cast<size_t>(where.layout->kv_heads);
  group_ = static_cast<int>(q.heads / where.layout->kv_heads);
  for (const ScanRow& row : rows) {
    KVPAGER_REQUIRE(row.row >= 0 && row.row < q.rows && row.range.begin >= 0);
    KVPAGER_REQUIRE(row.range.end <= row.range.begin ||
                    row.range.end <= static_cast<int64_t>(row.summaries->size()));
  }
  lanes_.resize(static_cast<size_t>(threads.threads()));
  for (Lane& lane : lanes_) {
    lane.query.resize(static_cast<size_t>(group_ * q.dim));
    lane.queries.reserve(rows.size());
    lane.scores.reserve(rows.size());
  }
  prepare(where, layer, q, rows, threads);
  order_.resize(rows.size());
  std::iota(order_.begin(), order_.end(), size_t{0});
  std::stable_sort(order_.begin(), order_.end(), [&](size_t a, size_t b) {
    return std::less<const void*>()(rows[a].summaries, rows[b].summaries);
  });
  items_.clear();
  first_.assign(rows.size() * heads_, 0);
  int64_t scores = 0;
  int64_t work = 0;
  for (size_t first = 0; first < order_.size();) {
    size_t last = first;
    CandidateRange all{0, 0};
    int64_t scored = 0;
    for (; last < order_.size() && rows[order_[last]].summaries == rows[order_[first]].summaries;
         ++last) {
      const CandidateRange range = rows[order_[last]].range;
      if (range.end <= range.begin) continue;
      all = scored++ == 0
                ? range
                : CandidateRange{std::min(all.begin, range.begin), std::max(all.end, range.end)};
    }
    const int64_t chunks = all.end - all.begin;
    for (size_t i = first; i < last; ++i) {
      for (size_t head = 0; head < heads_; ++head) {
        first_[order_[i] * heads_ + head] =
            scores + std::max<int64_t>(0, rows[order_[i]].range.begin - all.begin);
        scores += chunks;
      }
    }
    for (int64_t begin = all.begin; begin < all.end; begin += kPiece) {
      for (size_t head = 0; head < heads_; ++head) {
        items_.push_back(
            {first, last, static_cast<int>(head), begin, std::min(begin + kPiece, all.end)});
      }
    }
    work += nanoseconds(where.page_bytes, chunks * static_cast<int64_t>(heads_),
                        scored * q.heads / static_cast<int64_t>(heads_));
    first = last;
  }
  if (static_cast<int64_t>(scores_.size()) < scores) scores_.resize(static_cast<size_t>(scores));
  threads.run(
      static_cast<int64_t>(items_.size()),
      [&](int64_t item, int thread) {
        score(where, layer, rows, items_[static_cast<size_t>(item)],
              &lanes_[static_cast<size_t>(thread)]);
      },
      threads.worth_waking(work));
}

void Scan::score(const ScanLayout& where, int layer, const std::vector<ScanRow>& rows,
                 const Item& item, Lane* lane) {
  const Layout& layout = *where.layout;
  const int64_t offset = where.page_bytes * (int64_t{layer} * layout.kv_heads + item.head);
  const std::vector<const std::byte*>& bases = *rows[order_[item.first_row]].summaries;
  const std::byte* pages[kPiece];
  for (int64_t i = item.begin; i < item.end; ++i) {
    pages[i - item.begin] = bases[static_cast<size_t>(i)] + offset;
  }
  lane->queries.clear();
  lane->scores.clear();
  // A row gets scores of the whole piece if it wants one of them; there is room for the others.
  for (size_t at = item.first_row; at < item.last_row; ++at) {
    const size_t i = order_[at];
    const CandidateRange range = rows[i].range;
    if (range.end <= item.begin || range.begin >= item.end) continue;
    const size_t slot = i * heads_ + static_cast<size_t>(item.head);
    lane->queries.push_back(queries_.data() + static_cast<int64_t>(slot) * query_bytes_);
    lane->scores.push_back(scores_.data() + first_[slot] + (item.begin - range.begin));
  }
  bits2::score_rows(layout, group_, static_cast<int64_t>(lane->queries.size()),
                    lane->queries.data(), pages, item.end - item.begin, lane->scores.data());
}

}  // namespace kvpager
