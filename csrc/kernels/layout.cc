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

void check_dtype(const char* field, DType dtype) {
  if (!is_supported(dtype)) {
    throw InvalidArgumentError(str("layout.", field, " is ", dtype_name(dtype),
                                   "; expected float32, float16 or bfloat16"));
  }
}

}  // namespace

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat8E4M3:
      return "float8_e4m3";
    case DType::kQ8_0:
      return "q8_0";
    case DType::kQ4_0:
      return "q4_0";
  }
  return "unknown";
}

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
  check_range("layers", layers, 1, 1024);
  check_range("kv_heads", kv_heads, 1, 1024);
  if (chunk_tokens != 16 && chunk_tokens != 32 && chunk_tokens != 64 && chunk_tokens != 128 &&
      chunk_tokens != 256) {
    throw InvalidArgumentError(
        str("layout.chunk_tokens is ", chunk_tokens, "; expected 16, 32, 64, 128 or 256"));
  }
  check_dim("k_dim", k_dim);
  check_dim("v_dim", v_dim);
  check_dtype("k_dtype", k_dtype);
  check_dtype("v_dtype", v_dtype);
}

}  // namespace kvpager
