// The facade: many sequences over one hard-bounded pool. Plans in core, copies in memory, commits
// in core.
//
// Call order, as a regular expression per forward:  begin give? (write | attend)* (commit | abort)
// Thread-safety: every public function takes the pager's lock; one forward at a time. Every mutator
// is all-or-nothing (invariant 6) and restates the numbered invariants at its exit in checking
// builds.
//
// On a device nothing but commit waits for it, once, before anything is decided: keys and values are
// known to be finite there. Freezing, restoring, reading K/V and pressure on the pool wait for the
// copies they need.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvpager/layout.h"
#include "kvpager/ledger.h"
#include "kvpager/selection.h"
#include "kvpager/snapshot.h"
#include "kvpager/tensor.h"
#include "kvpager/thread_pool.h"
#include "kvpager/types.h"

namespace kvpager {

enum class Policy : uint8_t { kLru = 0, kQk = 1 };

struct PagerOptions {
  Layout layout;
  int64_t pool_blocks = 0;  // hard bound of the resident pool, in chunks
  int64_t rows = 64;        // M: most rows of a forward; a forward of exactly M rows is `exact`
  // Row counts below M, ascending, whose forwards are `exact` too: the caller has proven
  // that they give the bits of M rows.
  std::vector<int64_t> smaller_rows;
  bool exact = true;  // false: no forward is, whatever its row count
  Selection selection;
  int64_t host_bytes = 0;      // arena allocated up front; 0: none
  int64_t disk_bytes = 0;      // spill budget; 0: none
  std::string disk_path;       // existing folder; the spill file has no name in it
  int64_t summary_bytes = -1;  // budget of summaries; -1: enough for all homes of chunks and a pool
  Policy policy = Policy::kQk;
  int32_t recall_chunks = 4;  // most chunks a commit loads into the pool ahead of need
  double hysteresis = 0.1;    // a recall must beat its victim's score by this fraction
  int threads = 1;
  // Who does the work of those threads, shared with others; null: the pager starts its own.
  std::shared_ptr<ThreadPool> workers;
  std::string namespace_key;  // fingerprint of all that bits depend on; enters every chain hash
  // No row of any layer sees keys at positions <= its own - window; 0: some layer has no window. With
  // one, a sequence releases sealed chunks that lie behind it, but for what trims by up to `rewind`
  // tokens need. Both up to 2^40 tokens.
  int64_t window = 0;
  int64_t rewind = 0;
  uint64_t shuffle_seed = 0;  // not 0: blocks are handed out in a random order (tests)
  bool poison = false;        // free blocks are filled with NaN (tests)

  // Where the pool is and what computes: "cpu", or a device: "cuda", "cuda:1". The pool is then in
  // device memory, the host arena pinned, and tensors of a forward are device tensors. "shim" runs a
  // device's kernels on the processor (tests). "meta" has no bytes at all, only bookkeeping: what
  // would be read or written does not exist, so that a forward says mark_replayed() for its layers.
  // The rest is for devices only.
  std::string device = "cpu";
  int32_t q_heads = 0;             // query heads of the model; needed on a device
  std::string attention = "auto";  // tensor cores where shapes and dtypes allow, or "reference"
  // Chunks that are not in the pool: read in place over the link ("direct"), copied to the device a
  // layer ahead ("staged"), or staged where several tiles of queries read them ("auto").
  std::string missed_chunks = "auto";
  int64_t staging_bytes = -1;  // device memory for staged slices; -1: for 256 chunks, up to 256 MiB
  int64_t scratch_bytes = -1;  // most device memory for partial results; -1: as much as it takes
};

// Where tensors of a forward have to be, in DLPack's numbers.
struct DevicePlace {
  int32_t type = 1;
  int32_t ordinal = 0;
  std::string name = "cpu";
};

// What attends, and the version of its arithmetic: both belong in namespace_key.
struct AttentionKind {
  std::string name;  // "reference" or "tensor"
  int version = 0;
};
// Of a pager with these options, for queries of this dtype: device, layout, q_heads and attention
// count. Opens the device.
AttentionKind attention_of(const PagerOptions& options, DType q_dtype);

enum class RowKind : uint8_t {
  kCommit = 0,   // writes its K/V at `position`, may be committed
  kRead = 1,     // its K/V exist already; only attends
  kPadding = 2,  // output is zeros
  kGiven = 3,  // commits like kCommit, but its K/V are handed in: no row of the model's. Spans only
};

struct RowDescriptor {
  SequenceId sequence;
  int64_t position = 0;
  TokenId token = 0;
  RowKind kind = RowKind::kPadding;
};

// Rows of one sequence at positions position, position + 1, ..., `count` of them; or padding.
struct RowSpan {
  SequenceId sequence;
  int64_t position = 0;
  int64_t count = 0;
  RowKind kind = RowKind::kPadding;
};

struct ForwardOptions {
  // [given] ids of the kGiven spans' positions, in the order of these spans.
  std::vector<TokenId> given;
  // Every row attends to all before it, whatever `selection` says. Needed beside given positions,
  // unless that is dense: a row would select among chunks that are not sealed yet.
  bool dense = false;
  void* stream = nullptr;  // as of begin()
};

// What attention needs of the model at one layer.
struct AttendOptions {
  float scaling = 1.0f;
  float softcap = 0.0f;          // 0: none
  int64_t window = 0;            // 0: none
  const float* sinks = nullptr;  // [q_heads] or null
  // On a device: `sinks` is device memory that lives as long as what is launched (or captured);
  // else host memory, which is copied to the device when its content is first seen.
  bool sinks_on_device = false;
  void* stream = nullptr;  // the stream that is current on the device; null: its default stream
};

// What a call says that names a forward which does not run.
inline constexpr char kForwardEnded[] = "this forward has ended; begin another one";

struct PagerStats {
  int64_t pool_blocks = 0, free_blocks = 0, open_blocks = 0, pinned_blocks = 0;
  int64_t pool_bytes = 0;      // mapped for the slab, as the allocator counts it
  int64_t resident_bytes = 0;  // blocks in use x chunk bytes
  int64_t staging_bytes = 0;   // mapped for slices that stream from disk or snapshot
  int64_t host_bytes = 0, host_bytes_used = 0;
  int64_t disk_bytes = 0, disk_bytes_used = 0;
  int64_t summary_bytes = 0, summary_bytes_used = 0;
  int64_t chunk_bytes = 0, summary_bytes_per_chunk = 0;
  int64_t sequences = 0, records = 0, cached_records = 0, reserved_chunks = 0;
  int64_t home_chunks = 0,
          home_chunks_used = 0;  // the latter by what sequences hold, reservations apart
  int64_t forwards = 0, aborted_forwards = 0, rows_committed = 0;
  int64_t chunks_sealed = 0, chunks_shared = 0, chunks_evicted = 0, chunks_recalled = 0;
  int64_t chunks_released = 0;       // by a sequence, behind its window
  int64_t eviction_orders_made = 0;  // of all records; between forwards one suffices
  int64_t chunks_forgotten = 0;      // cached ones that gave way, and are found no more
  int64_t chunks_healed = 0;         // recomputed, bit for bit, because a lower copy was damaged
  int64_t summaries_rebuilt = 0;     // from verified payload, because their snapshot's was damaged
  int64_t tails_paged_out = 0;       // open chunks of idle sequences that gave up their blocks
  int64_t chunks_spilled = 0, slices_streamed = 0, prefix_tokens_reused = 0;
  int64_t bytes_paged_in = 0;   // copied into pool blocks from any lower tier
  int64_t bytes_paged_out = 0;  // from host memory to disk, for room; evicting a block copies none
  int64_t bytes_written_through = 0;
  int64_t snapshot_bytes_read = 0;
  // Of a device: memory allocated on it and pinned for it, all in all and of that for partial results
  // and tables; what its copies moved, either way; waits of the host for it. Partial results are
  // scratch_bytes on the host too.
  int64_t device_bytes = 0, pinned_bytes = 0, scratch_bytes = 0, table_bytes = 0;
  int64_t bytes_copied_up = 0, bytes_copied_down = 0, slices_staged = 0, bytes_staged = 0;
  int64_t host_waits = 0;
  // What products of matrices keep in the threads that this pager uses, shared or its own, for their next
  // calls, and what those that run have taken.
  int64_t workspace_bytes = 0;
  double seconds_write = 0, seconds_scan = 0, seconds_load = 0, seconds_attend = 0,
         seconds_seal = 0, seconds_recall = 0, seconds_wait = 0;
};

class Pager {
 public:
  explicit Pager(const PagerOptions& options);
  ~Pager();
  Pager(const Pager&) = delete;
  Pager& operator=(const Pager&) = delete;

  const PagerOptions& options() const;
  DevicePlace device_place() const;
  // What attends to queries of this dtype ("reference" or "tensor") and the version of its arithmetic.
  const char* attention_name(DType q_dtype) const;
  int attention_version(DType q_dtype) const;

  // In a child that was forked since, every call but the destructor raises InvalidArgumentError.

  // Sequences. `salt` separates tenants: it enters every chain hash. No two sequences, pins and
  // forwards of a process have equal numbers, so that those of another pager are unknown to this one.
  SequenceId create_sequence(const std::string& salt);
  // Its exact chunks stay cached for prefix reuse. forget: they do not, nor do those that were computed
  // after them, unless another sequence uses them; their memory below the pool goes back to the system.
  void destroy_sequence(SequenceId sequence, bool forget = false);
  // The same for an owner that goes: a sequence of the running forward ends with it, and one that is
  // gone already is no error.
  void drop_sequence(SequenceId sequence) noexcept;
  SequenceId fork(SequenceId sequence);
  // To `position`: 0, or earliest_trim() to length.
  void trim(SequenceId sequence, int64_t position);
  // Positions of the whole text, and their ids: also of what was released.
  int64_t length(SequenceId sequence) const;
  std::vector<TokenId> tokens(SequenceId sequence) const;
  // The first positions whose chunks were released behind the window; their K/V are gone.
  int64_t released(SequenceId sequence) const;
  // The first position a trim can go back to, 0 apart, so that rows there and just before it see all
  // that their window shows them.
  int64_t earliest_trim(SequenceId sequence) const;

  // Admission: lower-tier room to grow to `total_tokens`, or CapacityError with the bytes needed.
  // Replaces what an earlier call held. With a window that is room for what the sequence holds at a
  // time. What others go on using of the chunks it releases (a restored or adopted sequence, a save) is
  // reserved again as far as there is room; begin() asks for the rest.
  void reserve(SequenceId sequence, int64_t total_tokens);
  // REQUIRES: an empty sequence. Shares the longest chain of sealed exact chunks whose tokens these
  // are; with a window, only those that it shows, and `rewind` tokens before it, have to be there.
  int64_t adopt_prefix(SequenceId sequence, const std::vector<TokenId>& tokens);

  // A forward: all M rows at once. The commit rows of a sequence hold length, length + 1, ... in
  // row order. `stream` is the caller's stream of a device, here and in write and attend: what is
  // launched there is ordered with the caller's own work. It must not be capturing here; a graph
  // may capture writes and attention between begin and commit, after which they have not run.
  // Returns the number of this forward. Calls that take one as `of` are refused with InvalidArgumentError
  // unless that forward runs when they have the lock; 0: whichever runs.
  uint64_t begin(const std::vector<RowDescriptor>& rows, void* stream = nullptr);
  // The same, rows that follow each other named at once. tokens [rows]: of all spans together.
  uint64_t begin(const std::vector<RowSpan>& spans, std::vector<TokenId> tokens,
                 void* stream = nullptr);
  // The same, also with positions whose keys and values are given. kGiven and kCommit spans of a
  // sequence continue it in order, one after the other as they like. A kGiven span takes no row of
  // q, k and v and no entry of `tokens`, which may be empty: then nothing attends, and what is given
  // is worth what commit() is told. Each position is a place in an open chunk, and each of these a
  // block: as many as the pool can spare, or CapacityError.
  uint64_t begin(const std::vector<RowSpan>& spans, std::vector<TokenId> tokens,
                 ForwardOptions forward_options);
  // The keys and values of all given positions: k[layer] [given, kv_heads, k_dim], v[layer] [given,
  // kv_heads, v_dim], for each layer. Once, before the first attend. Rows of the model see them from
  // then on, each those before it. Non-finite ones abort the forward (NonFiniteError: layer,
  // position), on a device at commit. Not while `stream` is captured.
  void give(const std::vector<TensorView>& k, const std::vector<TensorView>& v,
            void* stream = nullptr, uint64_t of = 0);
  // k [rows, kv_heads, k_dim], v [rows, kv_heads, v_dim]; q [rows, q_heads, k_dim] -> out [rows,
  // q_heads, v_dim]. Non-finite keys or values of commit rows, and queries of rows that are no
  // padding, abort the forward (NonFiniteError: layer, position), on a device at commit.
  void attend(int layer, const TensorView& q, const TensorView& k, const TensorView& v,
              const TensorView& out, const AttendOptions& attend_options, uint64_t of = 0);
  // The chunks that each (row, kv head) attended to in the last attend(), ascending; none where all are
  // attended to. Of the cpu alone.
  std::vector<std::vector<int32_t>> selected(uint64_t of = 0) const;
  // K/V without attention: rows computed elsewhere.
  void write(int layer, const TensorView& k, const TensorView& v, void* stream = nullptr,
             uint64_t of = 0);
  // Changes whenever memory that captured launches refer to has been allocated anew (by a begin that
  // outgrew it). A graph is worth replaying while this is what it was when it was captured.
  uint64_t generation() const;
  // Between begin and commit: the layers of this forward were run on `stream` by replaying a graph
  // that was captured when generation() was `generation`, with as many rows. Not with
  // ForwardOptions::dense where the configured selection, which the graph runs, is another one.
  void mark_replayed(uint64_t generation, void* stream = nullptr, uint64_t of = 0);
  // accepted[i] rows of sequences[i] are committed (sequences not named: none of theirs), given
  // positions and rows counted together. Every layer must have been written, and what is to be given
  // given. provenance: what these rows are worth at best. Rows of the model can be exact in a forward
  // of M of them, or of a number that is proven to be its equal. A forward without any has nothing
  // that the number could change: what is given is then worth what the caller says.
  void commit(const std::vector<SequenceId>& sequences, const std::vector<int64_t>& accepted,
              Provenance provenance = Provenance::kExact, uint64_t of = 0);
  void commit_all(Provenance provenance = Provenance::kExact, uint64_t of = 0);
  // Ends the running forward as if it had not begun; with a number, only if it is that one. Nothing
  // to end: nothing happens.
  void abort();
  void abort(uint64_t number);
  bool forward_running() const;
  // Whether this is a forked child of the process that made it.
  bool forked() const noexcept;
  // The number of the running forward, 0: none. Does not wait for the lock.
  uint64_t running_forward() const;

  // The chunks a row with these queries at `position` would attend to, per kv head. q [1, q_heads,
  // k_dim], finite.
  std::vector<std::vector<int32_t>> select(SequenceId sequence, int layer, const TensorView& q,
                                           int64_t position, int64_t window);
  // Raw rows [start, stop) of one layer: k [n, kv_heads, k_dim] and v in the layout's dtypes,
  // contiguous.
  void read_kv(SequenceId sequence, int layer, int64_t start, int64_t stop, std::byte* k,
               std::byte* v);

  // Keeps positions [start, stop) resident. CapacityError says how many chunks are free to pin.
  PinId pin(SequenceId sequence, int64_t start, int64_t stop);
  void unpin(PinId pin);

  // Moves every unpinned, unneeded chunk out of the pool (tests, benches, idle sessions); idle sequences' open
  // ones too, as far as there are homes for them, but for a device's. Changes no bit.
  int64_t evict_all();

  // The first `upto` positions (-1: all) as they are now, without what was released, for saving while
  // the sequence goes on. REQUIRES: upto >= earliest_trim().
  // Sealed chunks are shared, only a tail is copied. Its chunks, and the pager's memory, stay until
  // it is destroyed; no room but theirs is taken.
  std::shared_ptr<SnapshotContent> freeze(SequenceId sequence, int64_t upto = -1);
  // Lazy: the first `upto` positions (-1: all) of a snapshot. `file_namespace` is the namespace_key
  // the file was written under; provenance other than kExact puts the chunks in a namespace of their
  // own. `before`: what was released before the snapshot's first position, which `upto` counts too;
  // only a pager with a window that is not wider can do without them.
  SequenceId restore(std::shared_ptr<SnapshotReader> reader, const std::string& salt,
                     Provenance provenance, const std::string& file_namespace, int64_t upto = -1,
                     const ReleasedText& before = {});
  // The name of every full chunk of these tokens under this pager's namespace_key.
  std::vector<ChunkName> chain_hashes(const std::vector<TokenId>& tokens,
                                      const std::string& salt) const;

  std::vector<ChunkInfo> ledger(SequenceId sequence) const;
  PagerStats stats() const;
  // Throws InvariantError that names the numbered invariant (DESIGN.md) that does not hold.
  void check_invariants() const;

  struct Impl;

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace kvpager
