// The tile that the kernel is told to fetch ahead is the one it is called for next. It changes no bit,
// so that nothing else would notice a wrong one.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "attend_problem.h"
#include "kernels/kernel_table.h"

namespace kvpager::testing {
namespace {

struct Call {
  const void *k, *v, *next_k, *next_v;
};

std::vector<Call>* calls = nullptr;
const KernelTable* plain = nullptr;

void record(const TileParams& params) {
  calls->push_back({params.k, params.v, params.next_k, params.next_v});
  plain->attend_tile(params);
}

// The calls for these rows, on one thread.
std::vector<Call> calls_for(const Shape& shape, Sequence& sequence, const std::vector<Row>& rows) {
  std::vector<Call> made;
  calls = &made;
  plain = &kernels();
  KernelTable recording = *plain;
  recording.attend_tile = record;
  const KernelOverride on(recording);
  attend(shape, {&sequence}, rows);
  return made;
}

TEST_CASE(
    "the tile that is fetched ahead is the one that comes next, and each walk's last has none") {
  Shape shape;
  shape.kv_heads = 3;
  shape.tokens = 16;
  Sequence sequence(layout_of(shape), 16 * 45 + 5, 3, true);
  for (const int count : {1, 3}) {
    for (const int every : {1, 3, 11}) {  // chunks selected: all, some, a few of the splits
      CAPTURE(count);
      CAPTURE(every);
      std::vector<Row> rows;
      for (int i = 0; i < count; ++i) {
        Row row;
        row.position = sequence.length() - count + i;
        row.query_seed = static_cast<uint32_t>(i);
        for (int head = 0; every > 1 && head < shape.kv_heads; ++head) {
          row.selected.emplace_back();
          for (int32_t c = head + i; c < 45; c += every) row.selected.back().push_back(c);
          row.selected.back().push_back(45);
        }
        rows.push_back(row);
      }
      const std::vector<Call> made = calls_for(shape, sequence, rows);
      REQUIRE(made.size() >= static_cast<size_t>(3 * (45 / every + 1)));
      int64_t wrong = 0;
      int64_t last_ones = 0;
      for (size_t i = 0; i < made.size(); ++i) {
        if (made[i].next_k == nullptr) {
          ++last_ones;
          wrong += made[i].next_v != nullptr;
        } else {
          wrong += i + 1 == made.size() || made[i].next_k != made[i + 1].k ||
                   made[i].next_v != made[i + 1].v;
        }
      }
      CHECK(wrong == 0);
      CHECK(last_ones == shape.kv_heads);
    }
  }
}

}  // namespace
}  // namespace kvpager::testing
