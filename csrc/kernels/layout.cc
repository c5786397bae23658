#include "kvpager/layout.h"

#include "kvpager/error.h"

namespace kvpager {
namespace {

void check_range(const char* field, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) {
    throw InvalidArgumentError(
        str("layout.", field, " is ", value, "; expected ", low, " to ", high));
  }
}

void check_dim(const char* field, int64_t value) {
  check_range(field, value, 16, 512);
  if (value % 16 != 0) {
    throw InvalidArgumentError(str("layout.", field, " is ", value,
                                   "; expected a multiple of 16 (pad the heads with zeros)"));
  }
}

void check_dtype(const char* field, DType dtype, const char* dim_field, int64_t dim) {
  if (!is_float(dtype) && !is_coded(dtype)) {
    throw InvalidArgumentError(str("layout.", field, " is ", dtype_name(dtype),
                                   "; expected float32, float16, bfloat16, q8 or q4"));
  }
  if (dtype == DType::kQ4 && dim % kQ4Group != 0) {
    throw InvalidArgumentError(str("layout.", field, " is q4 and ", dim_field, " is ", dim,
                                   "; expected a multiple of ", kQ4Group));
  }
}

void check_rotated(const char* field, bool rotated, const char* dtype_field, DType dtype) {
  if (rotated && !is_coded(dtype)) {
    throw InvalidArgumentError(str("layout.", field, " is true and ", dtype_field, " is ",
                                   dtype_name(dtype), "; expected false, or q8 or q4"));
  }
}

void check_float_layers(const Layout& layout) {
  if (layout.float_layers.empty()) {
    if (layout.float_dtype == DType::kFloat32) return;
    throw InvalidArgumentError(str("layout.float_dtype is ", dtype_name(layout.float_dtype),
                                   " and float_layers is empty; expected float32"));
  }
  if (!is_coded(layout.k_dtype) && !is_coded(layout.v_dtype)) {
    throw InvalidArgumentError(str("layout.float_layers is not empty and k_dtype is ",
                                   dtype_name(layout.k_dtype), ", v_dtype ",
                                   dtype_name(layout.v_dtype), "; expected q8 or q4 of one"));
  }
  if (!is_float(layout.float_dtype)) {
    throw InvalidArgumentError(str("layout.float_dtype is ", dtype_name(layout.float_dtype),
                                   "; expected float32, float16 or bfloat16"));
  }
  if (layout.float_layers.count_below(layout.layers) !=
      layout.float_layers.count_below(kMostLayers)) {
    throw InvalidArgumentError(str("layout.float_layers has a layer from ", layout.layers,
                                   " on; expected layers below it"));
  }
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

void Layout::validate() const {
  check_range("layers", layers, 1, kMostLayers);
  check_range("kv_heads", kv_heads, 1, 1024);
  if (chunk_tokens != 16 && chunk_tokens != 32 && chunk_tokens != 64 && chunk_tokens != 128 &&
      chunk_tokens != 256) {
    throw InvalidArgumentError(
        str("layout.chunk_tokens is ", chunk_tokens, "; expected 16, 32, 64, 128 or 256"));
  }
  check_dim("k_dim", k_dim);
  check_dim("v_dim", v_dim);
  check_dtype("k_dtype", k_dtype, "k_dim", k_dim);
  check_dtype("v_dtype", v_dtype, "v_dim", v_dim);
  check_rotated("k_rotated", k_rotated, "k_dtype", k_dtype);
  check_rotated("v_rotated", v_rotated, "v_dtype", v_dtype);
  check_float_layers(*this);
}

}  // namespace kvpager
