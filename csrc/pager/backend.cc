#include "pager/backend.h"

#include "pager/device_backend.h"
#include "pager/host_backend.h"

namespace kvpager {

std::unique_ptr<Backend> make_backend(Pager::Impl& pager) {
  if (pager.options.device == "cpu") return std::make_unique<HostBackend>(pager);
  return std::make_unique<DeviceBackend>(pager);
}

}  // namespace kvpager
