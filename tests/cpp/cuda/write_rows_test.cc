// write_rows of every plug-in against the processor's: the same bytes, and no other byte touched.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kvpager/attention.h"
#include "problem.h"

namespace kvpager {
namespace {

using testing::kDTypes;
using testing::TestStream;

constexpr DType kStored[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kQ8,
                             DType::kQ4};

// Rows of one tensor somewhere in a buffer, whatever else the buffer holds being NaN.
struct View {
  int64_t offset = 0, row_stride = 0, head_stride = 0;
};

// Rows start at multiples of 16 bytes in the first four; in the others one thing is in the way.
enum class Strides {
  kPacked,
  kPadded,
  kHeadsOutside,
  kBetweenOthers,
  kOddStart,
  kOddRows,
  kOddHeads,
};
constexpr Strides kStrides[] = {Strides::kPacked,        Strides::kPadded,   Strides::kHeadsOutside,
                                Strides::kBetweenOthers, Strides::kOddStart, Strides::kOddRows,
                                Strides::kOddHeads};

View view_of(Strides strides, int64_t rows, int64_t heads, int64_t dim) {
  switch (strides) {
    case Strides::kPacked:
      return {0, heads * dim, dim};
    case Strides::kPadded:
      return {16, heads * (dim + 8) + 24, dim + 8};
    case Strides::kHeadsOutside:
      return {0, dim, rows * dim};
    case Strides::kBetweenOthers:
      return {heads * dim, 3 * heads * dim, dim};
    case Strides::kOddStart:
      return {3, heads * dim, dim};
    case Strides::kOddRows:
      return {0, heads * dim + 1, dim};
    case Strides::kOddHeads:
      return {0, heads * (dim + 1) + 16 - heads % 16, dim + 1};
  }
  return {};
}

struct Problem {
  Layout layout;
  int layer = 0;
  int64_t rows = 0;
  int64_t counted = 0;  // what the host counts, at least `rows`
  DType k_dtype = DType::kFloat32, v_dtype = DType::kFloat32;
  Strides k_strides = Strides::kPacked, v_strides = Strides::kPacked;
  int64_t chunks = 4;
  std::vector<int64_t> chunk;   // [rows], -1: not written
  std::vector<int32_t> offset;  // [rows]
  int special_percent = 0;      // of elements: NaN of any payload, infinities, denormals, huge
  uint64_t before = gpu::kNoFailure;  // the status that earlier launches left
  uint32_t seed = 0;
  std::vector<int64_t> infinite_keys, infinite_values;  // rows whose last element is infinite
};

Layout layout_of(DType k, DType v, int kv_heads, int tokens, int k_dim, int v_dim, int layers) {
  Layout layout;
  layout.layers = layers;
  layout.kv_heads = kv_heads;
  layout.chunk_tokens = tokens;
  layout.k_dim = k == DType::kQ4 ? (k_dim + 31) / 32 * 32 : k_dim;
  layout.v_dim = v == DType::kQ4 ? (v_dim + 31) / 32 * 32 : v_dim;
  layout.k_dtype = k;
  layout.v_dtype = v;
  layout.k_rotated = is_coded(k) && (k_dim + tokens) / 16 % 2 == 0;
  layout.v_rotated = is_coded(v) && (v_dim + kv_heads * 16) / 16 % 2 == 0;
  layout.validate();
  return layout;
}

uint32_t draw_bits(std::mt19937& random, DType dtype, bool special) {
  if (special) {  // denormals, what is not finite, and what rounding makes so or makes zero
    const uint32_t bits = random();
    const uint32_t pick = random() % 5;
    const uint32_t more = random();
    if (dtype == DType::kFloat32) {
      const uint32_t exponents[] = {0, 255, 254, 142 + more % 4, 103 + more % 12};
      const uint32_t mantissa = more % 3 == 0 ? bits | 0x7F0000u : bits;
      return (mantissa & 0x807FFFFFu) | exponents[pick] << 23;
    }
    const uint32_t low = dtype == DType::kFloat16 ? 0x03FFu : 0x007Fu;
    const uint32_t high = 0x7FFFu & ~low;
    const uint32_t exponents[] = {0, high, high - low - 1, more & high, more & high};
    return (bits & (0x8000u | low)) | exponents[pick];
  }
  const float value = (static_cast<float>(random() % 200001) - 100000.0f) / 30000.0f;
  std::byte bytes[4] = {};
  testing::round_to(dtype, value, bytes, 0);
  uint32_t bits = 0;
  std::memcpy(&bits, bytes, static_cast<size_t>(dtype_bytes(dtype)));
  return bits;
}

std::vector<std::byte> make_tensor(const Problem& p, DType dtype, const View& view, int64_t dim,
                                   const std::vector<int64_t>& infinite, uint32_t seed) {
  const int64_t heads = p.layout.kv_heads;
  const int64_t last = (p.rows - 1) * view.row_stride + (heads - 1) * view.head_stride + dim;
  const int64_t size = dtype_bytes(dtype);
  std::vector<std::byte> bytes(static_cast<size_t>((view.offset + last) * size), std::byte{0xFF});
  std::mt19937 random(seed);
  for (int64_t row = 0; row < p.rows; ++row) {
    if (p.chunk[static_cast<size_t>(row)] < 0) continue;  // NaN, and nobody's concern
    for (int64_t i = 0; i < heads * dim; ++i) {
      const bool special = static_cast<int>(random() % 1000) < p.special_percent * 10;
      const uint32_t bits = draw_bits(random, dtype, special);
      const int64_t at = view.offset + row * view.row_stride + i / dim * view.head_stride + i % dim;
      std::memcpy(bytes.data() + at * size, &bits, static_cast<size_t>(size));
    }
  }
  for (const int64_t row : infinite) {
    const int64_t at =
        view.offset + row * view.row_stride + (heads - 1) * view.head_stride + dim - 1;
    testing::round_to(dtype, INFINITY, bytes.data(), at);
  }
  return bytes;
}

struct Result {
  std::vector<std::byte> pool;
  uint64_t status = gpu::kNoFailure;
};

void check(device::Device& device, const Problem& p) {
  const Layout& layout = p.layout;
  const View k_view = view_of(p.k_strides, p.rows, layout.kv_heads, layout.k_dim);
  const View v_view = view_of(p.v_strides, p.rows, layout.kv_heads, layout.v_dim);
  std::vector<std::byte> k =
      make_tensor(p, p.k_dtype, k_view, layout.k_dim, p.infinite_keys, p.seed * 2 + 1);
  std::vector<std::byte> v =
      make_tensor(p, p.v_dtype, v_view, layout.v_dim, p.infinite_values, p.seed * 2 + 2);

  // A pool of bytes that differ from their neighbours; the processor's copy of it is written to.
  std::vector<std::byte> pool(static_cast<size_t>(p.chunks * layout.chunk_bytes()));
  for (size_t i = 0; i < pool.size(); ++i) pool[i] = static_cast<std::byte>(i * 37 + i / 256 * 11);
  Result expected{pool, p.before};
  std::vector<WriteRow> where(static_cast<size_t>(p.rows));
  for (size_t row = 0; row < where.size(); ++row) {
    if (p.chunk[row] < 0) continue;
    where[row].slice =
        expected.pool.data() + p.chunk[row] * layout.chunk_bytes() + layout.slice_offset(p.layer);
    where[row].offset = p.offset[row];
  }
  const auto host_view = [&](std::vector<std::byte>& data, DType dtype, const View& view,
                             int64_t dim) {
    return TensorView{data.data() + view.offset * dtype_bytes(dtype),
                      dtype,
                      p.rows,
                      layout.kv_heads,
                      dim,
                      view.row_stride,
                      view.head_stride};
  };
  const TensorView host_k = host_view(k, p.k_dtype, k_view, layout.k_dim);
  const TensorView host_v = host_view(v, p.v_dtype, v_view, layout.v_dim);
  const int64_t failed = find_non_finite(layout, host_k, host_v, where.data(), p.rows);
  if (failed >= 0) {
    const uint64_t found = static_cast<uint64_t>(p.layer) << 32 | static_cast<uint64_t>(failed);
    expected.status = std::min(expected.status, found);
  }
  write_rows(layout, host_k, host_v, where.data(), p.rows);

  TestStream stream(device);
  const auto bytes_of = [](const std::vector<std::byte>& data) {
    return static_cast<int64_t>(data.size());
  };
  device::Memory device_pool = device.allocate("pool", bytes_of(pool));
  device::Memory device_k = device.allocate("k", bytes_of(k));
  device::Memory device_v = device.allocate("v", bytes_of(v));
  device::Memory header = device.allocate("header", int64_t{sizeof(gpu::Header)});
  device::Memory rows = device.allocate("rows", p.counted * int64_t{sizeof(gpu::Row)});
  device::Memory status = device.allocate("status", int64_t{sizeof(uint64_t)});
  stream.upload(device_pool.data(), pool.data(), bytes_of(pool));
  stream.upload(device_k.data(), k.data(), bytes_of(k));
  stream.upload(device_v.data(), v.data(), bytes_of(v));
  stream.fill(rows.data(), 0xFF, rows.bytes());  // rows that only the host counts
  std::vector<gpu::Row> table(static_cast<size_t>(p.rows));
  for (size_t row = 0; row < table.size(); ++row) {
    if (p.chunk[row] < 0) continue;
    table[row].part = 0;
    table[row].write_offset = p.offset[row];
    table[row].write_chunk =
        reinterpret_cast<uint64_t>(device_pool.data() + p.chunk[row] * layout.chunk_bytes());
  }
  stream.upload(rows.data(), table.data(), p.rows * int64_t{sizeof(gpu::Row)});
  gpu::Header counts;
  counts.rows = static_cast<int32_t>(p.rows);
  stream.upload(header.data(), &counts, sizeof counts);
  stream.upload(status.data(), &p.before, sizeof p.before);

  gpu::WriteParams params;
  params.shape = testing::kernel_shape_of(layout, 1, DType::kFloat32);
  params.shape.slice_offset = layout.slice_offset(p.layer);
  params.tables.header = reinterpret_cast<const gpu::Header*>(header.data());
  params.tables.rows = reinterpret_cast<const gpu::Row*>(rows.data());
  params.counts.rows = static_cast<int32_t>(p.counted);
  params.layer = p.layer;
  const auto tensor = [&](const device::Memory& memory, DType dtype, const View& view, int dim) {
    return gpu::Tensor{memory.data() + view.offset * dtype_bytes(dtype),
                       dtype,
                       layout.kv_heads,
                       dim,
                       view.row_stride,
                       view.head_stride};
  };
  params.k = tensor(device_k, p.k_dtype, k_view, layout.k_dim);
  params.v = tensor(device_v, p.v_dtype, v_view, layout.v_dim);
  params.status = reinterpret_cast<uint64_t*>(status.data());
  device.check(device.api().write_rows(device.context(), &params, stream.get()), "write_rows");

  Result got;
  got.pool.resize(pool.size());
  stream.download(got.pool.data(), device_pool.data(), bytes_of(pool));
  stream.download(&got.status, status.data(), sizeof got.status);
  int64_t wrong = 0;
  for (size_t i = 0; i < pool.size(); ++i) wrong += got.pool[i] != expected.pool[i];
  // Of a row that does not fit there are no codes, and nobody reads what is there instead.
  const bool coded = is_coded(layout.k_dtype) || is_coded(layout.v_dtype);
  CHECK((wrong == 0 || (coded && failed >= 0)));
  CHECK(got.status == expected.status);
}

// Rows as forwards have them: runs of consecutive tokens, some over the edge of a chunk, rows that
// are not written in between, and rows of other sequences.
void place_rows(Problem& p, int64_t rows, std::mt19937& random) {
  p.rows = rows;
  p.chunk.assign(static_cast<size_t>(rows), -1);
  p.offset.assign(static_cast<size_t>(rows), 0);
  const int64_t tokens = p.layout.chunk_tokens;
  // Every sequence has the tokens after those of the one before it, so that no two rows meet.
  int64_t next = static_cast<int64_t>(random() % static_cast<uint64_t>(tokens));
  for (size_t row = 0; row < static_cast<size_t>(rows); ++row) {
    const uint32_t pick = random() % 16;
    if (pick == 0) continue;
    if (pick == 1) next += 1 + static_cast<int64_t>(random() % 40);
    p.chunk[row] = next / tokens;
    p.offset[row] = static_cast<int32_t>(next % tokens);
    ++next;
  }
  p.chunks = next / tokens + 2;
  std::vector<int64_t> homes(static_cast<size_t>(p.chunks));
  for (size_t i = 0; i < homes.size(); ++i) homes[i] = static_cast<int64_t>(i);
  std::shuffle(homes.begin(), homes.end(), random);
  for (int64_t& chunk : p.chunk) {
    if (chunk >= 0) chunk = homes[static_cast<size_t>(chunk)];
  }
  p.counted = rows + static_cast<int64_t>(random() % 3) * 50;
}

TEST_CASE("rows are written as the processor writes them, in all dtypes, shapes and strides") {
  testing::for_each_device([](device::Device& device) {
    std::mt19937 random(11);
    int round = 0;
    for (const DType from : kDTypes) {
      for (const DType to : kStored) {
        for (const Strides strides : kStrides) {
          Problem p;
          const int tokens[] = {16, 32, 64, 128, 256};
          const int dims[] = {16, 64, 96, 128, 144, 256, 272, 512};
          const int k_dim = dims[random() % 8], v_dim = dims[random() % 8];
          p.layout = layout_of(to, kStored[round % 5], 1 + static_cast<int>(random() % 3),
                               tokens[random() % 5], k_dim, v_dim, 3);
          p.layer = static_cast<int>(random() % 3);
          p.k_dtype = from;
          p.v_dtype = kDTypes[round / 3 % 3];
          p.k_strides = strides;
          p.v_strides = kStrides[random() % 7];
          const int64_t counts[] = {1, 2, 7, 31, 32, 33, 100};
          place_rows(p, counts[random() % 7], random);
          p.seed = static_cast<uint32_t>(round);
          CAPTURE(round);
          if (round % 4 == 0 || !testing::small_tests()) check(device, p);
          ++round;
        }
      }
    }
  });
}

TEST_CASE("any bits are converted as the processor converts them, and what is not finite is told") {
  testing::for_each_device([](device::Device& device) {
    std::mt19937 random(12);
    int round = 0;
    for (const DType from : kDTypes) {
      for (const DType to : kStored) {
        for (const int percent : {1, 50, 100}) {
          Problem p;
          p.layout = layout_of(to, to, 2, 64, 64, 128, 2);
          p.layer = 1;
          p.k_dtype = p.v_dtype = from;
          place_rows(p, 40, random);
          p.special_percent = percent;
          // Of no launch, of a later row or layer, of an earlier layer.
          const uint64_t before[] = {gpu::kNoFailure, uint64_t{1} << 32 | 39, uint64_t{2} << 32,
                                     38};
          p.before = before[random() % 4];
          p.seed = static_cast<uint32_t>(100 + round++);
          CAPTURE(round);
          check(device, p);
        }
      }
    }
  });
}

TEST_CASE("where no row is written, queries are looked at and nothing else is touched") {
  testing::for_each_device([&](device::Device& device) {
    testing::Shape shape;
    testing::Sequence sequence(testing::layout_of(shape), 40, 3);
    std::vector<testing::Row> rows(3);
    for (size_t i = 0; i < rows.size(); ++i) rows[i].position = 37 + static_cast<int64_t>(i);
    rows[1].query.assign(static_cast<size_t>(shape.kv_heads * shape.group * shape.k_dim),
                         std::numeric_limits<float>::quiet_NaN());
    testing::DeviceForward forward(device, shape, {&sequence}, rows);
    const std::vector<std::vector<float>> before = forward.attend();
    device::Memory status = device.allocate("status of queries", int64_t{sizeof(uint64_t)});
    uint64_t found = gpu::kNoFailure;
    forward.stream().upload(status.data(), &found, sizeof found);
    gpu::WriteParams params = forward.write_params();
    params.writes = false;
    params.q = forward.attend_params().q;
    params.query_status = reinterpret_cast<uint64_t*>(status.data());
    device.check(device.api().write_rows(device.context(), &params, forward.stream().get()),
                 "write_rows");
    forward.stream().download(&found, status.data(), sizeof found);
    CHECK((found & 0xFFFFFFFFu) == 1);
    CHECK(testing::differing_bits(forward.attend()[0], before[0]) == 0);
  });
}

TEST_CASE("the first of several rows that are not finite is told") {
  testing::for_each_device([](device::Device& device) {
    for (const DType dtype : kDTypes) {
      for (const bool keys : {true, false}) {
        Problem p;
        p.layout = layout_of(dtype, dtype, 3, 64, 256, 256, 1);
        p.k_dtype = p.v_dtype = dtype;
        p.rows = p.counted = 100;
        for (int32_t row = 0; row < 100; ++row) {
          p.chunk.push_back(row / 64);
          p.offset.push_back(row % 64);
        }
        (keys ? p.infinite_keys : p.infinite_values) = {37, 38, 39, 53, 60, 61, 62, 90};
        check(device, p);
      }
    }
  });
}

}  // namespace
}  // namespace kvpager
