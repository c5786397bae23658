// Conversions between float32 and the 16-bit formats, held against the formats' definitions for
// every code and on both sides of every rounding boundary, in every tier.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "base/half.h"
#include "float_mode.h"
#include "kernels/kernel_table.h"
#include "kvpager/attention.h"
#include "read_row.h"
#include "tiers.h"

namespace kvpager::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kCodes = 65536;

// A format by its definition: sign, exponent field, mantissa field.
struct Format {
  DType dtype;
  int mantissa_bits;
  int bias;

  int infinity() const { return 0x8000 - (1 << mantissa_bits); }
  bool is_nan(uint16_t code) const { return (code & 0x7FFF) > infinity(); }

  double value(uint16_t code) const {
    const int magnitude = code & 0x7FFF;
    const double sign = (code & 0x8000) != 0 ? -1.0 : 1.0;
    if (magnitude == infinity()) return sign * std::numeric_limits<double>::infinity();
    const int exponent = magnitude >> mantissa_bits;
    const int mantissa = magnitude & ((1 << mantissa_bits) - 1);
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return sign * std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
  }
};

const Format kFloat16Format = {DType::kFloat16, 10, 15};
const Format kBFloat16Format = {DType::kBFloat16, 7, 127};

std::vector<uint16_t> all_codes() {
  std::vector<uint16_t> codes(kCodes);
  for (int i = 0; i < kCodes; ++i) codes[static_cast<size_t>(i)] = static_cast<uint16_t>(i);
  return codes;
}

TEST_CASE("each of the 65,536 codes of a 16-bit format widens to the value it stands for") {
  const std::vector<uint16_t> codes = all_codes();
  for (const Format& format : {kFloat16Format, kBFloat16Format}) {
    CAPTURE(std::string(dtype_name(format.dtype)));
    std::vector<uint32_t> first;
    in_every_tier([&](const KernelTable& table) {
      std::vector<float> wide(codes.size());
      table.to_float(codes.data(), format.dtype, kCodes, wide.data());
      int wrong = 0;
      std::vector<uint32_t> bits;
      for (size_t i = 0; i < codes.size(); ++i) {
        bits.push_back(float_bits(wide[i]));
        if (format.is_nan(codes[i])) {
          wrong += !std::isnan(wide[i]);
          wrong += (bits[i] >> 31) != (codes[i] >> 15);
        } else {
          wrong += bits[i] != float_bits(static_cast<float>(format.value(codes[i])));
        }
        float alone;
        table.to_float(codes.data() + i, format.dtype, 1, &alone);
        wrong += float_bits(alone) != bits[i];
      }
      CHECK(wrong == 0);
      if (first.empty()) first = bits;
      CHECK(bits == first);  // NaN payloads too
    });
  }
}

// float32 values around every boundary of a format, with what each rounds to: the code itself, and
// just below, at, and just above half-way to the next code.
struct Boundary {
  float value;
  uint16_t code;
};

std::vector<Boundary> boundaries(const Format& format) {
  std::vector<Boundary> all;
  const int infinity = format.infinity();
  for (int code = 0; code < infinity; ++code) {
    const uint16_t here = static_cast<uint16_t>(code);
    const uint16_t next = static_cast<uint16_t>(code + 1);
    const double low = format.value(here);
    // Past the greatest finite value the step goes on as if there were one more.
    const double high = code + 1 < infinity
                            ? format.value(next)
                            : 2 * low - format.value(static_cast<uint16_t>(code - 1));
    const float middle = static_cast<float>((low + high) / 2);
    all.push_back({static_cast<float>(low), here});
    // A bfloat16 denormal's half-way point is a float32 denormal: still exact.
    REQUIRE(static_cast<double>(middle) == (low + high) / 2);
    all.push_back({std::nextafter(middle, 0.0f), here});
    all.push_back({middle, (code & 1) == 0 ? here : next});
    all.push_back({std::nextafter(middle, kInfinity), next});
  }
  all.push_back({std::numeric_limits<float>::max(), static_cast<uint16_t>(infinity)});
  all.push_back({kInfinity, static_cast<uint16_t>(infinity)});
  const size_t positive = all.size();
  for (size_t i = 0; i < positive; ++i) {
    all.push_back({-all[i].value, static_cast<uint16_t>(all[i].code | 0x8000)});
  }
  return all;
}

TEST_CASE("both sides of every rounding boundary go to the nearest code, ties to the even one") {
  for (const Format& format : {kFloat16Format, kBFloat16Format}) {
    CAPTURE(std::string(dtype_name(format.dtype)));
    const std::vector<Boundary> all = boundaries(format);
    std::vector<float> values;
    for (const Boundary& boundary : all) values.push_back(boundary.value);
    const int64_t count = static_cast<int64_t>(values.size());
    in_every_tier([&](const KernelTable& table) {
      std::vector<uint16_t> codes(values.size());
      table.from_float(values.data(), format.dtype, count, codes.data());
      int wrong = 0;
      for (size_t i = 0; i < all.size(); ++i) wrong += codes[i] != all[i].code;
      CHECK(wrong == 0);
      // One at a time, the way a remainder shorter than a register goes.
      for (size_t i = 0; i < all.size(); i += 7) {
        table.from_float(values.data() + i, format.dtype, 1, codes.data() + i);
        wrong += codes[i] != all[i].code;
      }
      CHECK(wrong == 0);
    });
  }
}

TEST_CASE("NaN of every payload stays NaN with its sign when it is narrowed, alike in every tier") {
  std::vector<float> values;
  for (const uint32_t sign : {0u, 0x80000000u}) {
    for (uint32_t payload = 1; payload < 0x800000u; payload += 1021) {
      values.push_back(bits_float(sign | 0x7F800000u | payload));
    }
    values.push_back(bits_float(sign | 0x7F800001u));
    values.push_back(bits_float(sign | 0x7FFFFFFFu));
  }
  for (const Format& format : {kFloat16Format, kBFloat16Format}) {
    CAPTURE(std::string(dtype_name(format.dtype)));
    std::vector<uint16_t> first;
    in_every_tier([&](const KernelTable& table) {
      std::vector<uint16_t> codes(values.size());
      table.from_float(values.data(), format.dtype, static_cast<int64_t>(values.size()),
                       codes.data());
      int wrong = 0;
      for (size_t i = 0; i < codes.size(); ++i) {
        wrong += !format.is_nan(codes[i]);
        wrong += (codes[i] >> 15) != (float_bits(values[i]) >> 31);
      }
      CHECK(wrong == 0);
      if (first.empty()) first = codes;
      CHECK(codes == first);
    });
  }
}

Layout one_page(DType dtype) {
  Layout layout;
  layout.layers = layout.kv_heads = 1;
  layout.chunk_tokens = 16;
  layout.k_dim = layout.v_dim = 512;
  layout.k_dtype = layout.v_dtype = dtype;
  return layout;
}

TEST_CASE("rows are stored rounded to nearest whatever the calling thread's rounding mode is") {
  for (const Format& format : {kFloat16Format, kBFloat16Format}) {
    CAPTURE(std::string(dtype_name(format.dtype)));
    const Layout layout = one_page(format.dtype);
    const std::vector<Boundary> all = boundaries(format);
    in_every_tier([&](const KernelTable& table) {
      for (const NamedMode& mode : kModes) {
        CAPTURE(std::string(table.name));
        CAPTURE(std::string(mode.name));
        int64_t wrong = 0;
        std::vector<float> row(512);
        float k[512];
        float v[512];
        std::vector<std::byte> slice(static_cast<size_t>(layout.slice_bytes(0)));
        for (size_t first = 0; first + 512 <= all.size(); first += 512) {
          for (size_t d = 0; d < 512; ++d) {
            row[d] = std::isinf(format.value(all[first + d].code)) ? 0.0f : all[first + d].value;
          }
          const TensorView view = {row.data(), DType::kFloat32, 1, 1, 512, 512, 512};
          const WriteRow where = {slice.data(), 5};
          {
            const FloatMode scope(mode.bits);
            write_rows(layout, view, view, &where, 1);
          }
          read_row(layout, slice.data(), 0, 5, k, v);  // multiplies, in the usual mode
          for (size_t d = 0; d < 512; ++d) {
            const uint16_t code = all[first + d].code;
            if (std::isinf(format.value(code))) continue;
            const uint32_t expected = float_bits(static_cast<float>(format.value(code)));
            wrong += float_bits(k[d]) != expected;
            wrong += float_bits(v[d]) != expected;
          }
        }
        CHECK(wrong == 0);
      }
    });
  }
}

TEST_CASE("a value fits a dtype exactly when it is finite there, on both sides of every limit") {
  const auto rounds_to_finite = [](double value, DType stored) {
    if (!std::isfinite(value)) return false;
    if (stored == DType::kFloat32) return true;
    const Format& format = stored == DType::kFloat16 ? kFloat16Format : kBFloat16Format;
    const uint16_t greatest = static_cast<uint16_t>(format.infinity() - 1);
    const double step = format.value(greatest) - format.value(static_cast<uint16_t>(greatest - 1));
    return std::fabs(value) < format.value(greatest) + step / 2;  // the tie rounds to infinity
  };
  const DType dtypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  std::vector<float> floats;
  for (const Format& format : {kFloat16Format, kBFloat16Format}) {
    const std::vector<Boundary> all = boundaries(format);
    for (size_t i = 0; i < all.size(); i += 3) floats.push_back(all[i].value);
    for (size_t i = all.size() / 2 - 12; i < all.size() / 2; ++i) {  // around the greatest
      floats.push_back(all[i].value);
      floats.push_back(-all[i].value);
    }
  }
  for (const uint32_t bits : {0x7F800000u, 0x7F800001u, 0x7FC00000u, 0x7F7FFFFFu, 0x00000001u}) {
    floats.push_back(bits_float(bits));
    floats.push_back(bits_float(bits | 0x80000000u));
  }
  const std::vector<uint16_t> codes = all_codes();
  for (const KernelTable* table : runnable_kernels()) {
    for (const NamedMode& mode : {kModes[0], kModes[3]}) {
      for (const DType stored : dtypes) {
        CAPTURE(std::string(table->name));
        CAPTURE(std::string(mode.name));
        CAPTURE(std::string(dtype_name(stored)));
        int wrong = 0;
        std::vector<uint8_t> fits(floats.size());
        {
          const FloatMode scope(mode.bits);
          for (size_t i = 0; i < floats.size(); ++i) {
            fits[i] = table->all_fit(&floats[i], DType::kFloat32, stored, 1);
          }
        }
        for (size_t i = 0; i < floats.size(); ++i) {
          wrong += (fits[i] != 0) != rounds_to_finite(double{floats[i]}, stored);
        }
        for (const Format& format : {kFloat16Format, kBFloat16Format}) {
          for (const uint16_t code : codes) {
            const double value = format.is_nan(code) ? std::nan("") : format.value(code);
            wrong +=
                table->all_fit(&code, format.dtype, stored, 1) != rounds_to_finite(value, stored);
          }
        }
        CHECK(wrong == 0);
      }
    }
  }
}

TEST_CASE("one element that does not fit is found in every place of a run of any length") {
  in_every_tier([&](const KernelTable& table) {
    for (const int64_t length : {1, 7, 16, 31, 64, 131}) {
      std::vector<float> wide(static_cast<size_t>(length), -65519.0f);
      std::vector<uint16_t> narrow(static_cast<size_t>(length), 0xFF7F);  // -greatest bfloat16
      CHECK(table.all_fit(wide.data(), DType::kFloat32, DType::kFloat16, length));
      CHECK(table.all_fit(narrow.data(), DType::kBFloat16, DType::kFloat32, length));
      for (size_t at = 0; at < wide.size(); ++at) {
        wide[at] = -65520.0f;
        narrow[at] = 0xFF80;
        CHECK_FALSE(table.all_fit(wide.data(), DType::kFloat32, DType::kFloat16, length));
        CHECK(table.all_fit(wide.data(), DType::kFloat32, DType::kBFloat16, length));
        CHECK_FALSE(table.all_fit(narrow.data(), DType::kBFloat16, DType::kFloat32, length));
        wide[at] = -65519.0f;
        narrow[at] = 0xFF7F;
      }
    }
  });
}

TEST_CASE("rows that overflow the dtype they would be kept in are found, with any strides") {
  // Two heads of 16 in rows of 80 elements, or one run of 32.
  in_every_tier([&](const KernelTable& table) {
    for (const int64_t head_stride : {16, 40}) {
      CAPTURE(std::string(table.name));
      CAPTURE(head_stride);
      Layout layout;
      layout.layers = 1;
      layout.kv_heads = 2;
      layout.chunk_tokens = 16;
      layout.k_dim = layout.v_dim = 16;
      layout.k_dtype = DType::kFloat16;
      layout.v_dtype = DType::kFloat32;
      // What lies between the heads must not be looked at.
      std::vector<float> k(5 * 80, std::numeric_limits<float>::quiet_NaN());
      std::vector<float> v = k;
      const auto at = [&](int64_t row, int64_t head, int64_t d) {
        return static_cast<size_t>(row * 80 + head * head_stride + d);
      };
      for (int64_t row = 0; row < 5; ++row) {
        for (int64_t head = 0; head < 2; ++head) {
          for (int64_t d = 0; d < 16; ++d) k[at(row, head, d)] = v[at(row, head, d)] = 65519.0f;
        }
      }
      std::byte slice{};
      std::vector<WriteRow> rows(5, WriteRow{&slice, 0});
      const auto found = [&] {
        const TensorView keys = {k.data(), DType::kFloat32, 5, 2, 16, 80, head_stride};
        const TensorView values = {v.data(), DType::kFloat32, 5, 2, 16, 80, head_stride};
        return find_non_finite(layout, keys, values, rows.data(), 5);
      };
      CHECK(found() == -1);
      v[at(1, 1, 15)] = 1e30f;  // values are kept in float32
      CHECK(found() == -1);
      k[at(3, 1, 15)] = -65520.0f;
      CHECK(found() == 3);
      k[at(2, 0, 0)] = 65520.0f;
      CHECK(found() == 2);
      rows[2].slice = nullptr;
      CHECK(found() == 3);
      v[at(1, 0, 3)] = -kInfinity;
      CHECK(found() == 1);
    }
  });
}

}  // namespace
}  // namespace kvpager::testing
