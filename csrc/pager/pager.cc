// The pager: construction, and the facade. Each public function takes the lock, does one step by one of the
// classes in impl.h, and restates the invariants in checking builds (locked.h).
//
// What every step keeps (numbers are those of DESIGN.md, restated by check.cc):
//   1, 2   A block or slot has one owner, and budgets were mapped up front: nothing here allocates chunks.
//   3      A pinned chunk is resident.
//   4, 5   Sealed bytes never change; what is read or lent keeps its place until its reader is done.
//   6, 14  A step that throws has changed nothing, and an error within a forward aborts it.
//   7, 8   What a row attends to and computes does not depend on where bytes are.
//
// A forward is running from begin() to commit(), abort() or an error; `running` has its number, so that a
// handle of another one is refused. A chunk is open while rows may still be written to it, and sealed after
// the commit of its last row:
//
//   (none) --begin, fork, trim--> open --commit--> sealed, referenced <--adopt, restore--> sealed, cached
//
// A forked child has the memory, but not the threads: every function refuses there.
#include "kvpager/pager.h"

#include <utility>

#include "core/chunk_namer.h"
#include "kvpager/error.h"
#include "pager/impl.h"
#include "pager/locked.h"

namespace kvpager {
namespace {

// Whether a row is the next one of a span. Positions may be anything: they are not checked yet.
bool continues(const RowSpan& span, const RowDescriptor& row) {
  if (row.kind != span.kind) return false;
  if (row.kind == RowKind::kPadding) return true;
  const auto ahead = static_cast<uint64_t>(row.position) - static_cast<uint64_t>(span.position);
  return row.sequence == span.sequence && ahead == static_cast<uint64_t>(span.count);
}

}  // namespace

Pager::Impl::Impl(const PagerOptions& options)
    : config(options),
      workers(options.workers != nullptr ? options.workers
                                         : std::make_shared<ThreadPool>(options.threads)),
      threads(*workers),
      files(config),
      backend(make_backend({config, config.layout, ledger, files, threads, counters})),
      residency(parts(),
                [this] {
                  mutex.held();
                  return sequences.sheltered();
                }),
      sequences(parts(), residency),
      forward(parts(), residency, sequences, running),
      snapshots(parts(), residency, sequences) {}

// A forked child has the memory, but not the threads that would have to end, and shares the files.
Pager::Pager(const PagerOptions& options)
    : impl_(new Impl(options), [](Impl* impl) {
        if (!impl->process.forked()) delete impl;
      }) {}
Pager::~Pager() = default;

const PagerOptions& Pager::options() const { return impl_->config.options; }
DevicePlace Pager::device_place() const { return impl_->backend->place(); }
const char* Pager::attention_name(DType q_dtype) const {
  return impl_->backend->attention_name(q_dtype);
}
int Pager::attention_version(DType q_dtype) const {
  return impl_->backend->attention_version(q_dtype);
}

SequenceId Pager::create_sequence(const std::string& salt) {
  return locked(*impl_,
                [&]() KVPAGER_HOLDS(impl_->mutex) { return impl_->sequences.create(salt).id; });
}
void Pager::destroy_sequence(SequenceId sequence, bool forget) {
  locked(*impl_, [&]() KVPAGER_HOLDS(impl_->mutex) { impl_->sequences.close(sequence, forget); });
}
void Pager::drop_sequence(SequenceId sequence) noexcept {
  try {
    locked(*impl_, [&]() KVPAGER_HOLDS(impl_->mutex) { impl_->sequences.drop(sequence); });
  } catch (const InvalidArgumentError&) {  // in a forked child: it is the parent's
  }
}
SequenceId Pager::fork(SequenceId sequence) {
  return locked(*impl_,
                [&]() KVPAGER_HOLDS(impl_->mutex) { return impl_->sequences.fork(sequence); });
}
void Pager::trim(SequenceId sequence, int64_t position) {
  locked(*impl_, [&]() KVPAGER_HOLDS(impl_->mutex) { impl_->sequences.trim(sequence, position); });
}
int64_t Pager::length(SequenceId sequence) const {
  return locked(
      *impl_, [&]() KVPAGER_HOLDS(impl_->mutex) { return impl_->sequences.find(sequence).length; });
}
std::vector<TokenId> Pager::tokens(SequenceId sequence) const {
  return locked(*impl_, [&]() KVPAGER_HOLDS(impl_->mutex) {
    const TokenLog& tokens = impl_->sequences.find(sequence).tokens;
    return tokens.first(tokens.size());
  });
}
int64_t Pager::released(SequenceId sequence) const {
  return locked(*impl_, [&]() KVPAGER_HOLDS(impl_->mutex) {
    return impl_->sequences.find(sequence).released * impl_->config.layout.chunk_tokens;
  });
}
int64_t Pager::earliest_trim(SequenceId sequence) const {
  return locked(*impl_, [&]() KVPAGER_HOLDS(impl_->mutex) {
    return impl_->sequences.earliest_trim(impl_->sequences.find(sequence));
  });
}
void Pager::reserve(SequenceId sequence, int64_t total_tokens) {
  locked(*impl_,
         [&]() KVPAGER_HOLDS(impl_->mutex) { impl_->sequences.reserve(sequence, total_tokens); });
}
int64_t Pager::adopt_prefix(SequenceId sequence, const std::vector<TokenId>& tokens) {
  return locked(*impl_, [&]() KVPAGER_HOLDS(impl_->mutex) {
    return impl_->sequences.adopt_prefix(sequence, tokens);
  });
}
uint64_t Pager::begin(const std::vector<RowDescriptor>& rows, void* stream) {
  std::vector<RowSpan> spans;
  std::vector<TokenId> tokens;
  tokens.reserve(rows.size());
  for (const RowDescriptor& row : rows) {
    if (row.kind == RowKind::kGiven) {
      throw InvalidArgumentError(
          str("row ", tokens.size(), ": is given; name given positions in spans"));
    }
    tokens.push_back(row.token);
    if (spans.empty() || !continues(spans.back(), row)) {
      spans.push_back({row.sequence, row.position, 0, row.kind});
    }
    ++spans.back().count;
  }
  return begin(spans, std::move(tokens), stream);
}
uint64_t Pager::begin(const std::vector<RowSpan>& spans, std::vector<TokenId> tokens,
                      void* stream) {
  return begin(spans, std::move(tokens), ForwardOptions{{}, false, stream});
}
uint64_t Pager::begin(const std::vector<RowSpan>& spans, std::vector<TokenId> tokens,
                      ForwardOptions forward_options) {
  return locked(*impl_, [&]() KVPAGER_HOLDS(impl_->mutex) {
    return impl_->forward.begin(spans, std::move(tokens), std::move(forward_options));
  });
}
void Pager::give(const std::vector<TensorView>& k, const std::vector<TensorView>& v, void* stream,
                 uint64_t of) {
  locked(*impl_, [&]() KVPAGER_HOLDS(impl_->mutex) {
    impl_->forward.require_running(of);
    impl_->forward.give(k, v, stream);
  });
}
void Pager::attend(int layer, const TensorView& q, const TensorView& k, const TensorView& v,
                   const TensorView& out, const AttendOptions& attend_options, uint64_t of) {
  locked(*impl_, [&]() KVPAGER_HOLDS(impl_->mutex) {
    impl_->forward.require_running(of);
    impl_->forward.attend(layer, q, k, v, out, attend_options);
  });
}
std::vector<std::vector<int32_t>> Pager::selected(uint64_t of) const {
  return locked(*impl_, [&]() KVPAGER_HOLDS(impl_->mutex) {
    impl_->forward.require_running(of);
    return impl_->forward.selected();
  });
}
void Pager::write(int layer, const TensorView& k, const TensorView& v, void* stream, uint64_t of) {
  locked(*impl_, [&]() KVPAGER_HOLDS(impl_->mutex) {
    impl_->forward.require_running(of);
    impl_->forward.write(layer, k, v, stream);
  });
}
uint64_t Pager::generation() const {
  return locked(*impl_, [&]() KVPAGER_HOLDS(impl_->mutex) { return impl_->backend->generation(); });
}
void Pager::mark_replayed(uint64_t generation, void* stream, uint64_t of) {
  locked(*impl_, [&]() KVPAGER_HOLDS(impl_->mutex) {
    impl_->forward.require_running(of);
    impl_->forward.mark_replayed(generation, stream);
  });
}
void Pager::commit(const std::vector<SequenceId>& sequences, const std::vector<int64_t>& accepted,
                   Provenance provenance, uint64_t of) {
  locked(*impl_, [&]() KVPAGER_HOLDS(impl_->mutex) {
    impl_->forward.require_running(of);
    impl_->forward.commit(sequences, accepted, provenance);
  });
}
void Pager::commit_all(Provenance provenance, uint64_t of) {
  locked(*impl_, [&]() KVPAGER_HOLDS(impl_->mutex) {
    impl_->forward.require_running(of);
    impl_->forward.commit_all(provenance);
  });
}
void Pager::abort() {
  locked(*impl_, [&]() KVPAGER_HOLDS(impl_->mutex) { impl_->forward.abort(); });
}
void Pager::abort(uint64_t number) {
  locked(*impl_, [&]() KVPAGER_HOLDS(impl_->mutex) {
    const Forward* forward = impl_->forward.get();
    if (forward != nullptr && forward->number == number) impl_->forward.abort();
  });
}
bool Pager::forked() const noexcept { return impl_->process.forked(); }
uint64_t Pager::running_forward() const { return impl_->running; }
bool Pager::forward_running() const {
  return locked(*impl_,
                [&]() KVPAGER_HOLDS(impl_->mutex) { return impl_->forward.get() != nullptr; });
}
std::vector<std::vector<int32_t>> Pager::select(SequenceId sequence, int layer, const TensorView& q,
                                                int64_t position, int64_t window) {
  return locked(*impl_, [&]() KVPAGER_HOLDS(impl_->mutex) {
    return impl_->select(sequence, layer, q, position, window);
  });
}
void Pager::read_kv(SequenceId sequence, int layer, int64_t start, int64_t stop, std::byte* k,
                    std::byte* v) {
  locked(*impl_,
         [&]() KVPAGER_HOLDS(impl_->mutex) { impl_->read_kv(sequence, layer, start, stop, k, v); });
}
PinId Pager::pin(SequenceId sequence, int64_t start, int64_t stop) {
  return locked(*impl_, [&]() KVPAGER_HOLDS(impl_->mutex) {
    return impl_->sequences.pin(sequence, start, stop);
  });
}
void Pager::unpin(PinId pin) {
  locked(*impl_, [&]() KVPAGER_HOLDS(impl_->mutex) { impl_->sequences.unpin(pin); });
}
int64_t Pager::evict_all() {
  return locked(*impl_, [&]() KVPAGER_HOLDS(impl_->mutex) { return impl_->residency.evict_all(); });
}
SequenceId Pager::restore(std::shared_ptr<SnapshotReader> reader, const std::string& salt,
                          Provenance provenance, const std::string& file_namespace, int64_t upto,
                          const ReleasedText& before) {
  return locked(*impl_, [&]() KVPAGER_HOLDS(impl_->mutex) {
    return impl_->snapshots.restore(reader, salt, provenance, file_namespace, upto, before);
  });
}
std::vector<ChunkName> Pager::chain_hashes(const std::vector<TokenId>& tokens,
                                           const std::string& salt) const {
  const int64_t c = impl_->config.layout.chunk_tokens;
  const ChunkNamer namer(impl_->config.options.namespace_key, salt);
  std::vector<ChunkName> names;
  names.reserve(tokens.size() / static_cast<size_t>(c));
  ChunkName name;
  for (int64_t end = c; end <= static_cast<int64_t>(tokens.size()); end += c) {
    name = namer.next(name, tokens.data() + (end - c), c, Provenance::kExact);
    names.push_back(name);
  }
  return names;
}
std::vector<ChunkInfo> Pager::ledger(SequenceId sequence) const {
  return locked(*impl_, [&]() KVPAGER_HOLDS(impl_->mutex) { return impl_->inspect(sequence); });
}
PagerStats Pager::stats() const {
  return locked(*impl_, [&]() KVPAGER_HOLDS(impl_->mutex) { return impl_->stats(); });
}
void Pager::check_invariants() const {
  impl_->process.require("pager");
  const MutexLock lock(impl_->mutex);
  impl_->check_invariants();
}

}  // namespace kvpager
