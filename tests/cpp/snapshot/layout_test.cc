// The one notion of a valid layout, which files, pagers and bindings share.
#include "kvpager/layout.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kvpager/error.h"
#include "sample.h"
#include "snapshot/metadata.h"

namespace kvpager::snapshot_test {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kQ8,
                             DType::kQ4};

Layout largest_layout(DType k, DType v) {
  Layout layout;
  layout.layers = layout.kv_heads = 1024;
  layout.chunk_tokens = 256;
  layout.k_dim = layout.v_dim = 512;
  layout.k_dtype = k;
  layout.v_dtype = v;
  return layout;
}

TEST_CASE("AFieldOutOfRangeIsRefusedByItsNameWhateverTheOthersAre") {
  struct Field {
    const char* name;
    int32_t Layout::* member;
    std::vector<int32_t> wrong;
  };
  const Field fields[] = {
      {"layout.layers", &Layout::layers, {0, -1, 1025, INT32_MAX, INT32_MIN}},
      {"layout.kv_heads", &Layout::kv_heads, {0, -1, 1025, INT32_MAX, INT32_MIN}},
      {"layout.chunk_tokens", &Layout::chunk_tokens, {0, 1, 8, 17, 48, 512, 65536, INT32_MAX, -16}},
      {"layout.k_dim", &Layout::k_dim, {0, 1, 15, 24, 528, 65536, INT32_MAX, -16}},
      {"layout.v_dim", &Layout::v_dim, {0, 1, 15, 24, 528, 65536, INT32_MAX, -16}},
  };
  for (const Layout& sound : {small_layout(), mixed_layout(), large_layout()}) {
    CHECK(!sound.broken_rule());
    for (const Field& field : fields) {
      for (const int32_t value : field.wrong) {
        Layout layout = sound;
        layout.*field.member = value;
        const auto broken = layout.broken_rule();
        REQUIRE(broken);
        CHECK(broken->field == field.name);
        CHECK(broken->value == std::to_string(value));
        CHECK_THROWS_AS(layout.validate(), InvalidArgumentError);
        CHECK(snapshot::check_geometry(layout, 0)->field == field.name);
      }
    }
    for (int number = 0; number < 256; ++number) {
      Layout layout = sound;
      layout.k_dtype = static_cast<DType>(number);
      const auto broken = layout.broken_rule();
      if (number == 3 || number > 5) CHECK(broken->field == "layout.k_dtype");
    }
  }
}

TEST_CASE("OfALayoutWithoutABrokenRuleEverySizeIsPositiveAndFits64Bits") {
  for (const DType k : kDTypes) {
    for (const DType v : kDTypes) {
      for (const bool floats : {false, true}) {
        Layout layout = largest_layout(k, v);
        if (floats) layout.float_layers.add(1);
        if (layout.broken_rule()) continue;
        CHECK(layout.chunk_bytes() > 0);
        CHECK(layout.chunk_bytes() <= int64_t{1} << 40);
        CHECK(layout.largest_slice_bytes() ==
              std::max(layout.slice_bytes(0), layout.slice_bytes(1)));
        int64_t offset = 0;
        for (int layer = 0; layer < layout.layers; ++layer) {
          CHECK(layout.slice_offset(layer) == offset);
          CHECK(layout.slice_bytes(layer) == layout.of_layer(layer).page_bytes() * layout.kv_heads);
          offset += layout.slice_bytes(layer);
        }
        CHECK(layout.chunk_bytes() == offset);
      }
    }
  }
}

TEST_CASE("ALayerOfCodesMayHaveMoreBytesThanOneOfFloats") {
  Layout layout = mixed_layout();
  layout.k_dtype = DType::kFloat32;
  layout.validate();
  CHECK(layout.slice_bytes(1) > layout.slice_bytes(0));
  CHECK(layout.largest_slice_bytes() == layout.slice_bytes(1));
}

TEST_CASE("SummariesOfMoreBytesThanAnyHasAreRefused") {
  for (const int64_t bytes : {int64_t{-1}, (int64_t{1} << 30) + 1, INT64_MAX, INT64_MIN}) {
    CHECK(snapshot::check_geometry(small_layout(), bytes)->field == "layout.summary_page_bytes");
  }
  CHECK(!snapshot::check_geometry(small_layout(), int64_t{1} << 30));
}

// Beyond what is valid no product is one of 32 bits either.
TEST_CASE("ATileOf65536By65536Has64Bits") {
  Layout layout = mixed_layout();
  layout.chunk_tokens = layout.k_dim = 65536;
  layout.v_dim = 16;
  CHECK(layout.slice_bytes(0) == 2 * (int64_t{65536} * 65536 + 65536 * 16) * 2);
}

}  // namespace
}  // namespace kvpager::snapshot_test
