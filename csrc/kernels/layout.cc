#include "kvpager/layout.h"

#include "kvpager/error.h"

namespace kvpager {
namespace {

using Found = std::optional<BrokenRule>;

// An element type by its name; by its number where it has none.
std::string named(DType dtype) {
  const bool known = static_cast<uint8_t>(dtype) <= static_cast<uint8_t>(DType::kQ4);
  return known ? dtype_name(dtype) : str(static_cast<int>(dtype));
}

Found check_range(const char* field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return std::nullopt;
  return BrokenRule{field, str(value), str(low, " to ", high)};
}

Found check_dim(const char* field, int64_t value) {
  if (auto found = check_range(field, value, 16, kMostDim)) return found;
  if (value % 16 == 0) return std::nullopt;
  return BrokenRule{field, str(value), "a multiple of 16 (pad the heads with zeros)"};
}

Found check_dtype(const char* field, DType dtype, const char* dim_field, int64_t dim) {
  if (!is_float(dtype) && !is_coded(dtype)) {
    return BrokenRule{field, named(dtype), "float32, float16, bfloat16, q8 or q4"};
  }
  if (dtype == DType::kQ4 && dim % kQ4Group != 0) {
    return BrokenRule{field, str("q4 and ", dim_field, " is ", dim),
                      str("a multiple of ", kQ4Group)};
  }
  return std::nullopt;
}

Found check_rotated(const char* field, bool rotated, const char* dtype_field, DType dtype) {
  if (!rotated || is_coded(dtype)) return std::nullopt;
  return BrokenRule{field, str("true and ", dtype_field, " is ", named(dtype)),
                    "false, or q8 or q4"};
}

Found check_float_layers(const Layout& layout) {
  if (layout.float_layers.empty()) {
    if (layout.float_dtype == DType::kFloat32) return std::nullopt;
    return BrokenRule{"layout.float_dtype",
                      str(named(layout.float_dtype), " and float_layers is empty"), "float32"};
  }
  if (!is_coded(layout.k_dtype) && !is_coded(layout.v_dtype)) {
    return BrokenRule{"layout.float_layers",
                      str("not empty and k_dtype is ", named(layout.k_dtype), ", v_dtype ",
                          named(layout.v_dtype)),
                      "q8 or q4 of one"};
  }
  if (!is_float(layout.float_dtype)) {
    return BrokenRule{"layout.float_dtype", named(layout.float_dtype),
                      "float32, float16 or bfloat16"};
  }
  if (layout.float_layers.count_below(layout.layers) !=
      layout.float_layers.count_below(kMostLayers)) {
    return BrokenRule{"layout.float_layers", str("of a layer from ", layout.layers, " on"),
                      "layers below it"};
  }
  return std::nullopt;
}

Found check_chunk_tokens(int32_t tokens) {
  for (const int32_t allowed : {16, 32, 64, 128, 256}) {
    if (tokens == allowed) return std::nullopt;
  }
  return BrokenRule{"layout.chunk_tokens", str(tokens), "16, 32, 64, 128 or 256"};
}

}  // namespace

const char* provenance_name(Provenance provenance) {
  switch (provenance) {
    case Provenance::kExact:
      return "exact";
    case Provenance::kDecode:
      return "decode";
    case Provenance::kApproximate:
      return "approximate";
  }
  return "unknown";
}

std::optional<BrokenRule> Layout::broken_rule() const {
  if (auto found = check_range("layout.layers", layers, 1, kMostLayers)) return found;
  if (auto found = check_range("layout.kv_heads", kv_heads, 1, 1024)) return found;
  if (auto found = check_chunk_tokens(chunk_tokens)) return found;
  if (auto found = check_dim("layout.k_dim", k_dim)) return found;
  if (auto found = check_dim("layout.v_dim", v_dim)) return found;
  if (auto found = check_dtype("layout.k_dtype", k_dtype, "k_dim", k_dim)) return found;
  if (auto found = check_dtype("layout.v_dtype", v_dtype, "v_dim", v_dim)) return found;
  if (auto found = check_rotated("layout.k_rotated", k_rotated, "k_dtype", k_dtype)) return found;
  if (auto found = check_rotated("layout.v_rotated", v_rotated, "v_dtype", v_dtype)) return found;
  return check_float_layers(*this);
}

void Layout::validate() const {
  if (const auto found = broken_rule()) {
    throw InvalidArgumentError(
        str(found->field, " is ", found->value, "; expected ", found->expected));
  }
}

}  // namespace kvpager
