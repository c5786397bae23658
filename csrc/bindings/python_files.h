// Files that Python reads or encrypts: byte ranges of an object store, a cipher, a test.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/typing.h>

#include <memory>
#include <optional>

#include "kvpager/snapshot.h"

namespace kvpager {

// Called with a path; returns an object with `size`, `read` and `will_need` (kvpager.stores.ByteRanges).
using PythonOpener = std::optional<pybind11::typing::Callable<pybind11::object(pybind11::str)>>;

// None opens local files. What it returns is called and destroyed without the GIL.
RangesOpener opener_of(const PythonOpener& opener);

// An object with `block_bytes`, `header_bytes`, `tag_bytes`, `header` and `encrypt`, as FileCipher has
// them; None: null.
std::shared_ptr<FileCipher> cipher_of(const pybind11::object& cipher);

}  // namespace kvpager
