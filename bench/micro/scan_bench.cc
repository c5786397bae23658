// Micro benchmark of the scans: summaries as a pager keeps them, [chunks][layers][kv heads], scored
// for one row or many, beside the memory bandwidth of the same run. Every call reads another layer,
// so that nothing comes from a cache. Prints one JSON object per line.
//
//   scan_bench [--threads N] [--chunks N] [--scorer NAME]... [--group N]... [--rows N]...
//              [--head-dim N] [--cached 1]
//
// --cached 1 reads the same layer each time; with few chunks it shows what the arithmetic takes.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kvpager/attention.h"
#include "kvpager/selection.h"

namespace {

using Clock = std::chrono::steady_clock;
constexpr int kHeads = 8;
constexpr int64_t kBlock = 64;  // chunks of one work item

double best_seconds(int runs, const std::function<void()>& run) {
  run();
  double best = 1e30;
  for (int i = 0; i < runs; ++i) {
    const auto start = Clock::now();
    run();
    best = std::min(best, std::chrono::duration<double>(Clock::now() - start).count());
  }
  return best;
}

// Memory as a slab maps it.
class Bytes {
 public:
  explicit Bytes(int64_t size) : size_(static_cast<size_t>(size)) {
    void* memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    madvise(memory, size_, MADV_HUGEPAGE);
    data_ = static_cast<std::byte*>(memory);
  }
  ~Bytes() { munmap(data_, size_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  std::byte* data() { return data_; }

 private:
  std::byte* data_ = nullptr;
  size_t size_;
};

double read_bandwidth(kvpager::ThreadPool& pool) {
  constexpr int64_t kSize = int64_t{512} << 20;
  constexpr int64_t kPiece = int64_t{1} << 20;
  Bytes bytes(kSize);
  std::memset(bytes.data(), 1, kSize);
  std::vector<uint64_t> sums(static_cast<size_t>(pool.threads()) * 8);
  const double seconds = best_seconds(5, [&] {
    pool.run(kSize / kPiece, [&](int64_t piece, int thread) {
      const uint64_t* p = reinterpret_cast<const uint64_t*>(bytes.data() + piece * kPiece);
      uint64_t lanes[16] = {};
      for (int64_t i = 0; i < kPiece / 8; i += 16) {
        for (int j = 0; j < 16; ++j) lanes[j] += p[i + j];
      }
      for (const uint64_t lane : lanes) sums[static_cast<size_t>(thread) * 8] += lane;
    });
  });
  return static_cast<double>(kSize) / seconds * 1e-9;
}

void scan(kvpager::ThreadPool& pool, double bandwidth, const std::string& name, int group, int rows,
          int head_dim, int64_t chunks, bool cached) {
  const kvpager::Scorer& scorer = kvpager::find_scorer(name);
  kvpager::Layout layout;
  layout.kv_heads = kHeads;
  layout.k_dim = layout.v_dim = head_dim;
  layout.k_dtype = layout.v_dtype = kvpager::DType::kFloat32;
  const int64_t page = scorer.summary_bytes(layout);
  layout.layers =
      static_cast<int32_t>(std::max<int64_t>(2, (int64_t{192} << 20) / (page * kHeads * chunks)));
  const int64_t pages = chunks * layout.layers * kHeads;
  Bytes summaries(pages * page);
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> tile(static_cast<size_t>(head_dim) * 64);
  for (int64_t i = 0; i < pages; ++i) {
    if (i < 16) {
      for (float& x : tile) x = normal(random);
      scorer.summarize(layout, reinterpret_cast<std::byte*>(tile.data()),
                       summaries.data() + i * page);
    } else {
      std::memcpy(summaries.data() + i * page, summaries.data() + i % 16 * page,
                  static_cast<size_t>(page));
    }
  }
  std::vector<float> q(static_cast<size_t>(group) * head_dim);
  std::vector<std::vector<std::byte>> queries(static_cast<size_t>(rows * kHeads));
  for (auto& query : queries) {
    for (float& x : q) x = normal(random);
    query.resize(static_cast<size_t>(scorer.query_bytes(layout, group)));
    scorer.prepare(layout, group, q.data(), query.data());
  }
  std::vector<double> scores(static_cast<size_t>(rows) * kHeads * chunks);
  int layer = 0;
  const auto run = [&] {
    if (!cached) layer = (layer + 1) % layout.layers;
    pool.run((chunks + kBlock - 1) / kBlock * kHeads, [&](int64_t item, int) {
      const int64_t begin = item / kHeads * kBlock;
      const int64_t count = std::min(kBlock, chunks - begin);
      const int64_t head = item % kHeads;
      const std::byte* pointers[kBlock];
      for (int64_t i = 0; i < count; ++i) {
        pointers[i] =
            summaries.data() + (((begin + i) * layout.layers + layer) * kHeads + head) * page;
      }
#ifdef SCAN_BENCH_ROW_BY_ROW
      for (int r = 0; r < rows; ++r) {
        scorer.score(layout, group, queries[static_cast<size_t>(r * kHeads + head)].data(),
                     pointers, count, scores.data() + (r * kHeads + head) * chunks + begin);
      }
#else
      std::vector<const std::byte*> of_row(static_cast<size_t>(rows));
      std::vector<double*> out(static_cast<size_t>(rows));
      for (int r = 0; r < rows; ++r) {
        of_row[static_cast<size_t>(r)] = queries[static_cast<size_t>(r * kHeads + head)].data();
        out[static_cast<size_t>(r)] = scores.data() + (r * kHeads + head) * chunks + begin;
      }
      scorer.score_rows(layout, group, rows, of_row.data(), pointers, count, out.data());
#endif
    });
  };
  const double seconds = best_seconds(rows > 1 ? 5 : 40, run);
  const double bytes = static_cast<double>(page) * kHeads * chunks;
  std::printf(
      "{\"bench\": \"scan\", \"isa\": \"%s\", \"scorer\": \"%s\", \"chunks\": %lld, \"group\": %d, "
      "\"rows\": %d, \"head_dim\": %d, \"threads\": %d, \"us\": %.1f, \"GBps\": %.2f, "
      "\"of_bandwidth\": %.2f, \"ns_per_head_and_chunk\": %.1f}\n",
      kvpager::isa_name(), name.c_str(), static_cast<long long>(chunks), group, rows, head_dim,
      pool.threads(), seconds * 1e6, bytes / seconds * 1e-9, bytes / seconds * 1e-9 / bandwidth,
      seconds * 1e9 * pool.threads() / (static_cast<double>(chunks) * kHeads * group * rows));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  int threads = 1;
  int64_t chunks = 2048;
  int head_dim = 128;
  bool cached = false;
  std::vector<std::string> scorers;
  std::vector<int> groups;
  std::vector<int> rows;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--threads") threads = std::atoi(argv[i + 1]);
    if (name == "--chunks") chunks = std::atoll(argv[i + 1]);
    if (name == "--head-dim") head_dim = std::atoi(argv[i + 1]);
    if (name == "--cached") cached = std::atoi(argv[i + 1]) != 0;
    if (name == "--scorer") scorers.push_back(argv[i + 1]);
    if (name == "--group") groups.push_back(std::atoi(argv[i + 1]));
    if (name == "--rows") rows.push_back(std::atoi(argv[i + 1]));
  }
  if (scorers.empty()) scorers = {"bits2", "mean"};
  if (groups.empty()) groups = {1, 2, 4, 8};
  if (rows.empty()) rows = {1, 64};
  kvpager::ThreadPool pool(threads);
  const double bandwidth = read_bandwidth(pool);
  std::printf("{\"bench\": \"read\", \"threads\": %d, \"GBps\": %.2f}\n", threads, bandwidth);
  for (const std::string& scorer : scorers) {
    for (const int group : groups) {
      for (const int row : rows)
        scan(pool, bandwidth, scorer, group, row, head_dim, chunks, cached);
    }
  }
  return 0;
}
