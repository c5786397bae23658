// The seam between bookkeeping and bytes. The pager decides which block, host slot or summary slot a
// chunk gets and what a forward may see; a backend owns the memory behind those numbers, moves the
// bytes and computes on them. It reads in the ledger where chunks are, and changes no record.
//
// HostBackend does its work on the processor, at once. DeviceBackend does it on a device, where copies
// and kernels are under way when a call returns: it knows what has to be done before a place may be read
// or written again.
//
// Called under the pager's lock. What throws has changed nothing, but for bytes of places that no record
// owns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/ledger.h"
#include "kvpager/pager.h"
#include "kvpager/shared_array.h"
#include "kvpager/tensor.h"
#include "kvpager/thread_pool.h"
#include "pager/chunk_files.h"
#include "pager/config.h"
#include "pager/forward.h"
#include "pager/home.h"

namespace kvpager {

// Where a chunk's bytes are to be: in a slot of the host arena or in a block.
struct Arrival {
  RecordId record;
  SlotId host;
  BlockId block;
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual DevicePlace place() const = 0;
  virtual const char* attention_name(DType q_dtype) const = 0;
  virtual int attention_version(DType q_dtype) const = 0;

  // --- Chunks.
  // The block was given back. All ones, a NaN in every float dtype, if it is to be poisoned.
  virtual void freed(BlockId block) noexcept = 0;
  // The slot of the host arena was given back.
  virtual void freed(SlotId) noexcept {}
  // The slot of the host arena is about to be given back, and is not needed again soon.
  virtual void discard(SlotId) noexcept {}
  // A chunk's bytes, wherever they are, into a block.
  virtual void load(const ChunkRecord& from, BlockId to) = 0;
  // What `read` puts into the chunk it is given, into a block.
  virtual void load(const std::function<void(std::byte*)>& read, BlockId to) = 0;
  // The bytes of many, by so many threads at most. To host slots come only chunks that are below memory.
  virtual void load(const std::vector<Arrival>& arrivals, int threads) = 0;
  // Bytes from `offset` on of a chunk in memory, for the host; null: it is below memory. Good until
  // the next call of this object.
  virtual const std::byte* view(const ChunkRecord& record, int64_t offset, int64_t bytes) = 0;
  // The home of a chunk, where the host may read for as long as nothing moves it; null: the host
  // cannot read there.
  virtual const std::byte* home(const ChunkRecord& record) = 0;
  // 0: what the record's home should hold has arrived. Else later arrivals have higher numbers.
  virtual uint64_t arriving(const ChunkRecord& record) = 0;
  virtual void wait_for_home(const ChunkRecord& record) = 0;

  // --- Sealing a chunk that is in a block.
  // One per layer; none: they are computed when first asked for, from the copy in the home.
  virtual SharedArray<uint64_t> checksums(BlockId block) = 0;
  virtual void summarize(BlockId block, SlotId summary) = 0;
  // Copies it to its home. To disk nothing goes without checksums: they are computed if there are none.
  virtual void write_home(BlockId block, const Home& to, SharedArray<uint64_t>* checksums) = 0;

  // --- Summaries, for the host.
  virtual const std::byte* summary(SlotId slot) = 0;
  // Where to put the summaries of these slots; after that summaries_written().
  virtual std::vector<std::byte*> summary_room(const std::vector<SlotId>& slots) = 0;
  virtual void summaries_written(const std::vector<SlotId>& slots) = 0;

  // Whether forwards are computed here. If so, each row is described for itself in Forward::rows, and
  // ForwardPart::read and ::mass have room; if not, all of these are empty.
  virtual bool computes() const { return true; }

  // Whether all that a forward may see has to be in memory when it begins, and stays there until
  // finish() or end().
  virtual bool reads_all() const { return false; }

  // Whether what is launched on the caller's stream goes into a graph.
  virtual bool capturing(void*) const { return false; }

  // --- A forward. First of all prepare(), which may refuse it and has no effect on its chunks. From
  // begin() to end() the backend keeps the address of the forward.
  virtual void prepare(const Forward&, void*) {}
  virtual void begin(Forward* forward, void* stream) = 0;
  // The keys and values of Forward::given, a tensor per layer.
  virtual void give(const std::vector<TensorView>& k, const std::vector<TensorView>& v,
                    void* stream) = 0;
  // Without queries (null) the layer is not attended to. All-or-nothing, where it is done at once.
  // False: this went into a graph, and is not done yet.
  virtual bool write(int layer, const TensorView* q, const TensorView& k, const TensorView& v,
                     void* stream) = 0;
  // After write() of the same layer and queries: finds out which chunks the layer reads. False: some of
  // them (see reads()) are below memory, where attend() reads them if they stay there.
  virtual bool select(int, const TensorView&, const AttendOptions&) { return true; }
  // [visible] whether rows of the part read the chunk at the layer that was selected for.
  // REQUIRES: select() was false.
  virtual const std::vector<uint8_t>& reads(size_t part) const;
  // [rows * kv_heads] the chunks that were selected last, ascending. InvalidArgumentError on a device.
  virtual const std::vector<std::vector<int32_t>>& chosen() const;
  // After select() of the same layer and queries.
  virtual void attend(int layer, const TensorView& q, const TensorView& out,
                      const AttendOptions& attend_options) = 0;
  virtual uint64_t generation() const = 0;
  virtual void replayed(void* stream) = 0;
  // All layers are computed; what was read and scored is in the parts. NonFiniteError.
  virtual void finish() = 0;
  virtual void end() noexcept = 0;

  virtual void add_to(PagerStats* stats) const = 0;
  virtual void check_invariants() = 0;
};

// What a backend with bytes is made of, derives from and is outlived by.
struct BackendParts {
  const Config& config_;
  const Layout& layout_;
  const Ledger& ledger_;  // where chunks are
  ChunkFiles& files_;     // what is below memory
  ThreadPool& threads_;
  PagerStats& counters_;  // of what it moves, and how long that takes
};

// Of options.device.
std::unique_ptr<Backend> make_backend(const BackendParts& parts);

}  // namespace kvpager
