#include "pager/backend.h"

#include "pager/device_backend.h"
#include "pager/host_backend.h"
#include "pager/meta_backend.h"

namespace kvpager {

std::unique_ptr<Backend> make_backend(Pager::Impl& pager) {
  if (pager.options.device == "cpu") return std::make_unique<HostBackend>(pager);
  if (pager.options.device == "meta") return std::make_unique<MetaBackend>(pager.layout);
  return std::make_unique<DeviceBackend>(pager);
}

}  // namespace kvpager
