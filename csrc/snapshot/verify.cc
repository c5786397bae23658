#include "snapshot/verify.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <new>
#include <numeric>
#include <system_error>
#include <thread>
#include <tuple>

#include "base/mutex.h"
#include "kvpager/error.h"
#include "kvpager/process.h"

namespace kvpager::snapshot {

namespace {

// Read at a time. Threads that take turns at pieces of this size read a file as one stream, which the
// system reads ahead of (larger pieces are many streams, each of them short of its end); and what
// was read is still in the cache when it is hashed.
constexpr int64_t kReadBytes = int64_t{1} << 20;

// One read: `count` neighbouring chunks, or `count` slices of one chunk, or `count` neighbouring
// summaries.
struct Piece {
  enum Kind { kChunks, kSlices, kSummaries } kind = kChunks;
  size_t first = 0;  // in Plan::order
  int layer = 0;     // of kSlices
  int64_t count = 0;
};

struct Plan {
  std::vector<int64_t> order;  // chunks as they lie in the files
  std::vector<Piece> pieces;
  int64_t largest = 0;  // bytes of a piece
  int64_t total = 0;
};

class Verification {
 public:
  explicit Verification(const ChunkSource& source) : source_(source) {}

  std::vector<SnapshotDamage> run(int threads, const SnapshotProgress& progress);

 private:
  void plan();
  void add(const Piece& piece);
  int64_t bytes_of(const Piece& piece) const;
  // Takes pieces until there are none; the caller's thread reports.
  void work(const SnapshotProgress* progress);
  void check(const Piece& piece, std::byte* buffer);
  void check_slices(int64_t chunk, int layer, int64_t count, const std::byte* bytes);
  // One by one: says for each what is wrong with it.
  void check_apart(const Piece& piece, std::byte* buffer);
  void found(int64_t chunk, int layer, const std::string& message);

  const ChunkSource& source_;
  Plan plan_;
  std::atomic<size_t> next_{0};
  std::atomic<int64_t> done_{0};
  Mutex mutex_;
  std::vector<SnapshotDamage> damage_ KVPAGER_GUARDED_BY(mutex_);
  std::exception_ptr failure_ KVPAGER_GUARDED_BY(mutex_);
  const MadeIn process_;
};

int64_t Verification::bytes_of(const Piece& piece) const {
  switch (piece.kind) {
    case Piece::kChunks:
      return piece.count * source_.layout().chunk_bytes();
    case Piece::kSlices:
      return source_.layout().slice_offset(piece.layer + static_cast<int>(piece.count)) -
             source_.layout().slice_offset(piece.layer);
    default:
      return piece.count * source_.summary_bytes();
  }
}

void Verification::add(const Piece& piece) {
  plan_.pieces.push_back(piece);
  plan_.largest = std::max(plan_.largest, bytes_of(piece));
  plan_.total += bytes_of(piece);
}

void Verification::plan() {
  const Layout& layout = source_.layout();
  const auto key = [&](int64_t chunk) {
    return std::make_tuple(source_.place(chunk).file, source_.place(chunk).chunk);
  };
  std::vector<int64_t>& order = plan_.order;
  order.resize(source_.places.size());
  std::iota(order.begin(), order.end(), 0);
  const auto before = [&](int64_t a, int64_t b) { return key(a) < key(b); };
  if (!std::is_sorted(order.begin(), order.end(), before)) {
    std::sort(order.begin(), order.end(), before);
  }
  // Runs of chunks that lie behind each other, at most `most` long.
  const auto each_run = [&](int64_t most, const auto& skip, const auto& use) {
    for (size_t begin = 0; begin < order.size();) {
      size_t end = begin + 1;
      if (!skip(order[begin])) {
        const auto& first = source_.place(order[begin]);
        while (end < order.size() && static_cast<int64_t>(end - begin) < most &&
               !skip(order[end]) && source_.place(order[end]).file == first.file &&
               source_.place(order[end]).chunk == first.chunk + (end - begin)) {
          ++end;
        }
        use(begin, static_cast<int64_t>(end - begin));
      }
      begin = end;
    }
  };
  const auto none = [](int64_t) { return false; };
  if (layout.chunk_bytes() <= kReadBytes) {
    each_run(kReadBytes / layout.chunk_bytes(), none,
             [&](size_t first, int64_t count) { add({Piece::kChunks, first, 0, count}); });
  } else {
    const int64_t most = std::max<int64_t>(1, kReadBytes / layout.largest_slice_bytes());
    for (size_t first = 0; first < order.size(); ++first) {
      for (int64_t layer = 0; layer < layout.layers; layer += most) {
        add({Piece::kSlices, first, static_cast<int>(layer),
             std::min<int64_t>(most, layout.layers - layer)});
      }
    }
  }
  const int64_t sealed = source_.meta.sealed_chunks();
  const int64_t most =
      std::max<int64_t>(1, kReadBytes / std::max<int64_t>(1, source_.summary_bytes()));
  each_run(
      most, [&](int64_t chunk) { return chunk >= sealed; },
      [&](size_t first, int64_t count) { add({Piece::kSummaries, first, 0, count}); });
}

void Verification::found(int64_t chunk, int layer, const std::string& message) {
  const MutexLock guard(mutex_);
  damage_.push_back({chunk, layer, message});
}

void Verification::check_slices(int64_t chunk, int layer, int64_t count, const std::byte* bytes) {
  const Layout& layout = source_.layout();
  for (int64_t i = 0; i < count; ++i) {
    const int at = layer + static_cast<int>(i);
    const std::string damage = source_.slice_damage(
        chunk, at, bytes + layout.slice_offset(at) - layout.slice_offset(layer));
    if (!damage.empty()) found(chunk, at, damage);
  }
}

void Verification::check(const Piece& piece, std::byte* buffer) {
  const int64_t* chunks = plan_.order.data() + piece.first;
  const Layout& layout = source_.layout();
  try {
    switch (piece.kind) {
      case Piece::kChunks:
        source_.fetch_slices(chunks[0], 0, piece.count * layout.layers, buffer);
        for (int64_t i = 0; i < piece.count; ++i) {
          check_slices(chunks[i], 0, layout.layers, buffer + i * layout.chunk_bytes());
        }
        break;
      case Piece::kSlices:
        source_.fetch_slices(chunks[0], piece.layer, piece.count, buffer);
        check_slices(chunks[0], piece.layer, piece.count, buffer);
        break;
      case Piece::kSummaries:
        source_.fetch_summaries(chunks[0], piece.count, buffer);
        for (int64_t i = 0; i < piece.count; ++i) {
          const std::string damage =
              source_.summary_damage(chunks[i], buffer + i * source_.summary_bytes());
          if (!damage.empty()) found(chunks[i], -1, damage);
        }
        break;
    }
  } catch (const CorruptSnapshotError&) {
    check_apart(piece, buffer);
  } catch (const StorageError&) {
    check_apart(piece, buffer);
  }
}

void Verification::check_apart(const Piece& piece, std::byte* buffer) {
  const auto attempt = [&](int64_t chunk, int layer, const auto& read) {
    try {
      read();
    } catch (const CorruptSnapshotError& e) {
      found(chunk, layer, e.what());
    } catch (const StorageError& e) {  // a bad sector, say
      found(chunk, layer, e.what());
    }
  };
  const bool slices = piece.kind == Piece::kSlices;
  for (int64_t i = 0; i < (slices ? 1 : piece.count); ++i) {
    const int64_t chunk = plan_.order[piece.first + static_cast<size_t>(i)];
    if (piece.kind == Piece::kSummaries) {
      attempt(chunk, -1, [&] { source_.read_summaries(chunk, 1, buffer); });
      continue;
    }
    const int begin = piece.layer;
    const int end = slices ? begin + static_cast<int>(piece.count) : source_.layout().layers;
    for (int layer = begin; layer < end; ++layer) {
      attempt(chunk, layer, [&] { source_.read_slice(chunk, layer, buffer); });
    }
  }
}

void Verification::work(const SnapshotProgress* progress) {
  try {
    const auto bytes = static_cast<size_t>(std::max<int64_t>(1, plan_.largest));
    const std::unique_ptr<std::byte[]> buffer(new std::byte[bytes]);
    for (size_t i = next_++; i < plan_.pieces.size(); i = next_++) {
      check(plan_.pieces[i], buffer.get());
      const int64_t done = done_ += bytes_of(plan_.pieces[i]);
      if (progress != nullptr && *progress) (*progress)(done, plan_.total);
      process_.require("verification");  // the callback may have forked
    }
  } catch (...) {
    next_ = plan_.pieces.size();  // the others stop as well
    if (process_.forked()) {      // where one of them may hold the mutex for ever
      failure_ = std::current_exception();
      return;
    }
    const MutexLock guard(mutex_);
    if (failure_ == nullptr) failure_ = std::current_exception();
  }
}

std::vector<SnapshotDamage> Verification::run(int threads, const SnapshotProgress& progress) {
  if (threads < 1) {
    throw InvalidArgumentError(str("verify: threads is ", threads, ", expected at least 1"));
  }
  plan();
  const size_t useful = std::min(static_cast<size_t>(threads), plan_.pieces.size());
  auto team = std::make_unique<std::vector<std::thread>>();
  team->reserve(useful);
  try {
    while (team->size() + 1 < useful) team->emplace_back([this] { work(nullptr); });
  } catch (const std::system_error&) {
    // No more threads to be had: those there are do it.
  } catch (const std::bad_alloc&) {
    // Nor memory for one.
  }
  work(&progress);
  if (process_.forked()) {  // a child has no such threads, and cannot even let them go
    mutex_.held();
    static_cast<void>(team.release());
    std::rethrow_exception(failure_);
  }
  for (std::thread& thread : *team) thread.join();
  mutex_.held();  // nobody else is left
  if (failure_ != nullptr) std::rethrow_exception(failure_);
  if (progress) progress(plan_.total, plan_.total);
  std::sort(damage_.begin(), damage_.end(), [](const auto& a, const auto& b) {
    return std::tie(a.chunk, a.layer) < std::tie(b.chunk, b.layer);
  });
  return std::move(damage_);
}

}  // namespace

std::vector<SnapshotDamage> verify(const ChunkSource& source, int threads,
                                   const SnapshotProgress& progress) {
  return Verification(source).run(threads, progress);
}

}  // namespace kvpager::snapshot
