// Products of rows with the matrices that they chose: rows of one expert are multiplied together.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "base/read_once.h"
#include "base/workspaces.h"
#include "kvpager/error.h"
#include "kvpager/linear.h"
#include "kvpager/thread_pool.h"

namespace kvpager {
namespace {

constexpr int64_t kCopiedBytes = 8;  // in a nanosecond, by one thread

// The rows of y in the order of their experts, and where those of each begin.
struct Grouped {
  explicit Grouped(const ExpertsParams& params)
      : rows(static_cast<size_t>(params.all.rows)),
        begins(static_cast<size_t>(params.experts) + 1) {
    const std::vector<int64_t> chosen = read_once(params.chosen, rows.size());
    for (size_t row = 0; row < chosen.size(); ++row) {
      const int64_t expert = chosen[row];
      if (expert < 0 || expert >= params.experts) {
        throw InvalidArgumentError(
            str("row ", row, " chose expert ", expert, "; expected 0 to ", params.experts - 1));
      }
      ++begins[static_cast<size_t>(expert) + 1];
    }
    std::partial_sum(begins.begin(), begins.end(), begins.begin());
    std::vector<int64_t> next(begins.begin(), begins.end() - 1);
    for (size_t row = 0; row < chosen.size(); ++row) {
      rows[static_cast<size_t>(next[static_cast<size_t>(chosen[row])]++)] =
          static_cast<int64_t>(row);
    }
  }

  // Whether some expert has several rows.
  bool shared() const {
    for (size_t expert = 0; expert + 1 < begins.size(); ++expert) {
      if (begins[expert + 1] - begins[expert] > 1) return true;
    }
    return false;
  }

  std::vector<int64_t> rows;
  std::vector<int64_t> begins;
};

int64_t floats_of(int64_t bytes) {
  const int64_t float_bytes = sizeof(float);
  return (bytes + float_bytes - 1) / float_bytes;
}

}  // namespace

void linear_of_experts(const ExpertsParams& params, ThreadPool& pool,
                       const CompressedWeights* compressed) {
  const LinearParams& all = params.all;
  const Grouped grouped(params);
  const int64_t bytes = dtype_bytes(all.dtype);
  const int64_t read = all.depth * bytes, written = all.outputs * bytes;
  const int64_t copies = grouped.shared() ? all.rows : 0;
  const Workspace inputs(pool.workspaces(), floats_of(copies * read));
  const Workspace outputs(pool.workspaces(), floats_of(copies * written));
  char* const x = reinterpret_cast<char*>(inputs.data());
  char* const y = reinterpret_cast<char*>(outputs.data());
  const auto row_of_x = [&](int64_t place) {
    const int64_t row = grouped.rows[static_cast<size_t>(place)] / params.choices;
    return static_cast<const char*>(all.x) + row * all.x_stride * bytes;
  };
  const auto row_of_y = [&](int64_t place) {
    return static_cast<char*>(all.y) +
           grouped.rows[static_cast<size_t>(place)] * all.y_stride * bytes;
  };

  std::vector<LinearParams> products;
  std::vector<int64_t>
      copied;  // places of rows whose expert has others; a single one is read as it lies
  for (int64_t expert = 0; expert < params.experts; ++expert) {
    const int64_t begin = grouped.begins[static_cast<size_t>(expert)];
    LinearParams one = all;
    one.rows = grouped.begins[static_cast<size_t>(expert) + 1] - begin;
    if (one.rows == 0) continue;
    one.w = static_cast<const char*>(all.w) + expert * all.outputs * all.w_stride * bytes;
    if (all.bias != nullptr) one.bias = static_cast<const char*>(all.bias) + expert * written;
    if (one.rows == 1) {
      one.x = row_of_x(begin);
      one.y = row_of_y(begin);
    } else {
      one.x = x + begin * read;
      one.x_stride = all.depth;
      one.y = y + begin * written;
      one.y_stride = all.outputs;
      for (int64_t place = begin; place < begin + one.rows; ++place) copied.push_back(place);
    }
    products.push_back(one);
  }

  const int64_t count = static_cast<int64_t>(copied.size());
  pool.run(
      count,
      [&](int64_t item, int) {
        const int64_t place = copied[static_cast<size_t>(item)];
        std::memcpy(x + place * read, row_of_x(place), static_cast<size_t>(read));
      },
      pool.worth_waking(count * read / kCopiedBytes));
  // linear() takes several at once that have as many rows.
  const auto fewer_rows = [](const LinearParams& a, const LinearParams& b) {
    return a.rows < b.rows;
  };
  std::stable_sort(products.begin(), products.end(), fewer_rows);
  for (auto first = products.begin(); first != products.end();) {
    const auto last = std::upper_bound(first, products.end(), *first, fewer_rows);
    linear(&*first, last - first, pool, compressed);
    first = last;
  }
  pool.run(
      count,
      [&](int64_t item, int) {
        const int64_t place = copied[static_cast<size_t>(item)];
        std::memcpy(row_of_y(place), y + place * written, static_cast<size_t>(written));
      },
      pool.worth_waking(count * written / kCopiedBytes));
}

}  // namespace kvpager
