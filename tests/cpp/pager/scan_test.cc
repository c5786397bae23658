// A scan shares readings of summaries among rows, and chunks among threads: a score is what the
// row's own query makes of the one summary.
#include "pager/scan.h"

#include <cstring>
#include <string>
#include <vector>

#include "bits2_score.h"
#include "small_pager.h"

namespace kvpager::pager_test {
namespace {

constexpr int kGroup = 3;

Layout scan_layout() {
  Layout layout = small_layout();
  layout.k_dim = 32;
  return layout;
}

// Summaries of a sequence's chunks, [chunks][layers][kv_heads], and where each chunk's begin.
struct Summaries {
  Summaries(int64_t chunks, uint64_t seed) {
    const Layout layout = scan_layout();
    const int64_t page_bytes = bits2::summary_bytes(layout);
    const int64_t pages = chunks * layout.layers * layout.kv_heads;
    bytes.resize(static_cast<size_t>(pages * page_bytes));
    std::vector<float> tile(static_cast<size_t>(layout.k_dim * layout.chunk_tokens));
    for (int64_t page = 0; page < pages; ++page) {
      for (size_t i = 0; i < tile.size(); ++i) {
        tile[i] = unit(mix(seed + static_cast<uint64_t>(page)) ^ i);
      }
      bits2::summarize(layout, reinterpret_cast<const std::byte*>(tile.data()),
                       bytes.data() + page * page_bytes);
    }
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      bases.push_back(bytes.data() + chunk * layout.layers * layout.kv_heads * page_bytes);
    }
  }
  std::vector<std::byte> bytes;
  std::vector<const std::byte*> bases;
};

TEST_CASE("a score is that of a row and a chunk alone, whatever rows and threads share a scan") {
  const Layout layout = scan_layout();
  const int heads = layout.kv_heads * kGroup;
  const ScanLayout where{&layout, bits2::summary_bytes(layout)};
  const Summaries one(200, 1), other(70, 2);
  // Ranges that begin and end within, at and beyond the pieces a scan is cut into; none at all. Of
  // each sequence the first row begins late and the last one needs all of its room.
  const std::vector<ScanRow> rows = {
      {4, &one.bases, {40, 200}}, {6, &other.bases, {64, 70}}, {0, &one.bases, {2, 130}},
      {1, &other.bases, {0, 0}},  {3, &one.bases, {66, 67}},   {2, &one.bases, {130, 194}},
      {7, &one.bases, {129, 66}}, {5, &other.bases, {1, 70}},  {8, &one.bases, {2, 200}},
  };
  Rows q(9, heads, layout.k_dim, 0);
  for (size_t i = 0; i < q.data.size(); ++i) q.data[i] = unit(mix(i));
  Scan scan;  // one for all: its sizes change from call to call
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads, 0);
    for (const size_t count : {rows.size(), size_t{1}, size_t{3}}) {
      for (const int layer : {1, 0}) {
        const std::vector<ScanRow> some(rows.begin(), rows.begin() + static_cast<int64_t>(count));
        scan.run(where, layer, q.view(), some, pool);
        int64_t wrong = 0;
        for (size_t i = 0; i < count; ++i) {
          for (int head = 0; head < layout.kv_heads; ++head) {
            std::vector<std::byte> query(static_cast<size_t>(bits2::query_bytes(layout, kGroup)));
            bits2::prepare(layout, kGroup, q.row(some[i].row) + head * kGroup * layout.k_dim,
                           query.data());
            const CandidateRange range = some[i].range;
            for (int64_t chunk = range.begin; chunk < range.end; ++chunk) {
              const std::byte* summary = (*some[i].summaries)[static_cast<size_t>(chunk)] +
                                         (layer * layout.kv_heads + head) * where.page_bytes;
              double expected = 0;
              bits2::score(layout, kGroup, query.data(), &summary, 1, &expected);
              const double found = scan.scores(i, head)[chunk - range.begin];
              wrong += std::memcmp(&found, &expected, sizeof expected) != 0;
            }
            if (range.begin >= range.end) continue;
            wrong += scan.scale(i, head) != bits2::query_scale(query.data());
          }
        }
        CHECK(wrong == 0);
      }
    }
  }
}

}  // namespace
}  // namespace kvpager::pager_test
