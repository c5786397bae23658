#include "device/device.h"

#include <atomic>
#include <cstring>
#include <exception>
#include <utility>

#include "base/fault.h"
#include "device/plugin.h"
#include "kvpager/error.h"

namespace kvpager::device {

namespace {

constexpr int32_t kLeastMajor = 8;  // compute capability the CUDA kernels are built for

std::atomic<int64_t> device_bytes{0};
std::atomic<int64_t> pinned_bytes{0};

std::atomic<int64_t>& total(bool pinned) { return pinned ? pinned_bytes : device_bytes; }

// Why the kernels cannot run on it; empty if they can.
std::string too_old(const Api& api, const Info& info) {
  if (std::strcmp(api.name, "cuda") != 0 || info.major >= kLeastMajor) return {};
  return str(info.name, " has compute capability ", info.major, ".", info.minor,
             ", expected at least ", kLeastMajor, ".0");
}

void find(const std::string& kind, Report* report) {
  const Plugin plugin = load_plugin(kind);
  report->plugin = plugin.path;
  report->why_not = plugin.why_not;
  if (plugin.api == nullptr) return;
  const Api& api = *plugin.api;
  int32_t count = 0;
  if (const int code = api.count(&count); code != kOk) {
    report->why_not = api.error_text(code);
    return;
  }
  if (count == 0) report->why_not = "no device was found";
  std::string reason;
  bool usable = false;
  for (int32_t ordinal = 0; ordinal < count; ++ordinal) {
    Info info;
    if (const int code = api.describe(ordinal, &info); code != kOk) {
      report->why_not = str("device ", ordinal, ": ", api.error_text(code));
      return;
    }
    report->devices.push_back(info);
    const std::string old = too_old(api, info);
    usable = usable || old.empty();
    if (reason.empty()) reason = old;
  }
  if (!usable && !reason.empty()) report->why_not = reason;
}

struct Name {
  std::string kind;
  int32_t ordinal = 0;
};

Name parse(const std::string& name) {
  const size_t colon = name.find(':');
  Name parsed{name.substr(0, colon), 0};
  bool good = parsed.kind == "cuda" || parsed.kind == "shim";
  if (colon != std::string::npos) {
    const std::string digits = name.substr(colon + 1);
    good = good && !digits.empty() && digits.size() <= 4 &&
           digits.find_first_not_of("0123456789") == std::string::npos;
    if (good) parsed.ordinal = std::stoi(digits);
  }
  if (!good) {
    throw InvalidArgumentError(str(
        "device is '", name, "', expected 'cuda', 'shim', or one of them with a number: 'cuda:1'"));
  }
  return parsed;
}

}  // namespace

Report probe(const std::string& kind) {
  Report report;
  try {
    report.kind = kind;
    find(kind, &report);
  } catch (const std::exception& error) {
    report.why_not = error.what();
  }
  return report;
}

struct Device::Impl {
  const Api* api = nullptr;
  Context context = nullptr;
  Info info;
  std::string name;
  int32_t ordinal = 0;

  Impl() = default;
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() {
    if (context != nullptr) api->close(context);
  }
};

std::shared_ptr<Device> Device::open(const std::string& name) {
  const Name wanted = parse(name);
  const Report report = probe(wanted.kind);
  if (!report.why_not.empty()) throw DeviceError(str("device '", name, "': ", report.why_not));
  if (wanted.ordinal >= static_cast<int64_t>(report.devices.size())) {
    throw DeviceError(str("device '", name, "': there are ", report.devices.size(),
                          " of this kind, ", "numbered from 0"));
  }
  std::shared_ptr<Device> device(new Device);
  device->impl_ = std::make_unique<Impl>();
  Impl& impl = *device->impl_;
  impl.api = load_plugin(wanted.kind).api;
  impl.info = report.devices[static_cast<size_t>(wanted.ordinal)];
  impl.name = str(wanted.kind, ":", wanted.ordinal);
  impl.ordinal = wanted.ordinal;
  if (const std::string old = too_old(*impl.api, impl.info); !old.empty()) {
    throw DeviceError(str("device '", name, "': ", old));
  }
  Context context = nullptr;
  device->check(impl.api->open(wanted.ordinal, &context), "opening it");
  impl.context = context;
  return device;
}

Device::~Device() = default;

const Api& Device::api() const { return *impl_->api; }
const Info& Device::info() const { return impl_->info; }
Context Device::context() const { return impl_->context; }
const std::string& Device::name() const { return impl_->name; }
int32_t Device::ordinal() const { return impl_->ordinal; }

void Device::check(int code, const char* what) const {
  if (code == kOk) return;
  throw DeviceError(str("device '", impl_->name, "': ", what, ": ", impl_->api->error_text(code),
                        " (", code, ")"));
}

Memory Device::allocate(const char* what, int64_t bytes) { return obtain(what, bytes, false); }
Memory Device::pin(const char* what, int64_t bytes) { return obtain(what, bytes, true); }

Memory Device::obtain(const char* what, int64_t bytes, bool pinned) {
  if (bytes < 0) throw InvalidArgumentError(str(what, ": ", bytes, " bytes, expected at least 0"));
  Memory memory;
  if (bytes == 0) return memory;
  void* data = nullptr;
  int code = kOutOfMemory;
  if (fault::visit(pinned ? "device.pin" : "device.allocate") == 0) {
    const Api& api = *impl_->api;
    code = pinned ? api.allocate_pinned(impl_->context, bytes, &data)
                  : api.allocate(impl_->context, bytes, &data);
  }
  if (code == kOutOfMemory) {
    throw CapacityError(str(what, ": device '", impl_->name, "' has no ", bytes, " bytes of ",
                            pinned ? "memory of the host that can be pinned" : "memory", " left"));
  }
  check(code, what);
  memory.device_ = shared_from_this();
  memory.data_ = static_cast<std::byte*>(data);
  memory.bytes_ = bytes;
  memory.pinned_ = pinned;
  total(pinned) += bytes;
  return memory;
}

Memory::Memory(Memory&& other) noexcept { *this = std::move(other); }

Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(pinned_, other.pinned_);
  return *this;
}

Memory::~Memory() {
  if (data_ == nullptr) return;
  const Api& api = device_->api();
  // A device that has failed refuses this too; its memory is gone with it.
  pinned_ ? api.release_pinned(device_->context(), data_) : api.release(device_->context(), data_);
  total(pinned_) -= bytes_;
}

int64_t total_device_bytes() { return total(false); }
int64_t total_pinned_bytes() { return total(true); }

}  // namespace kvpager::device
