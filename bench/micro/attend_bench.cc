// Micro benchmarks of the CPU kernels: attention at decode and prefill shapes, and scans of
// summaries. Prints one JSON object per line, with the memory bandwidth measured in the same run
// beside it.
//
//   attend_bench [--threads N] [--quick] [--attend | --scan] [--dtype NAME] [--shape Q/KV/DIM]
//                [--context TOKENS] [--rows N] [--layers N]
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

using kvpager::DType;
using Clock = std::chrono::steady_clock;

// Several runs after one warm-up, in seconds.
std::vector<double> all_seconds(double budget, const std::function<void()>& run) {
  run();
  std::vector<double> all;
  double spent = 0;
  for (int i = 0; i < 3 || (spent < budget && i < 1000); ++i) {
    const auto start = Clock::now();
    run();
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    all.push_back(seconds);
    spent += seconds;
  }
  std::sort(all.begin(), all.end());
  return all;
}

double best_seconds(double budget, const std::function<void()>& run) {
  return all_seconds(budget, run).front();
}

// Bytes on huge pages where the system gives them, as a pager's slabs are; larger than any cache
// where the benchmark asks for that.
class Bytes {
 public:
  explicit Bytes(size_t size)
      : data_(static_cast<std::byte*>(std::aligned_alloc(kPage, round(size)))), size_(size) {
    if (data_ == nullptr) std::abort();
    madvise(data_, round(size), MADV_HUGEPAGE);
  }
  ~Bytes() { std::free(data_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  std::byte* data() { return data_; }
  size_t size() const { return size_; }

 private:
  static constexpr size_t kPage = size_t{2} << 20;
  static size_t round(size_t size) { return (size + kPage - 1) / kPage * kPage; }
  std::byte* data_;
  size_t size_;
};

double gigabytes(double bytes, double seconds) { return bytes / seconds * 1e-9; }

void measure_memory(kvpager::ThreadPool& pool) {
  const size_t size = size_t{256} << 20;
  Bytes from(size);
  Bytes to(size);
  std::memset(from.data(), 1, size);
  std::memset(to.data(), 2, size);
  const int64_t parts = 64;
  const size_t part = size / parts;
  const double copy = best_seconds(0.5, [&] {
    pool.run(parts, [&](int64_t i, int) {
      std::memcpy(to.data() + i * part, from.data() + i * part, part);
    });
  });
  std::vector<uint64_t> sums(parts);
  const double read = best_seconds(0.5, [&] {
    pool.run(parts, [&](int64_t i, int) {
      const uint64_t* words = reinterpret_cast<const uint64_t*>(from.data() + i * part);
      uint64_t sum[32] = {};
      for (size_t w = 0; w < part / 8; w += 32) {
        for (size_t lane = 0; lane < 32; ++lane) sum[lane] += words[w + lane];
      }
      for (const uint64_t lane : sum) sums[i] += lane;
    });
  });
  std::printf(
      "{\"bench\": \"memory\", \"threads\": %d, \"memcpy_read_GBps\": %.2f, \"read_GBps\": %.2f}\n",
      pool.threads(), gigabytes(size, copy), gigabytes(size, read));
}

// Fills with finite values of the dtype's exponent range around one.
void fill(std::byte* data, size_t bytes, DType dtype, uint32_t seed) {
  std::minstd_rand random(seed);
  if (dtype == DType::kFloat32) {
    float* x = reinterpret_cast<float*>(data);
    for (size_t i = 0; i < bytes / 4; ++i) x[i] = static_cast<float>(random() % 2001) * 1e-3f - 1;
  } else {
    uint16_t* x = reinterpret_cast<uint16_t*>(data);
    const uint16_t base = dtype == DType::kFloat16 ? 0x3000 : 0x3E00;  // scales are bfloat16
    for (size_t i = 0; i < bytes / 2; ++i) x[i] = static_cast<uint16_t>(base | (random() & 0x81FF));
  }
}

struct Shape {
  int q_heads;
  int kv_heads;
  int head_dim;
};

void attend(kvpager::ThreadPool& pool, const Shape& shape, DType dtype, int64_t rows,
            int64_t context, bool one_sequence, int layers, double budget) {
  kvpager::Layout layout;
  layout.layers = layers;
  layout.kv_heads = shape.kv_heads;
  layout.k_dim = layout.v_dim = shape.head_dim;
  layout.k_dtype = layout.v_dtype = dtype;
  const int64_t chunks = context / layout.chunk_tokens;
  // Layers in turns, as a pager keeps them: [chunks][layers][kv heads]. At least 512 MiB, so that a
  // small context is not read from the cache.
  const int64_t size = chunks * layout.slice_bytes(0);
  const int64_t copies =
      rows > 1 ? 1 : std::max<int64_t>(1, (int64_t{512} << 20) / (size * layers));
  Bytes bytes(static_cast<size_t>(size * layers * copies));
  fill(bytes.data(), bytes.size(), dtype, 1);
  std::vector<std::vector<const std::byte*>> slices;
  for (int64_t copy = 0; copy < copies; ++copy) {
    for (int layer = 0; layer < layers; ++layer) {
      std::vector<const std::byte*>& found = slices.emplace_back();
      for (int64_t c = 0; c < chunks; ++c) {
        found.push_back(bytes.data() + (copy * chunks + c) * layout.chunk_bytes() +
                        layout.slice_offset(layer));
      }
    }
  }
  std::vector<float> q(rows * shape.q_heads * shape.head_dim);
  std::vector<float> out(q.size());
  fill(reinterpret_cast<std::byte*>(q.data()), q.size() * 4, DType::kFloat32, 2);
  std::vector<kvpager::AttendRow> row(rows);
  for (int64_t i = 0; i < rows; ++i) {
    row[i].position = context - rows + i;
    row[i].table = one_sequence ? 0 : static_cast<int32_t>(i);
  }
  std::vector<kvpager::ChunkTableView> tables(one_sequence ? 1 : rows);
  kvpager::AttendParams params;
  params.layout = &layout;
  params.q_heads = shape.q_heads;
  params.rows = rows;
  params.row = row.data();
  params.tables = tables.data();
  params.q = {q.data(),      DType::kFloat32, rows,
              shape.q_heads, shape.head_dim,  int64_t{shape.q_heads} * shape.head_dim,
              shape.head_dim};
  params.out = params.q;
  params.out.data = out.data();
  params.scaling = 0.088f;
  kvpager::AttendWorkspace workspace;
  int64_t turn = 0;
  const std::vector<double> all = all_seconds(budget, [&] {
    for (auto& table : tables) {
      table.slices = slices[static_cast<size_t>(turn) % slices.size()].data();
      table.chunks = chunks;
    }
    ++turn;
    kvpager::attend_begin(params, workspace, pool);
    kvpager::attend_wave(params, 0, int64_t{1} << 40, workspace, pool);
    kvpager::attend_finish(params, workspace, pool);
  });
  const double seconds = all.front();
  const double pairs =
      static_cast<double>(rows) * context - (one_sequence ? rows * (rows - 1) / 2.0 : 0);
  const double flops = 4.0 * shape.q_heads * shape.head_dim * pairs;
  std::printf(
      "{\"bench\": \"attend\", \"rows\": %lld, \"context\": %lld, \"q_heads\": %d, \"kv_heads\": "
      "%d, "
      "\"head_dim\": %d, \"dtype\": \"%s\", \"threads\": %d, \"ms\": %.4f, \"median_ms\": %.4f, "
      "\"kv_GBps\": %.2f, \"GFLOPs\": %.1f}\n",
      static_cast<long long>(rows), static_cast<long long>(context), shape.q_heads, shape.kv_heads,
      shape.head_dim, kvpager::dtype_name(dtype), pool.threads(), seconds * 1e3,
      all[all.size() / 2] * 1e3,
      gigabytes(static_cast<double>(size) * (one_sequence ? 1 : rows), seconds),
      flops / seconds * 1e-9);
  std::fflush(stdout);
}

void scan(const char* name, int group, int head_dim, int64_t chunks, double budget) {
  const kvpager::Scorer& scorer = kvpager::find_scorer(name);
  kvpager::Layout layout;
  layout.layers = 1;
  layout.kv_heads = 1;
  layout.k_dim = layout.v_dim = head_dim;
  layout.k_dtype = layout.v_dtype = DType::kBFloat16;
  const int64_t bytes = scorer.summary_bytes(layout);
  const int64_t total = std::max<int64_t>(chunks, (int64_t{256} << 20) / bytes);
  Bytes summaries(static_cast<size_t>(total * bytes));
  Bytes tile(static_cast<size_t>(layout.k_tile_bytes()));
  for (int64_t c = 0; c < total; ++c) {
    if (c < 16) {
      fill(tile.data(), tile.size(), DType::kBFloat16, static_cast<uint32_t>(c));
      scorer.summarize(layout, tile.data(), summaries.data() + c * bytes);
    } else {
      std::memcpy(summaries.data() + c * bytes, summaries.data() + c % 16 * bytes,
                  static_cast<size_t>(bytes));
    }
  }
  std::vector<float> q(group * head_dim);
  fill(reinterpret_cast<std::byte*>(q.data()), q.size() * 4, DType::kFloat32, 3);
  std::vector<std::byte> query(scorer.query_bytes(layout, group));
  scorer.prepare(layout, group, q.data(), query.data());
  std::vector<const std::byte*> pointers(total);
  for (int64_t c = 0; c < total; ++c) pointers[c] = summaries.data() + c * bytes;
  std::vector<double> scores(chunks);
  int64_t turn = 0;
  const int64_t turns = total / chunks;
  const double seconds = best_seconds(budget, [&] {
    scorer.score(layout, group, query.data(), pointers.data() + turn % turns * chunks, chunks,
                 scores.data());
    ++turn;
  });
  const double summary_seconds =
      best_seconds(budget, [&] { scorer.summarize(layout, tile.data(), summaries.data()); });
  std::printf(
      "{\"bench\": \"scan\", \"scorer\": \"%s\", \"chunks\": %lld, \"group\": %d, \"head_dim\": "
      "%d, "
      "\"summary_bytes\": %lld, \"us\": %.2f, \"GBps\": %.2f, \"summarize_us\": %.2f}\n",
      name, static_cast<long long>(chunks), group, head_dim, static_cast<long long>(bytes),
      seconds * 1e6, gigabytes(static_cast<double>(chunks) * bytes, seconds),
      summary_seconds * 1e6);
  std::fflush(stdout);
}

struct Options {
  int threads = 1;
  bool quick = false;
  bool attend = true;
  bool scan = true;
  std::string dtype;  // empty: all
  std::string shape;
  int64_t context = 0;  // 0: all
  int64_t rows = 0;
  int layers = 1;
};

bool parse(int argc, char** argv, Options* options) {
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : nullptr;
    if (argument == "--quick") {
      options->quick = true;
    } else if (argument == "--attend") {
      options->scan = false;
    } else if (argument == "--scan") {
      options->attend = false;
    } else if (value == nullptr) {
      return false;
    } else {
      ++i;
      if (argument == "--threads") {
        options->threads = std::atoi(value);
      } else if (argument == "--dtype") {
        options->dtype = value;
      } else if (argument == "--shape") {
        options->shape = value;
      } else if (argument == "--context") {
        options->context = std::atoll(value);
      } else if (argument == "--rows") {
        options->rows = std::atoll(value);
      } else if (argument == "--layers") {
        options->layers = std::atoi(value);
      } else {
        return false;
      }
    }
  }
  return true;
}

std::string name_of(const Shape& shape) {
  return std::to_string(shape.q_heads) + "/" + std::to_string(shape.kv_heads) + "/" +
         std::to_string(shape.head_dim);
}

void all_attention(const Options& options, double budget, kvpager::ThreadPool& pool) {
  for (const DType dtype :
       {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kQ8, DType::kQ4}) {
    if (!options.dtype.empty() && options.dtype != kvpager::dtype_name(dtype)) continue;
    for (const Shape& shape :
         {Shape{16, 8, 128}, Shape{8, 2, 64}, Shape{32, 8, 128}, Shape{16, 2, 128}}) {
      if (!options.shape.empty() && options.shape != name_of(shape)) continue;
      for (const int64_t context : {2048, 8192, 32768}) {
        if (options.context != 0 ? options.context != context : options.quick && context == 32768) {
          continue;
        }
        for (const int64_t rows : {1, 64}) {
          if (options.rows != 0 && options.rows != rows) continue;
          attend(pool, shape, dtype, rows, context, true, options.layers, budget);
        }
      }
    }
  }
}

void all_scans(const Options& options, double budget) {
  for (const char* name : {"bits2", "mean"}) {
    for (const int group : {1, 2, 4}) {
      for (const int64_t chunks : {512, 4096, 16384}) {
        if (options.quick && chunks == 16384) continue;
        scan(name, group, 128, chunks, budget);
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (!parse(argc, argv, &options)) {
    std::fprintf(stderr,
                 "usage: attend_bench [--threads N] [--quick] [--attend | --scan] [--dtype NAME] "
                 "[--shape Q/KV/DIM] [--context TOKENS] [--rows N] [--layers N]\n");
    return 2;
  }
  const double budget = options.quick ? 0.1 : 0.5;
  kvpager::ThreadPool pool(options.threads);
  std::printf("{\"bench\": \"machine\", \"isa\": \"%s\", \"threads\": %d}\n", kvpager::isa_name(),
              options.threads);
  measure_memory(pool);
  if (options.attend) all_attention(options, budget, pool);
  if (options.scan) all_scans(options, budget);
  return 0;
}
