#include "pager/backend.h"

#include "pager/device_backend.h"
#include "pager/host_backend.h"
#include "pager/meta_backend.h"

namespace kvpager {

const std::vector<uint8_t>& Backend::reads(size_t) const {
  throw InvariantError("invariant 5: this backend has all that a forward reads in memory");
}

std::unique_ptr<Backend> make_backend(const BackendParts& parts) {
  if (parts.config.options.device == "cpu") return std::make_unique<HostBackend>(parts);
  if (parts.config.options.device == "meta") return std::make_unique<MetaBackend>(parts.config);
  return std::make_unique<DeviceBackend>(parts);
}

}  // namespace kvpager
