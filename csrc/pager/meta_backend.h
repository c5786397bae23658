// The backend that has no bytes: every chunk, slot and summary is a number and nothing else. A pager
// on it keeps its books as it does anywhere, for as many chunks as one likes: to measure what
// bookkeeping costs, and to see what a trace of requests would do to a pool.
#pragma once

#include <memory>
#include <vector>

#include "kvpager/error.h"
#include "pager/backend.h"

namespace kvpager {

class MetaBackend final : public Backend {
 public:
  explicit MetaBackend(const Config& config)
      : no_checksums_(std::vector<uint64_t>(static_cast<size_t>(config.layout.layers), 0)) {}

  DevicePlace place() const override { return {1, 0, "meta"}; }
  const char* attention_name(DType) const override { return "none"; }
  int attention_version(DType) const override { return 0; }

  void freed(BlockId) noexcept override {}
  void load(const ChunkRecord&, BlockId) override {}
  void load(const std::function<void(std::byte*)>&, BlockId) override { refuse("load"); }
  void load(const std::vector<Arrival>&, int) override {}
  const std::byte* view(const ChunkRecord&, int64_t, int64_t) override { refuse("read"); }
  const std::byte* home(const ChunkRecord&) override { refuse("read"); }
  uint64_t arriving(const ChunkRecord&) override { return 0; }
  void wait_for_home(const ChunkRecord&) override {}

  // Chunks of equal names are equal here, as they are where forwards are what they claim to be.
  SharedArray<uint64_t> checksums(BlockId) override { return no_checksums_; }
  void summarize(BlockId, SlotId) override {}
  void write_home(BlockId, const Home&, SharedArray<uint64_t>*) override {}

  const std::byte* summary(SlotId) override { refuse("score"); }
  std::vector<std::byte*> summary_room(const std::vector<SlotId>&) override { refuse("restore"); }
  void summaries_written(const std::vector<SlotId>&) override {}

  bool computes() const override { return false; }

  void begin(Forward*, void*) override {}
  void give(const std::vector<TensorView>&, const std::vector<TensorView>&, void*) override {
    refuse("give");
  }
  bool write(int, const TensorView*, const TensorView&, const TensorView&, void*) override {
    refuse("write");
  }
  void attend(int, const TensorView&, const TensorView&, const AttendOptions&) override {
    refuse("attend");
  }
  uint64_t generation() const override { return 0; }
  void replayed(void*) override {}
  void finish() override {}
  void end() noexcept override {}

  void add_to(PagerStats*) const override {}
  void check_invariants() override {}

 private:
  [[noreturn]] static void refuse(const char* what) {
    throw InvalidArgumentError(str(
        "cannot ", what, ": device is meta, which keeps the books of chunks that have no bytes"));
  }

  const SharedArray<uint64_t> no_checksums_;
};

}  // namespace kvpager
