#include "memory/disk_spill.h"

#include <doctest/doctest.h>

#include <cerrno>
#include <string>
#include <vector>

#include "../disarm.h"
#include "../folder.h"
#include "kvpager/error.h"

namespace kvpager {
namespace {

using testing::Disarm;
using testing::Folder;

constexpr int64_t kSlot = 4096;

std::vector<std::byte> pattern(int seed) {
  std::vector<std::byte> bytes(kSlot);
  for (int64_t i = 0; i < kSlot; ++i) {
    bytes[static_cast<size_t>(i)] = static_cast<std::byte>((i * 7 + seed * 31) & 0xFF);
  }
  return bytes;
}

template <class Step>
std::string storage_error(const Step& step) {
  try {
    step();
  } catch (const StorageError& error) {
    return error.what();
  }
  return "no error";
}

TEST_CASE("what was written to a slot is read back, whole or in part, in any order") {
  const Folder folder;
  DiskSpill disk(folder.path(), 4, kSlot);
  CHECK(disk.slots() == 4);
  for (const int slot : {3, 0, 2}) disk.write(slot, pattern(slot).data());
  std::vector<std::byte> out(kSlot);
  for (const int slot : {0, 2, 3}) {
    disk.read(slot, 0, kSlot, out.data());
    CHECK(out == pattern(slot));
  }
  disk.read(2, 1000, 500, out.data());
  const std::vector<std::byte> expected = pattern(2);
  CHECK(std::equal(out.begin(), out.begin() + 500, expected.begin() + 1000));
  disk.write(2, pattern(9).data());
  disk.read(2, 0, kSlot, out.data());
  CHECK(out == pattern(9));
}

TEST_CASE("the spill file has no name, so that a crash leaves nothing behind") {
  const Folder folder;
  DiskSpill disk(folder.path(), 2, kSlot);
  disk.write(1, pattern(1).data());
  CHECK(folder.names().empty());
}

TEST_CASE("a folder that is missing, or is a file, is a StorageError with the system's words") {
  const Folder folder;
  const std::string missing =
      storage_error([&] { const DiskSpill disk(folder.path() + "/none", 1, kSlot); });
  CHECK(missing.find("/none") != std::string::npos);
  CHECK(missing.find("No such file") != std::string::npos);
  const std::string not_folder = storage_error([] { const DiskSpill disk("/dev/null", 1, kSlot); });
  CHECK(not_folder.find("Not a directory") != std::string::npos);
}

TEST_CASE("no slots: the folder is never touched") {
  const DiskSpill disk("/nowhere/at/all", 0, kSlot);
  CHECK(disk.slots() == 0);
}

TEST_CASE("injected faults name the folder and the reason, and the next call works") {
  const Disarm disarm;
  const Folder folder;
  DiskSpill disk(folder.path(), 2, kSlot);
  fault::arm("disk.write", 0, ENOSPC);
  const std::string write = storage_error([&] { disk.write(0, pattern(1).data()); });
  CHECK(write.find(folder.path()) != std::string::npos);
  CHECK(write.find("No space left") != std::string::npos);
  disk.write(0, pattern(1).data());
  fault::arm("disk.read", 0, EIO);
  std::vector<std::byte> out(kSlot);
  const std::string read = storage_error([&] { disk.read(0, 0, kSlot, out.data()); });
  CHECK(read.find("cannot read") != std::string::npos);
  disk.read(0, 0, kSlot, out.data());
  CHECK(out == pattern(1));
}

TEST_CASE("room that cannot be had is refused when the file is made") {
  const Disarm disarm;
  const Folder folder;
  fault::arm("disk.reserve", 0, ENOSPC);
  const std::string error = storage_error([&] { const DiskSpill spill(folder.path(), 4, kSlot); });
  CHECK(error.find("cannot reserve 16384 bytes: No space left") != std::string::npos);
  CHECK(error.find(folder.path()) != std::string::npos);
  CHECK(folder.names().empty());
}

TEST_CASE("reading past what was ever written is an error, not zeros") {
  const Folder folder;
  DiskSpill disk(folder.path(), 4, kSlot);
  disk.write(0, pattern(1).data());
  std::vector<std::byte> out(kSlot);
  const std::string error = storage_error([&] { disk.read(3, 0, kSlot, out.data()); });
  CHECK(error.find("past its end") != std::string::npos);
}

}  // namespace
}  // namespace kvpager
