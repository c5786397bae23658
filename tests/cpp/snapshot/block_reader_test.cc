#include "snapshot/block_reader.h"

#include <doctest/doctest.h>
#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "died.h"
#include "disarm.h"
#include "folder.h"
#include "snapshot/descriptor.h"

namespace kvpager::snapshot {
namespace {

using Bytes = std::vector<std::byte>;

constexpr std::byte kUntouched{0xAA};

// Blocks of one size, one behind the other in a file, and a destination for each.
class Blocks {
 public:
  Blocks(size_t count, size_t bytes) : bytes_(bytes), into_(count, Bytes(bytes, kUntouched)) {
    std::string all;
    for (size_t i = 0; i < count * bytes; ++i) all += static_cast<char>(i * 31 + i / 251);
    testing::write_bytes(path(), all);
    file_.reset(::open(path().c_str(), O_RDONLY));
    for (size_t i = 0; i < count; ++i) {
      written_.push_back(all.substr(i * bytes, bytes));
      const auto* data = reinterpret_cast<const std::byte*>(written_[i].data());
      const BlockCheck check = block_check("binding", data, bytes);
      checks_.emplace_back(reinterpret_cast<const char*>(check.data()), check.size());
    }
  }

  std::vector<BlockRead> reads() {
    std::vector<BlockRead> reads;
    for (size_t i = 0; i < into_.size(); ++i) {
      reads.push_back({file_.get(), static_cast<int64_t>(i * bytes_), "binding", checks_[i],
                       into_[i].data(), bytes_});
    }
    return reads;
  }

  std::string path() const { return folder_.file("blocks"); }
  void reset() {
    for (Bytes& one : into_) std::fill(one.begin(), one.end(), kUntouched);
  }
  Bytes ends() const {
    Bytes ends;
    for (const Bytes& one : into_) ends.push_back(one.back());
    return ends;
  }
  bool is_whole(size_t i) const {
    return std::equal(into_[i].begin(), into_[i].end(), written_[i].begin(),
                      [](std::byte a, char b) { return a == static_cast<std::byte>(b); });
  }
  bool is_untouched(size_t i) const { return into_[i] == Bytes(bytes_, kUntouched); }

 private:
  testing::Folder folder_;
  Descriptor file_;
  size_t bytes_;
  std::vector<Bytes> into_;
  std::vector<std::string> written_, checks_;
};

using Results = std::vector<BlockResult>;
constexpr auto kHit = BlockResult::kHit, kMiss = BlockResult::kMiss,
               kDamaged = BlockResult::kDamaged, kUnreadable = BlockResult::kUnreadable;

TEST_CASE("blocks are copied as they were written") {
  for (size_t bytes : {size_t{1}, size_t{4097}, size_t{300'000}}) {
    Blocks blocks(3, bytes);
    ReadGate gate;
    CHECK(read_blocks(gate, blocks.reads()) == Results{kHit, kHit, kHit});
    for (size_t i = 0; i < 3; ++i) CHECK(blocks.is_whole(i));
    CHECK(gate.state() == ReadGate::State::kOpen);
  }
}

TEST_CASE("of what is not what was written nothing is copied") {
  Blocks blocks(5, 1000);
  std::vector<BlockRead> reads = blocks.reads();
  reads[0].binding = "bindinG";
  reads[1].check = reads[1].check.substr(1);
  reads[2].start += 1;
  reads[4].start += 1;  // the file ends before
  ReadGate gate;
  CHECK(read_blocks(gate, reads) == Results{kDamaged, kDamaged, kDamaged, kHit, kDamaged});
  for (size_t i : {0, 1, 2, 4}) CHECK(blocks.is_untouched(i));
  std::string all = testing::read_bytes(blocks.path());
  for (size_t at : {0, 500, 999}) {
    all[at] ^= 1;
    testing::write_bytes(blocks.path(), all);
    CHECK(read_blocks(gate, blocks.reads())[0] == kDamaged);
    CHECK(blocks.is_untouched(0));
    all[at] ^= 1;
  }
}

TEST_CASE("what cannot be read is told from damage, and stops nothing") {
  Blocks blocks(4, 1000);
  std::vector<BlockRead> reads = blocks.reads();
  reads[3].start = -1;
  const testing::Disarm disarm;
  fault::arm("block.read", 1, EIO);
  ReadGate gate;
  CHECK(read_blocks(gate, reads) == Results{kHit, kUnreadable, kHit, kUnreadable});
  CHECK(blocks.is_untouched(1));
  fault::arm_short("block.read", 0, 1);
  CHECK(read_blocks(gate, blocks.reads()) == Results(4, kHit));
}

TEST_CASE("nothing is written once a gate was closed") {
  Blocks blocks(4, 2 << 20);
  for (int delay = 0; delay < 60; ++delay) {
    blocks.reset();
    ReadGate gate;
    Results results;
    std::thread reader([&] { results = read_blocks(gate, blocks.reads()); });
    std::this_thread::sleep_for(std::chrono::microseconds(50 * delay));
    gate.close();
    const Bytes ends = blocks.ends();  // which a copy writes last
    reader.join();
    CHECK(blocks.ends() == ends);
    CHECK(std::is_sorted(results.begin(), results.end()));  // hits before misses
    for (size_t i = 0; i < results.size(); ++i) {
      CHECK((results[i] == kHit ? blocks.is_whole(i) : blocks.is_untouched(i)));
    }
    CHECK((gate.state() == ReadGate::State::kAbandoned) == (results.back() == kMiss));
  }
}

TEST_CASE("a gate closes by itself when its time is over") {
  Blocks blocks(2, 1000);
  ReadGate gate(1e-3);
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  CHECK(read_blocks(gate, blocks.reads()) == Results{kMiss, kMiss});
  CHECK(gate.state() == ReadGate::State::kLate);
  CHECK(blocks.is_untouched(0));
  ReadGate patient(1e300);
  CHECK(read_blocks(patient, blocks.reads()) == Results{kHit, kHit});
}

TEST_CASE("a forked child that closes a gate does not wait for its parent's copy") {
  const Bytes data(64 << 20);
  Bytes into(data.size());
  ReadGate gate;
  std::atomic<bool> stop = false;
  std::thread copier([&] {
    while (!stop && gate.copy(into.data(), data.data(), data.size())) {
    }
  });
  for (int i = 0; i < 5; ++i) {
    CHECK(testing::last_words([&] {
            alarm(10);
            gate.close();
          }) == "lived");
  }
  stop = true;
  copier.join();
}

}  // namespace
}  // namespace kvpager::snapshot
