// Micro benchmark of writing rows: Pager::write of one layer, which refuses what is not finite or
// would overflow the dtype it is kept in, then converts and transposes. Beside it memcpy of the same
// bytes. Prints one JSON object per line.
//
//   rows_bench [--rows N]
//
//   Link it with kvpager_pager, as a release build makes it.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "kvpager/attention.h"
#include "kvpager/pager.h"

namespace {

using kvpager::DType;
using Clock = std::chrono::steady_clock;

constexpr int kKvHeads = 8;
constexpr int kHeadDim = 128;

// Median of runs after a warm-up, in microseconds.
double median_us(int runs, const std::function<void()>& run) {
  for (int i = 0; i < 20; ++i) run();
  std::vector<double> all;
  for (int i = 0; i < runs; ++i) {
    const auto start = Clock::now();
    run();
    all.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
  }
  std::nth_element(all.begin(), all.begin() + runs / 2, all.end());
  return all[static_cast<size_t>(runs / 2)];
}

void measure(int64_t rows, DType given, DType stored) {
  kvpager::PagerOptions options;
  options.layout.layers = 1;
  options.layout.kv_heads = kKvHeads;
  options.layout.k_dim = options.layout.v_dim = kHeadDim;
  options.layout.k_dtype = options.layout.v_dtype = stored;
  options.rows = rows;
  options.selection.recent = std::max<int64_t>(rows, options.selection.recent);
  options.pool_blocks = rows / options.layout.chunk_tokens + 4;
  options.host_bytes = 8 * options.pool_blocks * options.layout.chunk_bytes();
  kvpager::Pager pager(options);
  const kvpager::SequenceId sequence = pager.create_sequence("");
  std::vector<kvpager::RowDescriptor> descriptors;
  for (int64_t i = 0; i < rows; ++i) {
    descriptors.push_back({sequence, i, static_cast<int32_t>(i), kvpager::RowKind::kCommit});
  }
  const size_t elements = static_cast<size_t>(rows * kKvHeads * kHeadDim);
  const size_t bytes = elements * static_cast<size_t>(kvpager::dtype_bytes(given));
  std::vector<std::byte> k(bytes);
  for (size_t i = 0; i < elements; ++i) {
    const float value = static_cast<float>(i % 1999) * 1e-3f - 1.0f;
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint16_t half = given == DType::kBFloat16 ? static_cast<uint16_t>(bits >> 16)
                                                    : static_cast<uint16_t>(0x3000 + i % 1999);
    if (given == DType::kFloat32) {
      std::memcpy(k.data() + 4 * i, &value, 4);
    } else {
      std::memcpy(k.data() + 2 * i, &half, 2);
    }
  }
  std::vector<std::byte> v = k;
  std::vector<std::byte> copy(2 * bytes);
  const auto view = [&](std::vector<std::byte>& data) {
    return kvpager::TensorView{data.data(),         given,   rows, kKvHeads, kHeadDim,
                               kKvHeads * kHeadDim, kHeadDim};
  };
  pager.begin(descriptors);
  const double write = median_us(2000, [&] { pager.write(0, view(k), view(v)); });
  pager.abort();
  const double memory = median_us(2000, [&] {
    std::memcpy(copy.data(), k.data(), bytes);
    std::memcpy(copy.data() + bytes, v.data(), bytes);
  });
  std::printf(
      "{\"bench\": \"write\", \"rows\": %lld, \"given\": \"%s\", \"stored\": \"%s\", \"us\": %.2f, "
      "\"memcpy_us\": %.2f}\n",
      static_cast<long long>(rows), kvpager::dtype_name(given), kvpager::dtype_name(stored), write,
      memory);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<int64_t> counts = {1, 64};
  if (argc == 3 && std::string(argv[1]) == "--rows") {
    counts = {std::atoi(argv[2])};
  } else if (argc != 1) {
    std::fprintf(stderr, "usage: rows_bench [--rows N]\n");
    return 2;
  }
  std::printf("{\"bench\": \"machine\", \"isa\": \"%s\"}\n", kvpager::isa_name());
  const std::pair<DType, DType> kinds[] = {{DType::kFloat32, DType::kFloat32},
                                           {DType::kFloat32, DType::kBFloat16},
                                           {DType::kFloat32, DType::kFloat16},
                                           {DType::kBFloat16, DType::kBFloat16},
                                           {DType::kBFloat16, DType::kFloat16}};
  for (const int64_t rows : counts) {
    for (const auto& [given, stored] : kinds) measure(rows, given, stored);
  }
  return 0;
}
