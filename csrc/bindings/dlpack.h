// The part of DLPack's binary interface that tensors are borrowed by, from its specification, version 1.3
// (dmlc.github.io/dlpack): how Python libraries show each other their memory. A test compares it with
// the header that torch ships.
#pragma once

#include <cstdint>

namespace kvpager::dlpack {

constexpr uint32_t kMajorVersion = 1;

// Device types.
constexpr int32_t kCpu = 1;
constexpr int32_t kCuda = 2;
constexpr int32_t kCudaHost = 3;  // pinned memory of the CPU

// Codes of element types.
constexpr uint8_t kInt = 0;
constexpr uint8_t kFloat = 2;
constexpr uint8_t kBfloat = 4;

struct Version {
  uint32_t major;
  uint32_t minor;
};

struct Device {
  int32_t type;
  int32_t id;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;    // [ndim]
  int64_t* strides;  // [ndim], in elements; null: contiguous
  uint64_t byte_offset;
};

// What a capsule named "dltensor" holds. The consumer renames the capsule and calls the deleter.
struct ManagedTensor {
  Tensor tensor;
  void* manager;
  void (*deleter)(ManagedTensor* self);
};

// What a tensor type's `__dlpack_c_exchange_api__` capsule, named "dlpack_exchange_api", holds: C
// functions. Those that are not called here are untyped.
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, Tensor* out);  // borrows, no synchronisation; 0: no error
  void* current_stream;
};

}  // namespace kvpager::dlpack
