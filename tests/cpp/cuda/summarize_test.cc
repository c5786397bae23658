// Summaries made on a device are the processor's, byte for byte.
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "../device/devices.h"
#include "kvpager/selection.h"
#include "noise.h"
#include "problem.h"

namespace kvpager::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kLargest = std::numeric_limits<float>::max();

struct Keys {
  const char* what;
  float scale;
  std::vector<float> sprinkled;  // every few elements one of these, in turn
};

const Keys kKinds[] = {
    {"ordinary", 1.0f, {}},
    {"equal", 0.0f, {2.5f}},
    {"zeros of either sign", 0.0f, {0.0f, -0.0f}},
    {"denormals", 0x1p-130f, {0x1p-149f, -0x1p-149f}},
    {"denormals among ordinary", 1.0f, {0x1p-140f, -0x1p-127f}},
    {"near what counts as zero", 1e-30f, {}},
    {"near the greatest", 3e38f, {kLargest, 0.0f, -kLargest}},
    {"not finite", 1.0f, {kNaN, kInfinity, -kInfinity, -kNaN}},
    {"halves between codes", 0.0f, {0.0f, 1.0f, 2.0f, 3.0f, 0.5f, 1.5f, 2.5f}},
};
// Levels whose largest ones make the scale 1, so that all others lie halfway between two codes.
float halfway_sketch(int64_t d, int64_t t) {
  const float low = d == 0 ? -32767.0f : static_cast<float>(d % 9 - 4) + 0.5f;
  const float step = d == 0 ? 255.0f : static_cast<float>(d % 7) + 0.5f;
  return low + step * static_cast<float>(t % 4);
}
std::vector<std::byte> halfway_tile(const Layout& layout, uint64_t, uint64_t) {
  std::vector<std::byte> tile(static_cast<size_t>(layout.k_tile_bytes()));
  for (int64_t d = 0; d < layout.k_dim; ++d) {
    for (int64_t t = 0; t < layout.chunk_tokens; ++t) {
      round_to(DType::kFloat32, halfway_sketch(d, t), tile.data(), d * layout.chunk_tokens + t);
    }
  }
  return tile;
}

constexpr size_t kKindCount = sizeof kKinds / sizeof kKinds[0];

// Keys of dimension d have a mean and a width of their own, as trained ones do.
std::vector<std::byte> tile_of(const Layout& layout, const Keys& keys, uint64_t seed) {
  const size_t count = static_cast<size_t>(layout.k_dim) * static_cast<size_t>(layout.chunk_tokens);
  const bool coded = is_coded(layout.k_dtype);
  const int64_t code_bytes = layout.chunk_tokens * row_code_bytes(layout.k_dtype, layout.k_dim);
  const int64_t scales = layout.chunk_tokens * code_scales(layout.k_dtype, layout.k_dim);
  std::vector<std::byte> tile(static_cast<size_t>(layout.k_tile_bytes()));
  size_t turn = seed;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t d = i / static_cast<size_t>(layout.chunk_tokens);
    float x = keys.scale * (0.6f * noise(seed, i) + 0.4f * noise(seed, 1 << 20, d));
    const bool all = keys.scale == 0.0f;
    if (!keys.sprinkled.empty() && (all || i % 3 == 0)) {
      x = keys.sprinkled[turn++ % keys.sprinkled.size()];
    }
    if (!coded) {
      round_to(layout.k_dtype, x, tile.data(), static_cast<int64_t>(i));
      continue;
    }
    if (static_cast<int64_t>(i) < code_bytes) {
      tile[i] = static_cast<std::byte>(static_cast<int>(127 * noise(seed, i)));
    }
    if (static_cast<int64_t>(i) < scales) {
      round_to(DType::kBFloat16, x / 127, tile.data() + code_bytes, static_cast<int64_t>(i));
    }
  }
  return tile;
}

using MakeTile = std::vector<std::byte> (*)(const Layout&, uint64_t page, uint64_t seed);

std::vector<std::byte> tile_of_kinds(const Layout& layout, uint64_t page, uint64_t seed) {
  return tile_of(layout, kKinds[(page + seed) % kKindCount], seed * 1000 + page);
}

// Chunks and summaries at places that do not follow one another, all else poison.
void check_summaries(device::Device& device, const Layout& layout, int count, uint64_t seed,
                     MakeTile make_tile = tile_of_kinds) {
  const int64_t page_bytes = bits2::summary_bytes(layout);
  const int64_t summary_bytes = page_bytes * layout.layers * layout.kv_heads;
  const int64_t chunk_step = layout.chunk_bytes() + 64;
  const int64_t summary_step = summary_bytes + 64;
  const device::Memory chunks = device.allocate("chunks", count * chunk_step);
  const device::Memory summaries = device.allocate("summaries", count * summary_step);
  TestStream stream(device);

  std::vector<std::byte> image(static_cast<size_t>(chunks.bytes()), std::byte{0xFF});
  std::vector<std::byte> expected(static_cast<size_t>(summaries.bytes()), std::byte{0xC3});
  gpu::SummarizeParams params;
  params.shape = kernel_shape_of(layout, 1, DType::kFloat32);
  params.summary_page_bytes = page_bytes;
  params.count = count;
  for (int c = 0; c < count; ++c) {
    const int64_t at = (count - 1 - c) * chunk_step;
    params.chunks[c] = chunks.data() + at;
    params.summaries[c] = summaries.data() + c * summary_step;
    for (int layer = 0; layer < layout.layers; ++layer) {
      for (int head = 0; head < layout.kv_heads; ++head) {
        const uint64_t page =
            static_cast<uint64_t>((c * layout.layers + layer) * layout.kv_heads + head);
        const std::vector<std::byte> tile = make_tile(layout, page, seed);
        std::memcpy(image.data() + at + layout.page_offset(layer, head), tile.data(), tile.size());
        bits2::summarize(
            layout, tile.data(),
            expected.data() + c * summary_step + (layer * layout.kv_heads + head) * page_bytes);
      }
    }
  }
  stream.upload(chunks.data(), image.data(), chunks.bytes());
  stream.fill(summaries.data(), 0xC3, summaries.bytes());
  device.check(device.api().summarize(device.context(), &params, stream.get()), "summarize");
  std::vector<std::byte> got(expected.size());
  stream.download(got.data(), summaries.data(), summaries.bytes());
  for (int c = 0; c < count; ++c) {
    for (int64_t page = 0; page < int64_t{layout.layers} * layout.kv_heads; ++page) {
      const size_t at = static_cast<size_t>(c * summary_step + page * page_bytes);
      CAPTURE(c);
      CAPTURE(page);
      CAPTURE(std::string(
          kKinds[(static_cast<uint64_t>(c * layout.layers * layout.kv_heads + page) + seed) %
                 kKindCount]
              .what));
      CHECK(std::memcmp(got.data() + at, expected.data() + at, static_cast<size_t>(page_bytes)) ==
            0);
    }
  }
  CHECK(got == expected);  // between them nothing was written
}

Layout layout_of(int layers, int kv_heads, int tokens, int k_dim, DType dtype) {
  Layout layout;
  layout.layers = layers;
  layout.kv_heads = kv_heads;
  layout.chunk_tokens = tokens;
  layout.k_dim = k_dim;
  layout.v_dim = 32;
  layout.k_dtype = dtype;
  layout.v_dtype = DType::kFloat16;
  return layout;
}

constexpr DType kStored[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kQ8,
                             DType::kQ4};

TEST_CASE("summaries made on a device are the processor's for every dtype and shape") {
  for_each_device([](device::Device& device) {
    uint64_t seed = 0;
    for (const DType dtype : kStored) {
      for (const int tokens : {16, 32, 64, 128, 256}) {
        for (const int k_dim : {16, 48, 64, 96, 128, 256, 512}) {
          if (dtype == DType::kQ4 && k_dim % kQ4Group != 0) continue;
          if (small_tests() && (tokens > 64 || (k_dim != 48 && k_dim != 128))) continue;
          // Large tiles with one dtype each: the others differ in what they convert alone.
          if (tokens * k_dim > 8192 &&
              (tokens / 16 + k_dim / 16) % 3 != static_cast<int>(dtype) % 4) {
            continue;
          }
          CAPTURE(std::string(dtype_name(dtype)));
          CAPTURE(tokens);
          CAPTURE(k_dim);
          check_summaries(device, layout_of(1, 2, tokens, k_dim, dtype), 1, ++seed);
        }
      }
    }
  });
}

TEST_CASE("every layer and head of sixteen chunks of special keys is summarised in its place") {
  for_each_device([](device::Device& device) {
    for (const DType dtype : kStored) {
      CAPTURE(std::string(dtype_name(dtype)));
      check_summaries(device, layout_of(3, 2, 32, dtype == DType::kQ4 ? 64 : 48, dtype),
                      gpu::kMaxSummarized, 77);
    }
  });
}

TEST_CASE("levels halfway between two codes go to the even one") {
  for_each_device([](device::Device& device) {
    const Layout layout = layout_of(1, 2, 16, 64, DType::kFloat32);
    check_summaries(device, layout, 1, 1, halfway_tile);
  });
}

TEST_CASE("summaries do not depend on the order in which threads get their turn") {
  if (!tests_shim()) return;
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    CAPTURE(seed);
    const std::shared_ptr<device::Device> device = shim(seed);
    check_summaries(*device, layout_of(1, 1, 128, 144, DType::kFloat16), 2, seed);
  }
}

}  // namespace
}  // namespace kvpager::testing
