#include "pager/backend.h"

#include "pager/device_backend.h"
#include "pager/host_backend.h"
#include "pager/meta_backend.h"

namespace kvpager {

const std::vector<uint8_t>& Backend::reads(size_t) const {
  throw InvariantError("invariant 5: this backend has all that a forward reads in memory");
}

const std::vector<std::vector<int32_t>>& Backend::chosen() const {
  throw InvalidArgumentError(str("selected: the pager is on ", place().name,
                                 ", and only one on the cpu returns selections"));
}

std::unique_ptr<Backend> make_backend(const BackendParts& parts) {
  if (parts.config_.options.device == "cpu") return std::make_unique<HostBackend>(parts);
  if (parts.config_.options.device == "meta") return std::make_unique<MetaBackend>(parts.config_);
  return std::make_unique<DeviceBackend>(parts);
}

}  // namespace kvpager
