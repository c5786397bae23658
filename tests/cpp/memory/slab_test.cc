#include "memory/slab.h"

#include <doctest/doctest.h>

#include <cstring>
#include <limits>
#include <string>

#include "kvpager/error.h"

namespace kvpager {
namespace {

TEST_CASE("what a slab maps is counted while it lives and not a byte longer") {
  const int64_t before = total_mapped_bytes();
  {
    const Slab a("a", 3, 4096);
    CHECK(a.mapped_bytes() == 3 * 4096);
    CHECK(total_mapped_bytes() == before + 3 * 4096);
    const Slab b("b", 5, 8192);
    CHECK(total_mapped_bytes() == before + 3 * 4096 + 5 * 8192);
  }
  CHECK(total_mapped_bytes() == before);
}

TEST_CASE("slots are 64-byte aligned, disjoint and zero at first") {
  Slab slab("slots", 4, 192);
  for (int64_t i = 0; i < 4; ++i) {
    CHECK(reinterpret_cast<uintptr_t>(slab.slot(i)) % 64 == 0);
    for (int64_t b = 0; b < 192; ++b) REQUIRE(slab.slot(i)[b] == std::byte{0});
    std::memset(slab.slot(i), static_cast<int>(i + 1), 192);
  }
  const Slab& read_only = slab;
  for (int64_t i = 0; i < 4; ++i) {
    for (int64_t b = 0; b < 192; ++b) {
      REQUIRE(read_only.slot(i)[b] == std::byte{static_cast<uint8_t>(i + 1)});
    }
  }
  CHECK(slab.slots() == 4);
  CHECK(slab.slot_bytes() == 192);
}

TEST_CASE("a slab of no slots maps nothing") {
  const int64_t before = total_mapped_bytes();
  const Slab slab("none", 0, 4096);
  CHECK(slab.mapped_bytes() == 0);
  CHECK(total_mapped_bytes() == before);
}

TEST_CASE("what the system refuses is a CapacityError that names the slab and the bytes") {
  const int64_t before = total_mapped_bytes();
  const auto message = [](int64_t slots, int64_t bytes) -> std::string {
    try {
      const Slab slab("host arena", slots, bytes);
    } catch (const CapacityError& error) {
      return error.what();
    }
    return "no error";
  };
  const std::string refused = message(int64_t{1} << 40, int64_t{1} << 20);
  CHECK(refused.find("host arena") != std::string::npos);
  CHECK(refused.find(std::to_string(int64_t{1} << 60)) != std::string::npos);
  const std::string overflow = message(std::numeric_limits<int64_t>::max() / 2, 3);
  CHECK(overflow.find("overflow") != std::string::npos);
  CHECK(total_mapped_bytes() == before);
}

}  // namespace
}  // namespace kvpager
