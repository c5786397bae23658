#include "device/plugin.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <vector>

#include "kvpager/error.h"

namespace kvpager::device {

namespace {

namespace fs = std::filesystem;

fs::path own_folder() {
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(&load_plugin), &info) == 0 || info.dli_fname == nullptr) {
    return {};
  }
  std::error_code error;
  const fs::path file = fs::canonical(info.dli_fname, error);
  return error ? fs::path() : file.parent_path();
}

std::vector<fs::path> folders() {
  std::vector<fs::path> all;
  if (const fs::path own = own_folder(); !own.empty()) all.push_back(own);
  const char* text = std::getenv("KVPAGER_DEVICE_PATH");
  std::string_view rest = text == nullptr ? "" : text;
  while (!rest.empty()) {
    const size_t end = std::min(rest.find(':'), rest.size());
    if (end > 0) all.emplace_back(rest.substr(0, end));
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return all;
}

// A table with a hole in it would be called through a null pointer.
bool complete(const Api& api) {
  return api.name && api.error_text && api.count && api.describe && api.open && api.close &&
         api.allocate && api.release && api.allocate_pinned && api.release_pinned &&
         api.create_stream && api.destroy_stream && api.create_event && api.destroy_event &&
         api.record && api.wait && api.done && api.synchronize && api.capturing && api.copy &&
         api.copy_pieces && api.fill && api.write_rows && api.summarize && api.rotate &&
         api.select && api.attend && api.multiply && api.tensor_attention_shared_bytes &&
         api.attend_scratch_bytes && api.select_scratch_bytes;
}

}  // namespace

Plugin load_plugin(const std::string& kind) {
  Plugin found;
  const std::string file = "libkvpager_" + kind + ".so";
  std::string searched;
  for (const fs::path& folder : folders()) {
    std::error_code error;
    searched += (searched.empty() ? "" : ", ") + folder.string();
    if (!fs::exists(folder / file, error)) continue;
    found.path = (folder / file).string();
    break;
  }
  if (found.path.empty()) {
    found.why_not = str("this build has no '", kind, "' plug-in: there is no ", file, " in ",
                        searched, " (KVPAGER_DEVICE_PATH adds folders)");
    return found;
  }
  void* const library = dlopen(found.path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const words = dlerror();
    found.why_not = str("the plug-in cannot be loaded: ", words ? words : found.path);
    return found;
  }
  // Called with nothing but the entry point and the number, which every version has in one place.
  const auto entry = reinterpret_cast<EntryPoint>(dlsym(library, kEntryPoint));
  const Api* const api = entry ? entry() : nullptr;
  if (api == nullptr) {
    found.why_not = str(found.path, " is not a plug-in of kvpager: it has no ", kEntryPoint);
  } else if (api->abi != kAbi) {
    found.why_not =
        str(found.path, " has version ", api->abi, " of the plug-in interface, expected ", kAbi,
            ": it belongs to another build of kvpager");
  } else if (!complete(*api) || kind != api->name) {
    found.why_not = str(found.path, " is not the '", kind, "' plug-in of kvpager");
  } else {
    found.api = api;
    return found;
  }
  dlclose(library);
  return found;
}

}  // namespace kvpager::device
