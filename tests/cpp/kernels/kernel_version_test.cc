// The bits of kernel version 1, pinned. A fingerprint with this version promises them to snapshots
// that exist: whoever changes a bit raises kKernelVersion in attention.h and writes down new digests.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "attend_problem.h"
#include "bits2_score.h"
#include "kernels/kernel_table.h"
#include "kvpager/selection.h"
#include "noise.h"
#include "tiers.h"

namespace kvpager::testing {
namespace {

// FNV-1a.
class Digest {
 public:
  template <class T>
  void add(const std::vector<T>& values) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(values.data());
    for (size_t i = 0; i < values.size() * sizeof(T); ++i) {
      hash_ = (hash_ ^ bytes[i]) * 0x100000001B3ull;
    }
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xCBF29CE484222325ull;
};

uint64_t attention_digest(DType dtype) {
  Digest digest;
  for (const bool plain : {true, false}) {
    Shape shape;
    shape.dtype = dtype;
    shape.tokens = plain ? 64 : 16;
    shape.k_dim = plain ? 64 : 80;
    shape.v_dim = plain ? 64 : 48;
    shape.softcap = plain ? 0.0f : 3.0f;
    shape.window = plain ? 0 : 100;
    shape.sinks = !plain;
    const auto element = [](uint64_t what) {
      return [=](int64_t t, int head, int d) {
        return 2.0f * noise(what, static_cast<uint64_t>(t), static_cast<uint64_t>(head),
                            static_cast<uint64_t>(d));
      };
    };
    Sequence sequence(layout_of(shape), 10 * shape.tokens + 3, element(1), element(2));
    std::vector<Row> rows;
    for (const int64_t position : {int64_t{0}, int64_t{shape.tokens}, sequence.length() - 1}) {
      Row row;
      row.position = position;
      row.query.resize(static_cast<size_t>(4 * shape.k_dim));
      for (size_t i = 0; i < row.query.size(); ++i) {
        row.query[i] = 2.0f * noise(3, static_cast<uint64_t>(position), i);
      }
      rows.push_back(row);
    }
    for (const auto& row : attend(shape, {&sequence}, rows)) digest.add(row);
  }
  return digest.value();
}

uint64_t summary_digest() {
  Layout layout;
  layout.layers = layout.kv_heads = 1;
  layout.chunk_tokens = 64;
  layout.k_dim = layout.v_dim = 80;
  std::vector<float> tile(64 * 80);
  std::vector<float> q(2 * 80);
  for (size_t i = 0; i < tile.size(); ++i) tile[i] = noise(4, i) + 0.5f * noise(5, i / 64);
  for (size_t i = 0; i < q.size(); ++i) q[i] = noise(6, i);
  std::vector<std::byte> summary(static_cast<size_t>(bits2::summary_bytes(layout)));
  bits2::summarize(layout, reinterpret_cast<const std::byte*>(tile.data()), summary.data());
  std::vector<std::byte> query(static_cast<size_t>(bits2::query_bytes(layout, 2)));
  bits2::prepare(layout, 2, q.data(), query.data());
  std::vector<double> score(1);
  const std::byte* pointer = summary.data();
  bits2::score(layout, 2, query.data(), &pointer, 1, score.data());
  Digest digest;
  digest.add(summary);
  digest.add(score);
  return digest.value();
}

TEST_CASE("kernel version 1 has the bits it had when it was fixed") {
  REQUIRE(kKernelVersion == 1);
  struct Pinned {
    std::string what;
    uint64_t digest;
  };
  const Pinned attention[] = {{"float32", 0x39B247C35B019A3Dull},
                              {"float16", 0xBACBE5CF0EC4FFBBull},
                              {"bfloat16", 0xE9DC69A4494DB2F9ull}};
  in_every_tier([&](const KernelTable&) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      const Pinned& pinned = attention[static_cast<size_t>(dtype)];
      REQUIRE(pinned.what == dtype_name(dtype));
      CAPTURE(pinned.what);
      CHECK(attention_digest(dtype) == pinned.digest);
    }
    CHECK(summary_digest() == 0xF6FCE859A56CC44Dull);
  });
}

}  // namespace
}  // namespace kvpager::testing
