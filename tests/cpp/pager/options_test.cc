#include "memory/slab.h"
#include "small_pager.h"

namespace kvpager::pager_test {
namespace {

std::string refusal(const PagerOptions& options) {
  const int64_t before = total_mapped_bytes();
  std::string message = "no error";
  try {
    const Pager pager(options);
  } catch (const InvalidArgumentError& error) {
    message = error.what();
  }
  CHECK(total_mapped_bytes() == before);
  return message;
}

PAGER_TEST("each option that is out of range is refused by its name, value and range") {
  const auto with = [](auto change) {
    PagerOptions options = small_options(4, 8);
    change(options);
    return refusal(options);
  };
  CHECK(contains(with([](PagerOptions& o) { o.rows = 0; }), "rows: 0, expected 1 to 4096"));
  CHECK(contains(with([](PagerOptions& o) { o.rows = 4097; }), "rows: 4097"));
  CHECK(contains(with([](PagerOptions& o) { o.host_bytes = -1; }), "host_bytes: -1"));
  CHECK(contains(with([](PagerOptions& o) { o.disk_bytes = -1; }), "disk_bytes: -1"));
  CHECK(contains(with([](PagerOptions& o) { o.disk_bytes = kChunkBytes; }), "disk_path: empty"));
  CHECK(contains(with([](PagerOptions& o) { o.summary_bytes = -2; }), "summary_bytes: -2"));
  // More slots than are counted, or bytes than 64 bits hold.
  CHECK(contains(with([](PagerOptions& o) { o.pool_blocks = INT64_MAX; }), "pool_tokens: "));
  CHECK(contains(with([](PagerOptions& o) { o.host_bytes = INT64_MAX; }), "host_bytes: "));
  CHECK(contains(with([](PagerOptions& o) { o.disk_bytes = INT64_MAX; }), "disk_bytes: "));
  CHECK(contains(with([](PagerOptions& o) { o.summary_bytes = INT64_MAX; }), "summary_bytes: "));
  CHECK(contains(with([](PagerOptions& o) { o.q_heads = INT32_MAX; }), "q_heads: "));
  CHECK(contains(with([](PagerOptions& o) { o.recall_chunks = -1; }), "recall_chunks: -1"));
  CHECK(contains(with([](PagerOptions& o) { o.hysteresis = -0.5; }), "hysteresis: -0.5"));
  CHECK(contains(with([](PagerOptions& o) { o.hysteresis = std::nan(""); }), "hysteresis: nan"));
  CHECK(contains(with([](PagerOptions& o) { o.threads = 0; }), "threads: 0, expected 1 to 1024"));
  CHECK(contains(with([](PagerOptions& o) { o.layout.layers = 0; }), "layers"));
  CHECK(contains(with([](PagerOptions& o) { o.layout.chunk_tokens = 48; }), "chunk_tokens"));
  CHECK(contains(with([](PagerOptions& o) {
                   o.selection.kind = Selection::Kind::kTopK;
                   o.selection.chunks = 2;
                   o.selection.recent = 15;
                 }),
                 "recent"));
}

PAGER_TEST("smaller row counts ascend from 1 to M - 1, or the first that does not is named") {
  const auto with = [](std::vector<int64_t> counts) {
    PagerOptions options = small_options(4, 8);
    options.smaller_rows = std::move(counts);
    return refusal(options);
  };
  for (const std::vector<int64_t>& counts : {std::vector<int64_t>{}, {1}, {15}, {1, 2, 3, 8, 15}}) {
    CHECK(with(counts) == "no error");
  }
  const char* expected = "expected ascending counts from 1 to 15";
  CHECK(contains(with({0}), std::string("smaller_rows[0]: 0, ") + expected));
  CHECK(contains(with({-3, 4}), "smaller_rows[0]: -3"));
  CHECK(contains(with({4, 16}), std::string("smaller_rows[1]: 16, ") + expected));
  CHECK(contains(with({4, 17}), "smaller_rows[1]: 17"));
  CHECK(contains(with({4, 4}), "smaller_rows[1]: 4"));
  CHECK(contains(with({2, 8, 4}), "smaller_rows[2]: 4"));
  PagerOptions options = small_options(4, 8);
  options.rows = 1;
  options.smaller_rows = {1};
  CHECK(contains(refusal(options), "smaller_rows[0]: 1"));
}

PAGER_TEST(
    "a pool smaller than a frontier and one sealed chunk is refused with what it would take") {
  // 16 rows of which the first may be the last of a chunk: 2 unsealed chunks, and one to make
  // progress with.
  const std::string message = refusal(small_options(2, 8));
  CHECK(contains(message, "pool_tokens: 32"));
  CHECK(contains(message, "at least 48"));
  Pager least(small_options(3, 8));
  const Known sequence = create(least, 100);
  require_intact(least, sequence);
}

PAGER_TEST("a system that refuses the memory gives a CapacityError and keeps nothing") {
  const int64_t before = total_mapped_bytes();
  PagerOptions options = small_options(4, 8);
  options.host_bytes = kChunkBytes << 30;
  CHECK_THROWS_AS(Pager{options}, CapacityError);
  CHECK(total_mapped_bytes() == before);
}

PAGER_TEST("a spill folder that does not exist is a StorageError") {
  CHECK_THROWS_AS(Pager(small_options(4, 0, 4, "/nowhere/at/all")), StorageError);
}

TEST_CASE("the bytes a pager maps are fixed when it is made and do not change as it works") {
  Pager pager(small_options(4, 32));
  const int64_t mapped = total_mapped_bytes();
  const PagerStats before = pager.stats();
  Known a = create(pager, 200, 1);
  const Known b = create(pager, 150, 2);
  pager.evict_all();
  probe(pager, a);
  const PagerStats after = pager.stats();
  CHECK(total_mapped_bytes() == mapped);
  CHECK(after.pool_bytes == 4 * kChunkBytes);
  CHECK(after.pool_bytes == before.pool_bytes);
  CHECK(after.host_bytes == before.host_bytes);
  CHECK(after.summary_bytes == before.summary_bytes);
  CHECK(after.staging_bytes == before.staging_bytes);
  CHECK(after.resident_bytes <= after.pool_bytes);
  CHECK(mapped == after.pool_bytes + after.host_bytes + after.summary_bytes + after.staging_bytes);
  require_intact(pager, b);
}

}  // namespace
}  // namespace kvpager::pager_test
