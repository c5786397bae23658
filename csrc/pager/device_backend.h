// The backend of a device: the pool in its memory, host arena and copies of summaries pinned, so that
// its kernels can read a chunk wherever it is. What a call starts is under way when it returns; Places
// say what has to be done before memory is read or written again (device/timeline.h).
//
//   compute   the caller's stream: tables, kernels, what they found
//   up        chunks and slices to the device, copies within it, poison
//   down      write-through and summaries to the host
//
// Between begin and commit nothing but write and attend touches the caller's stream, and these only
// launch, so that a graph can capture them.
//   device_backend.cc   memory and its growth, stats, invariants
//   device_bytes.cc     chunks, seals and summaries
//   device_tables.cc    begin: make every visible chunk readable, fill in the tables
//   device_staging.cc   which chunks are copied ahead of their use, and in how many waves
//   device_forward.cc   give, write, attend, and what a forward found
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/params.h"
#include "device/device.h"
#include "device/tables.h"
#include "device/timeline.h"
#include "pager/backend.h"

namespace kvpager {

class DeviceBackend final : public Backend, BackendParts {
 public:
  explicit DeviceBackend(const BackendParts& parts);

  DevicePlace place() const override;
  const char* attention_name(DType q_dtype) const override;
  int attention_version(DType q_dtype) const override;

  using Backend::freed;
  void freed(BlockId block) noexcept override;
  void load(const ChunkRecord& from, BlockId to) override;
  void load(const std::function<void(std::byte*)>& read, BlockId to) override;
  void load(const std::vector<Arrival>& arrivals, int threads) override;
  const std::byte* view(const ChunkRecord& record, int64_t offset, int64_t bytes) override;
  const std::byte* home(const ChunkRecord& record) override;
  uint64_t arriving(const ChunkRecord& record) override;
  void wait_for_home(const ChunkRecord& record) override;

  SharedArray<uint64_t> checksums(BlockId) override { return {}; }
  void summarize(BlockId block, SlotId summary) override;
  void write_home(BlockId block, const Home& to, SharedArray<uint64_t>* checksums) override;

  const std::byte* summary(SlotId slot) override;
  std::vector<std::byte*> summary_room(const std::vector<SlotId>& slots) override;
  void summaries_written(const std::vector<SlotId>& slots) override;

  bool reads_all() const override { return true; }
  bool capturing(void* stream) const override;
  void prepare(const Forward& forward, void* stream) override;
  void begin(Forward* forward, void* stream) override;
  void give(const std::vector<TensorView>& k, const std::vector<TensorView>& v,
            void* stream) override;
  bool write(int layer, const TensorView* q, const TensorView& k, const TensorView& v,
             void* stream) override;
  void attend(int layer, const TensorView& q, const TensorView& out,
              const AttendOptions& attend_options) override;
  uint64_t generation() const override { return generation_; }
  void replayed(void* stream) override;
  void finish() override;
  void end() noexcept override;

  void add_to(PagerStats* stats) const override;
  void check_invariants() override;

 private:
  using Lane = device::Lane;
  using Place = device::Place;
  using Ticket = device::Ticket;

  // Equal slots of one piece of memory.
  struct Slots {
    device::Memory memory;
    int64_t slot_bytes = 0;
    std::vector<Place> places;
    Slots(device::Memory of, int64_t slots, int64_t bytes)
        : memory(std::move(of)), slot_bytes(bytes), places(static_cast<size_t>(slots)) {}
    std::byte* at(int64_t slot) const { return memory.data() + slot * slot_bytes; }
    Place& place(int64_t slot) { return places[static_cast<size_t>(slot)]; }
    int64_t slots() const { return static_cast<int64_t>(places.size()); }
  };
  // A piece of a slot.
  struct Piece {
    std::byte* data;
    Place* place;
  };
  static Piece piece(Slots& slots, int64_t slot) { return {slots.at(slot), &slots.place(slot)}; }

  // Memory whose size goes by the largest forward so far; its addresses are in captured graphs.
  struct Arrays {
    gpu::Bounds bounds;
    device::TableLayout layout;
    device::Memory tables;                 // device
    std::vector<device::Memory> ring;      // pinned, laid out alike; tables are filled in here
    device::Memory results, results_host;  // status, mass and read, on the device and pinned
    device::Memory selected;               // device: a bit per row, kv head and chunk
    int64_t selected_stride = 0;
    device::Memory scratch;           // device
    device::Memory queries, outputs;  // device: float32 rows, where keys or values are rotated
  };
  // What results begin with: WriteParams::status of the rows, of given positions, and
  // query_status.
  static constexpr int kRowStatus = 0, kGivenStatus = 1, kQueryStatus = 2;
  static constexpr int64_t kStatusBytes = 3 * sizeof(uint64_t);
  // Where given positions go: a header and rows as kernels read them, in pinned memory and on the
  // device. They grow with the most there were; no graph refers to them.
  static constexpr int64_t kGivenRowsAt = 64;  // bytes, behind the header
  struct GivenTables {
    int64_t rows = 0;
    device::Memory host, device;
    Place place;  // of both: from the time they are filled in until kernels have read them
  };
  // A chunk that may be seen by the running forward, in the order of Tables::chunks.
  struct Entry {
    RecordId record;
    bool pinned = false;   // read in the host arena, not in the pool
    bool written = false;  // by rows of the forward
    int32_t wave = 0;
    int32_t staged = -1;  // of Running::staged
  };
  // A slice of every layer that is copied into a half of staging before its wave.
  struct Staged {
    SlotId host;
    int64_t window = 0;  // layers of a smaller one see none of it
  };
  struct StagedWave {
    gpu::Wave wave;
    size_t first = 0, end = 0;  // of Running::staged
  };
  // What a half of staging holds.
  struct Half {
    int64_t wave = -1;   // counted over all layers; -1: nothing
    int64_t window = 0;  // what layers of it see; 0: all
  };
  struct Running {
    bool active = false;
    bool computing = false;  // tickets of what it reads and writes are still to be set
    gpu::HostCounts counts;
    bool writes = false;  // some row commits
    std::vector<int64_t>
        first;  // [parts] its chunk 0 in entries, which begin at the first held one
    std::vector<Entry> entries;
    std::vector<StagedWave> waves;  // of each layer
    std::vector<Staged> staged;     // by waves, in ascending order of slots
    bool scored = false;            // by the device, at some layer
    std::vector<int64_t> windows;   // of dense layers so far: what they read is known here
  };

  // device_backend.cc
  gpu::Shape shape(DType q_dtype) const;
  gpu::Shape shape_at(int layer, DType q_dtype) const;
  Arrays allocate_arrays(const gpu::Bounds& bounds) const;
  void grow(int64_t entries, int64_t visible);
  void grow_given(int64_t rows);
  gpu::Attention attention(DType q_dtype) const;
  int64_t entry_offset(bool read) const;  // of mass, or of read, in results

  // device_bytes.cc
  Ticket ticket(Lane lane) noexcept;
  void copy(Lane lane, device::Direction direction, Piece to, Piece from, int64_t bytes);
  void move(device::Direction direction, void* stream, std::byte* to, const std::byte* from,
            int64_t bytes);
  void move_up(void* stream, const std::vector<device::Pieces>& runs);
  void launch(const char* what, const std::function<int()>& kernel);  // fault point device.launch
  void host_read(const Place& place);
  Piece next_bounce();

  // device_tables.cc
  void find_entries(const Forward& forward);
  void fill_tables(const Forward& forward, const device::TableArrays& arrays);
  void upload(const device::TableLayout& layout, const std::byte* from, bool staged);

  // device_staging.cc
  void plan_staging(const Forward& forward);
  void cut_waves(const Forward& forward, int64_t room);
  void sort_waves();
  void fill_staged(const device::TableArrays& arrays) const;
  bool is_staged(int layer, int64_t window) const;
  int64_t wave_number(int layer, size_t wave) const;
  void stage(int layer, size_t wave);

  // device_forward.cc
  // Where launches go. True: into a graph.
  bool to_stream(void* stream);
  gpu::Tables upload_given();
  gpu::HostCounts counts(bool into_graph) const;
  const float* sinks_on_device(const AttendOptions& attend_options, void* stream, bool into_graph);
  void launch_select(int layer, const gpu::Tensor& q, const AttendOptions& attend_options,
                     const gpu::Tables& tables, bool into_graph);
  void launch_attend(const gpu::AttendParams& params, void* stream);
  void attend_in_waves(int layer, gpu::AttendParams* params, void* stream);
  gpu::Tensor rotated(const gpu::Tensor& from, const device::Memory& to, bool into_graph,
                      void* stream);
  void rotate(const gpu::Tensor& from, const gpu::Tensor& to, bool into_graph, void* stream);
  void mark_dense(int64_t window);
  void set_tickets(Ticket done) noexcept;
  void take_results();

  const gpu::Shape shape_;  // of layers that are no floats beside codes; but for q_dtype
  // Layers that are kept alike: the first, and the shape of so many.
  const std::vector<std::pair<int32_t, gpu::Shape>> runs_;
  std::shared_ptr<device::Device> device_;
  const device::Api& api_;

  Slots pool_;       // device
  Slots host_;       // pinned
  Slots summaries_;  // device
  Slots mirror_;     // pinned: the same summaries
  Slots bounce_;     // pinned, a chunk each: what goes between the device and files or callers
  Slots staging_;    // device, two halves: slices of the wave at hand and of the next one
  Slots sinks_;      // device, a layer's each
  device::Memory sinks_host_;  // pinned
  device::Memory always_;      // device: Selection::always
  Arrays arrays_;
  GivenTables given_;
  std::vector<Place> ring_places_;
  size_t ring_next_ = 0;
  int64_t bounce_next_ = 0;
  std::map<std::vector<float>, int64_t> sinks_known_;
  Half halves_[2];                // of staging
  std::vector<int64_t> windows_;  // of layers, as they last attended; 0: none, or not known
  uint64_t generation_ = 1;

  Forward* forward_ = nullptr;  // the running one
  Running running_;
  device::Arrangement arrangement_;

  device::Timeline timeline_;  // last: it waits for all that is under way before memory goes
};

}  // namespace kvpager
