// The backend of the processor: slabs of ordinary memory, kernels on the pager's threads. Everything
// is done when a call returns.
//   host_bytes.cc   chunks, seals and summaries
//   host_select.cc  score summaries, select chunks
//   host_attend.cc  find the chunks' bytes, attend
#pragma once

#include <optional>
#include <vector>

#include "kvpager/attention.h"
#include "memory/slab.h"
#include "pager/backend.h"
#include "pager/scan.h"

namespace kvpager {

// Sequences whose slices staging can hold one split of; more of them stream in several passes.
inline constexpr size_t kStreamedSequences = 4;

// How one (layer, kv head) spreads a row's attention over the chunks first, first + 1, ...; sums
// to 1.
struct Shares {
  int64_t first = 0;
  std::vector<float> of_chunk;
};

class HostBackend final : public Backend, BackendParts {
 public:
  explicit HostBackend(const BackendParts& parts);

  DevicePlace place() const override { return {}; }
  const char* attention_name(DType) const override { return "reference"; }
  int attention_version(DType) const override { return kKernelVersion; }

  void freed(BlockId block) noexcept override;
  void freed(SlotId) noexcept override { addresses_stale_ = true; }
  void discard(SlotId slot) noexcept override { host_.discard(slot.value()); }
  void load(const ChunkRecord& from, BlockId to) override;
  void load(const std::function<void(std::byte*)>& read, BlockId to) override;
  void load(const std::vector<Arrival>& arrivals, int threads) override;
  const std::byte* view(const ChunkRecord& record, int64_t offset, int64_t bytes) override;
  const std::byte* home(const ChunkRecord& record) override;
  uint64_t arriving(const ChunkRecord&) override { return 0; }
  void wait_for_home(const ChunkRecord&) override {}

  SharedArray<uint64_t> checksums(BlockId block) override;
  void summarize(BlockId block, SlotId summary) override;
  void write_home(BlockId block, const Home& to, SharedArray<uint64_t>* checksums) override;

  const std::byte* summary(SlotId slot) override { return summaries_.slot(slot.value()); }
  std::vector<std::byte*> summary_room(const std::vector<SlotId>& slots) override;
  void summaries_written(const std::vector<SlotId>&) override {}

  void begin(Forward* forward, void* stream) override;
  void give(const std::vector<TensorView>& k, const std::vector<TensorView>& v,
            void* stream) override;
  bool write(int layer, const TensorView* q, const TensorView& k, const TensorView& v,
             void* stream) override;
  bool select(int layer, const TensorView& q, const AttendOptions& attend_options) override;
  const std::vector<uint8_t>& reads(size_t part) const override { return parts_[part].needed; }
  const std::vector<std::vector<int32_t>>& chosen() const override { return chosen_; }
  void attend(int layer, const TensorView& q, const TensorView& out,
              const AttendOptions& attend_options) override;
  uint64_t generation() const override { return 0; }
  void replayed(void* stream) override;
  void finish() override {}
  void end() noexcept override;

  void add_to(PagerStats* stats) const override;
  void check_invariants() override;

 private:
  static constexpr int64_t kKeptScratch = int64_t{32} << 20;  // of one forward for the next

  // What attention needs of a ForwardPart at the layer at hand.
  struct Part {
    std::vector<const std::byte*> chunks;     // [visible] null: not known, or not in memory
    std::vector<const std::byte*> slices;     // [visible] null: not read at this layer, or missing
    std::vector<const std::byte*> summaries;  // [sealed, visible] bases; empty until first scored
    std::vector<uint8_t> needed;              // [visible] read at this layer
  };

  int64_t scratch_bytes() const;
  void copy_chunk(const ChunkRecord& from, std::byte* to) const;
  WriteRow target(const ForwardPart& part, int64_t position);
  const std::byte* address(const ChunkRecord& record) const;  // null: on disk or in a snapshot only
  void find_summaries(size_t part);
  void select_rows(int layer, const TensorView& q, const AttendOptions& attend_options);
  void score_for_ledger(size_t part, int layer, const TensorView& q,
                        const AttendOptions& attend_options);
  void mark_needed(const AttendOptions& attend_options);
  int64_t bytes_to_read(int layer) const;
  bool find_slices(int layer);
  void run_attention(int layer, AttendParams& params);
  int64_t split_count(size_t first_part, size_t last_part) const;
  void stream_attention(int layer, AttendParams& params);
  void stream_parts(int layer, size_t first_part, size_t last_part, AttendParams& params);

  Slab pool_;
  Slab host_;
  Slab summaries_;
  Slab staging_;
  AttendWorkspace workspace_;

  Forward* forward_ = nullptr;              // the running one
  std::vector<Part> parts_;                 // as Forward::parts
  bool addresses_stale_ = false;            // some of Part::chunks may lie elsewhere now
  bool in_memory_ = false;                  // all that the layer at hand reads
  std::optional<ThreadPool::Awake> awake_;  // from select() to the end of attend()
  Scan scan_;
  std::vector<ScanRow> scan_rows_;
  std::vector<std::vector<int32_t>> chosen_;  // [rows * kv_heads] of the layer at hand
  std::vector<int32_t> chosen_flat_;
  std::vector<int64_t> chosen_offsets_;
  std::vector<WriteRow> write_targets_;
  std::vector<WriteRow> give_targets_;
};

}  // namespace kvpager
