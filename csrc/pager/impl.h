// The pager's state and the steps its public functions are made of. One file per group of steps:
//   sequences.cc  create, fork, trim, adopt, pin
//   windows.cc    what is behind a window: let go, promise room again
//   residency.cc  blocks, homes, victims, recalls
//   forward.cc    begin, give, write, attend, abort
//   commit.cc     rows become positions, full chunks are sealed
//   freeze.cc     what a save writes from
//   restore.cc    sequences from snapshots, their summaries
//   lease.cc      what was taken and belongs to no record yet
//   room.cc       chunks are brought up, all or none
//   inspect.cc    ledger, stats, read_kv, check_invariants
//   pager.cc      construction and the locked facade
// Bytes are moved and computed on by a backend (backend.h):
//   host_*.cc     on the processor
//   device_*.cc   on a device
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/leave_order.h"
#include "core/ledger.h"
#include "core/policy.h"
#include "core/sequence.h"
#include "core/slot_pool.h"
#include "kvpager/error.h"
#include "kvpager/mutex.h"
#include "kvpager/pager.h"
#include "kvpager/process.h"
#include "kvpager/selection.h"
#include "kvpager/thread_pool.h"
#include "pager/backend.h"
#include "pager/chunk_files.h"
#include "pager/config.h"
#include "pager/forward.h"
#include "pager/home.h"
#include "pager/readers.h"
#include "pager/scoped_timer.h"

namespace kvpager {

// A chunk about to be sealed: what it took while preparing, to be applied or given back.
struct Seal {
  Sequence* sequence = nullptr;
  RecordId open;
  SharedArray<TokenId> tokens;
  ChunkName name;
  Provenance provenance = Provenance::kExact;
  std::optional<RecordId> existing;  // an identical chunk, referenced
  bool heals = false;                // ... whose snapshot is damaged: it takes the home
  SharedArray<uint64_t> checksums;
  SlotId summary;
  Home home;
  bool has_home = false;
};

// Where those who read a chunk that is in the pool too may read it.
enum class HostReaders : uint8_t { kOfEither, kOfBlocks };

struct Pager::Impl {
  explicit Impl(const PagerOptions& options);

  // --- sequences.cc
  Sequence& find(SequenceId id)
      KVPAGER_HOLDS(mutex);  // InvalidArgumentError, also for a frozen one
  const Sequence& find(SequenceId id) const KVPAGER_HOLDS(mutex);
  void require_idle(const Sequence& sequence, const char* action) const KVPAGER_HOLDS(mutex);
  Sequence& create_sequence(const std::string& salt) KVPAGER_HOLDS(mutex);
  Sequence& keep(Sequence sequence) KVPAGER_HOLDS(mutex);
  void destroy_sequence(SequenceId id) KVPAGER_HOLDS(mutex);
  void end(Sequence& sequence) noexcept KVPAGER_HOLDS(mutex);
  void drop_sequence(SequenceId id) KVPAGER_HOLDS(mutex);
  void destroy_dropped(const Forward& ended) KVPAGER_HOLDS(mutex);
  SequenceId fork(SequenceId id) KVPAGER_HOLDS(mutex);
  void trim(SequenceId id, int64_t position) KVPAGER_HOLDS(mutex);
  bool continues(RecordId found, int64_t chunk, RecordId previous) const KVPAGER_HOLDS(mutex);
  int64_t adopt_prefix(SequenceId id, const std::vector<TokenId>& tokens) KVPAGER_HOLDS(mutex);
  PinId pin(SequenceId id, int64_t start, int64_t stop) KVPAGER_HOLDS(mutex);
  void unpin(PinId id) KVPAGER_HOLDS(mutex);
  void add_reference(RecordId id) KVPAGER_HOLDS(mutex);
  void publish(RecordId id, RecordId previous) KVPAGER_HOLDS(mutex);
  void release(RecordId id)
      KVPAGER_HOLDS(mutex);  // drops the record when nothing will ask for it again
  void drop_use_pins(ChunkUse& use) KVPAGER_HOLDS(mutex);

  // --- windows.cc
  int64_t behind(int64_t length, int64_t rewind) const KVPAGER_HOLDS(mutex);
  int64_t earliest_trim(const Sequence& sequence) const KVPAGER_HOLDS(mutex);
  void require_held(const Sequence& sequence, int64_t first, const std::string& what) const
      KVPAGER_HOLDS(mutex);
  void let_go(Sequence& sequence) KVPAGER_HOLDS(mutex);
  void reserve(Sequence& sequence, int64_t total_tokens) KVPAGER_HOLDS(mutex);
  int64_t own_homes(const Sequence& sequence) const KVPAGER_HOLDS(mutex);
  int64_t homes_to_promise(int64_t more, int64_t own) const KVPAGER_HOLDS(mutex);
  void promise_again(Sequence& sequence) KVPAGER_HOLDS(mutex);

  // --- residency.cc
  void require_homes(int64_t more, const char* action) const KVPAGER_HOLDS(mutex);
  bool evictable(const ChunkRecord& record) const;
  bool lower_copies() const KVPAGER_HOLDS(mutex);
  bool blocks_to_be_had(int64_t count) const KVPAGER_HOLDS(mutex);
  void require_blocks(int64_t count, const char* action) const KVPAGER_HOLDS(mutex);
  std::vector<uint8_t> sheltered_records() const KVPAGER_HOLDS(mutex);
  VictimFacts facts(RecordId id) const KVPAGER_HOLDS(mutex);
  VictimFacts use_alone(RecordId id) const KVPAGER_HOLDS(mutex);
  void forget_orders() KVPAGER_HOLDS(mutex);
  void may_leave(RecordId id) KVPAGER_HOLDS(mutex);
  void note_victims() const KVPAGER_HOLDS(mutex);
  std::optional<VictimFacts> next_victim() const KVPAGER_HOLDS(mutex);
  std::optional<BlockId> acquire_block() KVPAGER_HOLDS(mutex);
  void evict(RecordId id) KVPAGER_HOLDS(mutex);
  void free_block(BlockId block) KVPAGER_HOLDS(mutex);
  void free_host_slot(SlotId slot) KVPAGER_HOLDS(mutex);
  void drop_record(RecordId id) KVPAGER_HOLDS(mutex);
  bool reclaim_cached() KVPAGER_HOLDS(mutex);
  SlotId take_summary_slot() KVPAGER_HOLDS(mutex);
  Home take_home() KVPAGER_HOLDS(mutex);
  void give_back(const Home& home) KVPAGER_HOLDS(mutex);
  std::optional<RecordId> next_to_spill(HostReaders readers) const KVPAGER_HOLDS(mutex);
  std::optional<RecordId> next_host_copy(HostReaders readers) const KVPAGER_HOLDS(mutex);
  bool spill_one(HostReaders readers = HostReaders::kOfEither) KVPAGER_HOLDS(mutex);
  bool drop_host_copy(HostReaders readers = HostReaders::kOfEither) KVPAGER_HOLDS(mutex);
  void recall_ahead() KVPAGER_HOLDS(mutex);
  int64_t evict_all() KVPAGER_HOLDS(mutex);

  // --- forward.cc
  void begin(std::vector<RowSpan> spans, std::vector<TokenId> tokens, ForwardOptions with)
      KVPAGER_HOLDS(mutex);
  void enroll(const RowSpan& span, int64_t first_token, Forward* next) KVPAGER_HOLDS(mutex);
  void describe_rows(Forward* next) const KVPAGER_HOLDS(mutex);
  void take_frontier(Forward* next) KVPAGER_HOLDS(mutex);
  void hold_what_it_reads(const Forward& next) KVPAGER_HOLDS(mutex);
  void load_missing() KVPAGER_HOLDS(mutex);
  void disband(Forward* ended) KVPAGER_HOLDS(mutex);
  void write(int layer, const TensorView& k, const TensorView& v, void* stream)
      KVPAGER_HOLDS(mutex);
  void attend(int layer, const TensorView& q, const TensorView& k, const TensorView& v,
              const TensorView& out, const AttendOptions& attend_options) KVPAGER_HOLDS(mutex);
  void give(const std::vector<TensorView>& k, const std::vector<TensorView>& v, void* stream)
      KVPAGER_HOLDS(mutex);
  bool dense_by_itself() const KVPAGER_HOLDS(mutex);
  void require_rows() const KVPAGER_HOLDS(mutex);
  void require_layer(int layer, const TensorView& k, const TensorView& v) const
      KVPAGER_HOLDS(mutex);
  void mark_replayed(uint64_t generation, void* stream) KVPAGER_HOLDS(mutex);
  void drop_surplus(ForwardPart& part)
      KVPAGER_HOLDS(mutex);  // frontier chunks and promises that the forward did not use
  void abort() KVPAGER_HOLDS(mutex);

  // --- commit.cc
  void commit(const std::vector<SequenceId>& ids, const std::vector<int64_t>& accepted,
              Provenance provenance) KVPAGER_HOLDS(mutex);
  void commit_all(Provenance provenance) KVPAGER_HOLDS(mutex);
  bool exact_row_count(int64_t rows) const KVPAGER_HOLDS(mutex);
  std::vector<int64_t> accepted_rows(const std::vector<SequenceId>& ids,
                                     const std::vector<int64_t>& accepted) const
      KVPAGER_HOLDS(mutex);
  void require_layers_written() const KVPAGER_HOLDS(mutex);
  void commit_rows(const std::vector<int64_t>& count, Provenance provenance) KVPAGER_HOLDS(mutex);
  SharedArray<TokenId> tokens_to_seal(const ForwardPart& part, int64_t first, int64_t last) const
      KVPAGER_HOLDS(mutex);
  void prepare_seals(const ForwardPart& part, int64_t count, Provenance provenance,
                     std::vector<Seal>* seals) KVPAGER_HOLDS(mutex);
  void rewrite_spilled(Seal* seal, BlockId block) KVPAGER_HOLDS(mutex);
  const SharedArray<uint64_t>& checksums(RecordId id) KVPAGER_HOLDS(mutex);
  const SharedArray<uint64_t>& checksums(Seal* seal) KVPAGER_HOLDS(mutex);
  std::vector<uint64_t> checksums_in_memory(const ChunkRecord& record) KVPAGER_HOLDS(mutex);
  void apply_seal(Seal& seal, ChunkUse use) KVPAGER_HOLDS(mutex);
  void advance(ForwardPart& part, int64_t count, Provenance provenance) KVPAGER_HOLDS(mutex);

  // --- freeze.cc
  SequenceId freeze(SequenceId id, int64_t upto, SnapshotMeta* meta, std::vector<std::byte>* tail)
      KVPAGER_HOLDS(mutex);
  Sequence& frozen(SequenceId id)
      KVPAGER_HOLDS(mutex);  // REQUIRES: freeze() made it, and it is not thawed
  void thaw(SequenceId id) noexcept KVPAGER_HOLDS(mutex);
  const std::byte* lend(RecordId id, std::byte* scratch) KVPAGER_HOLDS(mutex);

  // --- restore.cc
  void load_summaries(Sequence& sequence) KVPAGER_HOLDS(mutex);
  int64_t read_or_rebuild(SnapshotReader* reader, int64_t first,
                          const std::vector<ChunkRecord*>& records, std::byte* out) const
      KVPAGER_HOLDS(mutex);
  SequenceId restore(std::shared_ptr<SnapshotReader> reader, const std::string& salt,
                     Provenance provenance, const std::string& file_namespace, int64_t upto,
                     const ReleasedText& before) KVPAGER_HOLDS(mutex);

  // --- inspect.cc
  std::vector<ChunkInfo> inspect(SequenceId id) const KVPAGER_HOLDS(mutex);
  PagerStats stats() const KVPAGER_HOLDS(mutex);
  void check_invariants() const KVPAGER_HOLDS(mutex);
  void check_orders() const KVPAGER_HOLDS(mutex);
  void read_kv(SequenceId id, int layer, int64_t start, int64_t stop, std::byte* k, std::byte* v)
      KVPAGER_HOLDS(mutex);
  std::vector<std::vector<int32_t>> select(SequenceId id, int layer, const TensorView& q,
                                           int64_t position, int64_t window) KVPAGER_HOLDS(mutex);

  // Not this process's: refused by locked(), and never destroyed.
  const MadeIn process;
  const Config config;
  const PagerOptions& options = config.options;
  const Layout& layout = config.layout;

  mutable Mutex mutex;
  ThreadPool threads;
  ChunkFiles files;
  PagerStats counters KVPAGER_GUARDED_BY(mutex);

  Ledger ledger
      KVPAGER_GUARDED_BY(mutex);  // outlives the backend, whose forward counts as a reader

  // Bytes. Memory is had before anything is kept of it.
  const std::unique_ptr<Backend> backend;

  // Bookkeeping.
  SlotPool<BlockId> blocks KVPAGER_GUARDED_BY(mutex);
  SlotPool<SlotId> host_slots KVPAGER_GUARDED_BY(mutex);
  SlotPool<SlotId> disk_slots KVPAGER_GUARDED_BY(mutex);
  SlotPool<SlotId> summary_slots KVPAGER_GUARDED_BY(mutex);
  // Who leaves first, and what of it is known: of the pool, of the host arena for disk, and of copies
  // in the host arena. Notes, which a question brings up to date.
  mutable LeaveOrder victims KVPAGER_GUARDED_BY(mutex);
  mutable LeaveOrder spills KVPAGER_GUARDED_BY(mutex);
  mutable LeaveOrder host_copies KVPAGER_GUARDED_BY(mutex);
  mutable std::vector<uint8_t> sheltered
      KVPAGER_GUARDED_BY(mutex);  // [records], as far as marked; of the two orders' notes
  std::map<int64_t, Sequence> sequences KVPAGER_GUARDED_BY(mutex);
  std::map<int64_t, PinRange> pins KVPAGER_GUARDED_BY(mutex);
  int64_t reserved_homes KVPAGER_GUARDED_BY(mutex) = 0;  // sum over sequences
  int64_t referenced_homes KVPAGER_GUARDED_BY(mutex) =
      0;  // records that need a home and are used by a sequence
  int64_t restored_records KVPAGER_GUARDED_BY(mutex) = 0;  // records backed by a snapshot
  uint64_t clock KVPAGER_GUARDED_BY(mutex) = 0;            // forwards begun

  std::unique_ptr<Forward> forward KVPAGER_GUARDED_BY(mutex);
  Readers held KVPAGER_GUARDED_BY(mutex){ledger};  // what it may read, where all of it has to stay
  std::atomic<uint64_t> running{0};  // its number, for those who do not hold the lock; 0: none
};

// Throws InvalidArgumentError naming the tensor unless it is [rows, heads, dim] of a supported
// dtype.
void require_shape(const char* name, const TensorView& tensor, int64_t rows, int64_t heads,
                   int64_t dim);

// Throws InvalidArgumentError unless each element has memory of its own: rows and heads are written
// by whichever thread comes to them.
void require_apart(const char* name, const TensorView& tensor);

}  // namespace kvpager
