// The error tree, the same names in C++ and Python. A message names the field, the value it had,
// what was expected and, where there is one, the remedy.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace kvpager {

class PagerError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// No room: pool, host, disk or summary budget, or too many pins. Nothing was changed.
class CapacityError : public PagerError {
 public:
  using PagerError::PagerError;
};

// An argument or a state the call cannot work with. Nothing was changed.
class InvalidArgumentError : public PagerError {
 public:
  using PagerError::PagerError;
};

// Queries, keys or values that are not finite; a forward with them was aborted.
class NonFiniteError : public PagerError {
 public:
  using PagerError::PagerError;
};

// The operating system refused a read or write; carries its words.
class StorageError : public PagerError {
 public:
  using PagerError::PagerError;
};

// There is no such device, or its driver refused an operation; carries its words.
class DeviceError : public PagerError {
 public:
  using PagerError::PagerError;
};

// Bytes that are not what was written: bad magic, checksum, size or order.
class CorruptSnapshotError : public PagerError {
 public:
  explicit CorruptSnapshotError(const std::string& message) : PagerError(message) {}
  // Damage that concerns one chunk, of positions [first, first + tokens), and leaves the others
  // usable. layer -1: its summary, or all.
  CorruptSnapshotError(const std::string& message, int64_t bad_chunk, int bad_layer, int64_t first,
                       int64_t tokens)
      : PagerError(message),
        chunk(bad_chunk),
        layer(bad_layer),
        start(first),
        stop(first + tokens) {}
  int64_t chunk = -1;  // -1, and what follows: the file as a whole
  int layer = -1;
  int64_t start = -1, stop = -1;
};

// A file whose major version this reader does not know.
class UnsupportedVersionError : public PagerError {
 public:
  using PagerError::PagerError;
};

// The file is sound, but belongs to another model, layout, numerics or salt.
class FingerprintMismatchError : public PagerError {
 public:
  using PagerError::PagerError;
};

// Our own bug: a numbered invariant of DESIGN.md does not hold.
class InvariantError : public PagerError {
 public:
  using PagerError::PagerError;
};

// Builds a message by streaming its parts.
template <class... Parts>
std::string str(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace kvpager
