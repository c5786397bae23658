// Words of Python for values of the core.
#pragma once

#include <string>

#include "kvpager/types.h"

namespace kvpager {

// InvalidArgumentError that names `field` unless `name` is a dtype's.
DType dtype_from_name(const std::string& field, const std::string& name);

}  // namespace kvpager
