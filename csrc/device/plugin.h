// Finds and loads plug-ins: libkvpager_<kind>.so beside the library that holds this code, then in
// each folder of KVPAGER_DEVICE_PATH (colon-separated). Loaded ones stay until the process ends.
// Thread-safe.
#pragma once

#include <string>

#include "device/api.h"

namespace kvpager::device {

struct Plugin {
  const Api* api = nullptr;
  std::string path;     // of the library; empty: none was found
  std::string why_not;  // where api is null
};
Plugin load_plugin(const std::string& kind);

}  // namespace kvpager::device
