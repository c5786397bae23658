// The committed corpus of crafted snapshots (tests/fuzz/crafted): Python's reader and command line are
// tried with the same files.
#include "../../fuzz/crafted.h"

#include <doctest/doctest.h>

#include <filesystem>
#include <set>

#include "kvpager/error.h"

namespace kvpager::snapshot_test {
namespace {

std::string folder_of_files() {
  const std::string here = __FILE__;
  return here.substr(0, here.rfind("tests/cpp/snapshot/")) + "tests/fuzz/crafted/";
}

std::string refusal(const std::string& path) {
  try {
    SnapshotReader::open(path)->verify(1, {});
  } catch (const CorruptSnapshotError& e) {
    return e.what();
  } catch (const UnsupportedVersionError& e) {
    return e.what();
  }
  return "";
}

TEST_CASE("EveryCraftedSnapshotIsRefusedByTheFieldThatIsWrong") {
  const StoreFixture store;  // with the pack that the manifests name
  for (const Crafted& one : crafted_snapshots()) {
    CAPTURE(one.name);
    store.replace(store.victim(), one.bytes);
    const std::string message = refusal(store.victim());
    CHECK_MESSAGE(message.find(one.field + " ") != std::string::npos, message);
  }
}

TEST_CASE("TheCommittedFilesAreThoseThatAreCrafted") {
  std::set<std::string> names;
  for (const Crafted& one : crafted_snapshots()) {
    CAPTURE(one.name);
    CHECK(names.insert(one.name + ".kvsnap").second);
    CHECK(read_bytes(folder_of_files() + one.name + ".kvsnap") == one.bytes);
  }
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder_of_files())) {
    CHECK(names.count(entry.path().filename()) == 1);
    ++files;
  }
  CHECK(files == names.size());
}

}  // namespace
}  // namespace kvpager::snapshot_test
