#include "device/api.h"

extern "C" __attribute__((visibility("default"))) const kvpager::device::Api* kvpager_device_api() {
  static const kvpager::device::Api api = [] {
    kvpager::device::Api t;
    t.name = "cuda";
    return t;
  }();
  return &api;
}
