extern "C" int kvpager_is_defined_nowhere();
extern "C" __attribute__((visibility("default"))) int kvpager_device_api() {
  return kvpager_is_defined_nowhere();
}
