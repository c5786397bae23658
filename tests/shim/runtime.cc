#include "shim/runtime.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "shim/fibers.h"

namespace kvpager::shim {

namespace {

constexpr int kPoison = 0xFF;
constexpr int kPatience = 8;  // queries of an event after which it comes to pass

struct Stream;
struct Capture;

[[noreturn]] void die(const char* what) {
  std::fprintf(stderr, "kvpager shim: %s; on a GPU this is undefined behaviour\n", what);
  std::abort();
}

struct Range {
  const std::byte* begin = nullptr;
  int64_t bytes = 0;
  bool overlaps(const Range& other) const {
    return begin < other.begin + other.bytes && other.begin < begin + bytes;
  }
};

// One copy, fill, kernel or replay. Both parts may run again when it is a node of a graph.
struct Work {
  std::function<void()> begin;  // when nothing holds it back; may be empty
  std::function<void()> end;
  std::vector<Range> uses;
};

// What one recording of an event stands for.
struct Mark {
  bool done = false;
  Stream* stream = nullptr;
  int queries = 0;
  // Recorded while capturing: the nodes before it.
  std::weak_ptr<Capture> capture;
  bool captured = false;
  std::vector<size_t> nodes;
};

struct Entry {
  enum class Kind { kWork, kWait, kRecord } kind = Kind::kWork;
  Work work;
  bool begun = false;
  std::shared_ptr<Mark> mark;
};

struct Node {
  Work work;
  std::vector<size_t> after;
};

struct Stream {
  bool made_here = false;
  bool destroyed = false;
  std::deque<Entry> queue;
  std::shared_ptr<Capture> capture;
  std::vector<size_t> tail;  // nodes of the capture that the next one comes after
};

struct Event {
  std::shared_ptr<Mark> mark;  // null: never recorded
};

struct Capture {
  Stream* origin = nullptr;
  bool invalid = false;
  std::vector<Node> nodes;
};

using Graph = std::shared_ptr<const std::vector<Node>>;

struct Allocation {
  int64_t bytes = 0;
  bool pinned = false;
};

int64_t environment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == 0) return otherwise;
  char* end = nullptr;
  const long long value = std::strtoll(text, &end, 10);
  if (*end != 0 || value < 0) {
    std::fprintf(stderr, "kvpager shim: %s is '%s', expected a number >= 0\n", name, text);
    std::abort();
  }
  return value;
}

thread_local bool inside = false;

class Runtime {
 public:
  // Lives as long as the process: other threads may still be at work when it ends.
  static Runtime& get() {
    static Runtime* const runtime = new Runtime;
    return *runtime;
  }

  class Lock {
   public:
    explicit Lock(Runtime& runtime) {
      if (inside) die("a kernel called the runtime");
      guard_ = std::unique_lock<std::mutex>(runtime.mutex_);
      inside = true;
    }
    ~Lock() { inside = false; }

   private:
    std::unique_lock<std::mutex> guard_;
  };

  Runtime() { configure(); }

  void configure() {
    const uint64_t seed = static_cast<uint64_t>(environment("KVPAGER_SHIM_SEED", 1));
    set_seed(seed);  // of the kernels' warps
    random_ = seed * 0x9E3779B97F4A7C15u;
    // In sixteenths: how often something runs that nothing has asked for yet.
    constexpr uint64_t kEagerness[] = {0, 8, 2, 14};
    eagerness_ = kEagerness[(seed + 3) % 4];
    limit_[0] = environment("KVPAGER_SHIM_MEMORY", memory_bytes());
    limit_[1] = environment("KVPAGER_SHIM_PINNED", memory_bytes());
    configure_shared_memory();
  }

  // --- memory ---

  int allocate(int64_t bytes, bool pinned, void** memory) {
    if (bytes <= 0) return kInvalidValue;
    if (const int code = unsupported_while_capturing()) return code;
    if (bytes > limit_[pinned] - used_[pinned]) return device::kOutOfMemory;
    void* base = nullptr;
    if (posix_memalign(&base, 256, static_cast<size_t>(bytes)) != 0) return device::kOutOfMemory;
    std::memset(base, kPoison, static_cast<size_t>(bytes));
    allocations_[static_cast<std::byte*>(base)] = {bytes, pinned};
    used_[pinned] += bytes;
    *memory = base;
    return device::kOk;
  }

  int release(void* memory, bool pinned) {
    if (const int code = unsupported_while_capturing()) return code;
    const auto it = allocations_.find(static_cast<std::byte*>(memory));
    if (it == allocations_.end()) die("memory is released that was not allocated, or twice");
    if (it->second.pinned != pinned)
      die("pinned memory is released as the device's, or the reverse");
    const Range range{it->first, it->second.bytes};
    for (const Stream* stream : streams_) {
      for (const Entry& entry : stream->queue) {
        for (const Range& use : entry.work.uses) {
          if (use.overlaps(range)) die("memory is released that unfinished work reads or writes");
        }
      }
    }
    used_[pinned] -= range.bytes;
    allocations_.erase(it);
    std::free(memory);
    return device::kOk;
  }

  // The allocation that holds the address, or end().
  std::map<const std::byte*, Allocation>::const_iterator holder(const std::byte* at) const {
    auto it = allocations_.upper_bound(at);
    if (it == allocations_.begin()) return allocations_.end();
    --it;
    return at < it->first + it->second.bytes ? it : allocations_.end();
  }

  // Memory allocated elsewhere is torch's: on the shim its CPU tensors are the device's.
  void check(const Range& range, bool may_be_pinned) const {
    const auto it = holder(range.begin);
    if (it == allocations_.end()) return;
    if (range.begin + range.bytes > it->first + it->second.bytes) {
      die("a copy or fill runs past the end of its memory");
    }
    if (it->second.pinned && !may_be_pinned) die("a copy's direction is not that of its memory");
  }

  // --- streams and events ---

  Stream* stream(void* handle) {
    const auto it = by_handle_.find(handle);
    if (it != by_handle_.end()) {
      if (it->second->destroyed) die("a stream is used after it was destroyed");
      return it->second.get();
    }
    auto fresh = std::make_unique<Stream>();
    Stream* const result = fresh.get();
    by_handle_[handle] = std::move(fresh);
    streams_.push_back(result);
    return result;
  }

  void* make_stream() {
    auto fresh = std::make_unique<Stream>();
    fresh->made_here = true;
    Stream* const result = fresh.get();
    by_handle_[result] = std::move(fresh);
    streams_.push_back(result);
    return result;
  }

  int destroy(void* handle) {
    Stream* const gone = stream(handle);
    if (!gone->made_here) die("a stream is destroyed that was not created here");
    if (gone->capture) return invalidate(gone->capture, kCaptureUnsupported);
    gone->destroyed = true;  // the handle is never given out again
    settle();
    return device::kOk;
  }

  int add(void* handle, Work work) {
    Stream* const to = stream(handle);
    if (to->capture) {
      if (to->capture->invalid) return kCaptureInvalidated;
      to->capture->nodes.push_back({std::move(work), to->tail});
      to->tail = {to->capture->nodes.size() - 1};
      return device::kOk;
    }
    Entry entry;
    entry.work = std::move(work);
    return add(to, std::move(entry));
  }

  int record(Event* event, void* handle) {
    Stream* const at = stream(handle);
    auto mark = std::make_shared<Mark>();
    mark->stream = at;
    if (at->capture) {
      if (at->capture->invalid) return kCaptureInvalidated;
      mark->captured = true;
      mark->capture = at->capture;
      mark->nodes = at->tail;
      event->mark = std::move(mark);
      return device::kOk;
    }
    event->mark = mark;
    Entry entry;
    entry.kind = Entry::Kind::kRecord;
    entry.mark = std::move(mark);
    return add(at, std::move(entry));
  }

  int wait(void* handle, const Event* event) {
    Stream* const waiter = stream(handle);
    const std::shared_ptr<Mark>& mark = event->mark;
    if (waiter->capture) {
      if (waiter->capture->invalid) return kCaptureInvalidated;
      if (!mark || !mark->captured || mark->capture.lock() != waiter->capture) {
        return invalidate(waiter->capture, kCaptureIsolation);
      }
      waiter->tail.insert(waiter->tail.end(), mark->nodes.begin(), mark->nodes.end());
      return device::kOk;
    }
    if (!mark || mark->done) return device::kOk;
    if (mark->captured) {
      const std::shared_ptr<Capture> capture = mark->capture.lock();
      if (!capture) return kCapturedEvent;
      if (capture->invalid) return kCaptureInvalidated;
      waiter->capture = capture;
      waiter->tail = mark->nodes;
      return device::kOk;
    }
    Entry entry;
    entry.kind = Entry::Kind::kWait;
    entry.mark = mark;
    return add(waiter, std::move(entry));
  }

  int done(const Event* event, bool* yes) {
    if (const int code = unsupported_while_capturing()) return code;
    Mark* const mark = event->mark.get();
    if (mark && mark->captured) return kCapturedEvent;
    if (mark && !mark->done) {
      adversary();
      if (!mark->done && ++mark->queries % kPatience == 0) force(*mark);
    }
    *yes = !mark || mark->done;
    return device::kOk;
  }

  int synchronize(const Event* event) {
    if (const int code = unsupported_while_capturing()) return code;
    const std::shared_ptr<Mark> mark = event->mark;
    if (mark && mark->captured) return kCapturedEvent;
    if (mark) force(*mark);
    return device::kOk;
  }

  // --- graphs ---

  int begin_capture(void* handle) {
    Stream* const origin = stream(handle);
    if (origin->capture) return kInvalidValue;
    origin->capture = std::make_shared<Capture>();
    origin->capture->origin = origin;
    origin->tail.clear();
    return device::kOk;
  }

  int end_capture(void* handle, void** graph) {
    *graph = nullptr;
    Stream* const origin = stream(handle);
    const std::shared_ptr<Capture> capture = origin->capture;
    if (!capture || capture->origin != origin) return kInvalidValue;
    std::vector<bool> joined(capture->nodes.size(), false);
    std::vector<size_t> open = origin->tail;
    while (!open.empty()) {
      const size_t node = open.back();
      open.pop_back();
      if (joined[node]) continue;
      joined[node] = true;
      const std::vector<size_t>& after = capture->nodes[node].after;
      open.insert(open.end(), after.begin(), after.end());
    }
    for (Stream* each : streams_) {
      if (each->capture != capture) continue;
      each->capture = nullptr;
      each->tail.clear();
    }
    if (capture->invalid) return kCaptureInvalidated;
    if (std::find(joined.begin(), joined.end(), false) != joined.end()) return kCaptureUnjoined;
    *graph = new Graph(std::make_shared<const std::vector<Node>>(std::move(capture->nodes)));
    return device::kOk;
  }

  int replay(const Graph& graph, void* handle) {
    // Nodes begin when those before them are done, and end in an order of the scheduler's choice.
    struct Progress {
      std::vector<size_t> waits;  // of each node: how many before it are unfinished
      std::vector<size_t> ready;
    };
    const auto progress = std::make_shared<Progress>();
    Work work;
    for (const Node& node : *graph) {
      work.uses.insert(work.uses.end(), node.work.uses.begin(), node.work.uses.end());
    }
    const auto begin = [graph, progress](size_t node) {
      if ((*graph)[node].work.begin) (*graph)[node].work.begin();
      progress->ready.push_back(node);
    };
    work.begin = [graph, progress, begin] {
      progress->ready.clear();
      progress->waits.clear();
      for (const Node& node : *graph) progress->waits.push_back(node.after.size());
      for (size_t node = 0; node < graph->size(); ++node) {
        if (progress->waits[node] == 0) begin(node);
      }
    };
    work.end = [this, graph, progress, begin] {
      while (!progress->ready.empty()) {
        const size_t at = draw(progress->ready.size());
        const size_t node = progress->ready[at];
        progress->ready.erase(progress->ready.begin() + static_cast<ptrdiff_t>(at));
        (*graph)[node].work.end();
        for (size_t next = node + 1; next < graph->size(); ++next) {
          const std::vector<size_t>& after = (*graph)[next].after;
          const auto times = std::count(after.begin(), after.end(), node);
          if (times == 0) continue;
          progress->waits[next] -= static_cast<size_t>(times);
          if (progress->waits[next] == 0) begin(next);
        }
      }
    };
    return add(handle, std::move(work));
  }

  int64_t unfinished() const {
    int64_t count = 0;
    for (const Stream* stream : streams_) {
      for (const Entry& entry : stream->queue) count += entry.kind == Entry::Kind::kWork;
    }
    return count;
  }

  void drain() {
    while (run_any()) {
    }
  }

 private:
  int add(Stream* to, Entry entry) {
    to->queue.push_back(std::move(entry));
    settle();
    if (to->made_here) {
      adversary();
    } else {
      finish(to);
    }
    return device::kOk;
  }

  // Lets everything happen that takes no time: waits that are over, recordings that are reached,
  // beginnings.
  void settle() {
    for (bool changed = true; changed;) {
      changed = false;
      streams_.erase(std::remove_if(streams_.begin(), streams_.end(),
                                    [](const Stream* stream) {
                                      return stream->destroyed && stream->queue.empty();
                                    }),
                     streams_.end());
      for (Stream* stream : streams_) {
        while (!stream->queue.empty()) {
          Entry& head = stream->queue.front();
          if (head.kind == Entry::Kind::kWork) {
            if (!head.begun && head.work.begin) head.work.begin();
            head.begun = true;
            break;
          }
          if (head.kind == Entry::Kind::kWait && !head.mark->done) break;
          if (head.kind == Entry::Kind::kRecord) head.mark->done = true;
          stream->queue.pop_front();
          changed = true;
        }
      }
    }
  }

  void run_head(Stream* stream) {
    // In the queue while it runs: a kernel that runs is unfinished.
    stream->queue.front().work.end();
    stream->queue.pop_front();
    settle();
  }

  // Runs one piece of work that the head of the stream needs, or is.
  void step(Stream* stream) {
    while (stream->queue.front().kind == Entry::Kind::kWait) {
      stream = stream->queue.front().mark->stream;
    }
    run_head(stream);
  }

  void force(const Mark& mark) {
    while (!mark.done) {
      adversary();
      if (!mark.done) step(mark.stream);
    }
  }

  void finish(Stream* stream) {
    while (!stream->queue.empty()) {
      adversary();
      if (!stream->queue.empty()) step(stream);
    }
  }

  bool run_any() {
    std::vector<Stream*> ready;
    for (Stream* stream : streams_) {
      if (!stream->queue.empty() && stream->queue.front().kind == Entry::Kind::kWork) {
        ready.push_back(stream);
      }
    }
    if (ready.empty()) return false;
    run_head(ready[draw(ready.size())]);
    return true;
  }

  void adversary() {
    while (draw(16) < eagerness_ && run_any()) {
    }
  }

  size_t draw(size_t below) {
    random_ += 0x9E3779B97F4A7C15u;
    uint64_t z = random_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return static_cast<size_t>((z ^ (z >> 31)) % below);
  }

  static int invalidate(const std::shared_ptr<Capture>& capture, int code) {
    capture->invalid = true;
    return code;
  }

  // As torch captures: such calls fail from any stream, and the capture with them.
  int unsupported_while_capturing() {
    int code = device::kOk;
    for (const Stream* stream : streams_) {
      if (stream->capture) code = invalidate(stream->capture, kCaptureUnsupported);
    }
    return code;
  }

  std::mutex mutex_;
  uint64_t random_ = 0;
  uint64_t eagerness_ = 0;
  int64_t limit_[2] = {};
  int64_t used_[2] = {};  // device, pinned
  std::map<const std::byte*, Allocation> allocations_;
  std::unordered_map<void*, std::unique_ptr<Stream>> by_handle_;
  std::vector<Stream*> streams_;  // but those destroyed with nothing left to do
};

Work transfer(Range to, std::vector<Range> uses, std::function<void()> end) {
  Work work;
  work.begin = [to] {
    std::memset(const_cast<std::byte*>(to.begin), kPoison, static_cast<size_t>(to.bytes));
  };
  work.end = std::move(end);
  work.uses = std::move(uses);
  return work;
}

}  // namespace

const char* error_text(int code) {
  switch (code) {
    case device::kOk:
      return "no error";
    case device::kNoDevice:
      return "no such device";
    case device::kOutOfMemory:
      return "out of memory";
    case kInvalidValue:
      return "invalid argument";
    case kCaptureUnsupported:
      return "operation not permitted while a stream is capturing";
    case kCaptureInvalidated:
      return "the capture failed because of an earlier error";
    case kCaptureUnjoined:
      return "a stream that joined the capture was not waited for";
    case kCaptureIsolation:
      return "a capturing stream was to wait for work outside the capture";
    case kCapturedEvent:
      return "the event was recorded in a capturing stream";
    default:
      return "unknown error";
  }
}

int64_t configure_shared_memory() {
  const int64_t bytes = environment("KVPAGER_SHIM_SHARED", kMaxSharedBytes);
  set_shared_limit(bytes);
  return bytes;
}

int64_t memory_bytes() { return int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE); }

void configure() {
  Runtime& runtime = Runtime::get();
  const Runtime::Lock lock(runtime);
  runtime.configure();
}

int enqueue(void* stream, std::function<void()> work, const void* params, size_t params_bytes) {
  Runtime& runtime = Runtime::get();
  const Runtime::Lock lock(runtime);
  Work launch;
  launch.end = std::move(work);
  for (size_t at = 0; at + sizeof(void*) <= params_bytes; at += sizeof(void*)) {
    std::byte* word = nullptr;
    std::memcpy(&word, static_cast<const std::byte*>(params) + at, sizeof(word));
    launch.uses.push_back({word, 1});
  }
  return runtime.add(stream, std::move(launch));
}

int allocate(int64_t bytes, bool pinned, void** memory) {
  Runtime& runtime = Runtime::get();
  const Runtime::Lock lock(runtime);
  return runtime.allocate(bytes, pinned, memory);
}

int release(void* memory, bool pinned) {
  Runtime& runtime = Runtime::get();
  const Runtime::Lock lock(runtime);
  return runtime.release(memory, pinned);
}

int create_stream(device::Stream* stream) {
  Runtime& runtime = Runtime::get();
  const Runtime::Lock lock(runtime);
  *stream = runtime.make_stream();
  return device::kOk;
}

int destroy_stream(device::Stream stream) {
  Runtime& runtime = Runtime::get();
  const Runtime::Lock lock(runtime);
  return runtime.destroy(stream);
}

int create_event(device::Event* event) {
  *event = new Event;
  return device::kOk;
}

int destroy_event(device::Event event) {
  Runtime& runtime = Runtime::get();
  const Runtime::Lock lock(runtime);
  delete static_cast<Event*>(event);
  return device::kOk;
}

int record(device::Event event, device::Stream stream) {
  Runtime& runtime = Runtime::get();
  const Runtime::Lock lock(runtime);
  return runtime.record(static_cast<Event*>(event), stream);
}

int wait(device::Stream stream, device::Event event) {
  Runtime& runtime = Runtime::get();
  const Runtime::Lock lock(runtime);
  return runtime.wait(stream, static_cast<Event*>(event));
}

int done(device::Event event, bool* yes) {
  Runtime& runtime = Runtime::get();
  const Runtime::Lock lock(runtime);
  return runtime.done(static_cast<Event*>(event), yes);
}

int synchronize(device::Event event) {
  Runtime& runtime = Runtime::get();
  const Runtime::Lock lock(runtime);
  return runtime.synchronize(static_cast<Event*>(event));
}

int capturing(device::Stream stream, bool* yes) {
  Runtime& runtime = Runtime::get();
  const Runtime::Lock lock(runtime);
  *yes = runtime.stream(stream)->capture != nullptr;
  return device::kOk;
}

int copy(void* to, const void* from, int64_t bytes, device::Direction direction,
         device::Stream stream) {
  if (bytes < 0) return kInvalidValue;
  if (bytes == 0) return device::kOk;
  Runtime& runtime = Runtime::get();
  const Runtime::Lock lock(runtime);
  const Range target{static_cast<std::byte*>(to), bytes};
  const Range source{static_cast<const std::byte*>(from), bytes};
  runtime.check(target, direction == device::Direction::kDown);
  runtime.check(source, direction == device::Direction::kUp);
  if (target.overlaps(source)) die("a copy's source and destination overlap");
  return runtime.add(stream, transfer(target, {target, source}, [to, from, bytes] {
                       std::memcpy(to, from, static_cast<size_t>(bytes));
                     }));
}

// One piece of work: they begin and end together.
int copy_pieces(const device::Pieces* runs, int64_t count, device::Direction direction,
                device::Stream stream) {
  Runtime& runtime = Runtime::get();
  const Runtime::Lock lock(runtime);
  std::vector<Work> each;
  Work all;
  for (const device::Pieces* run = runs; run != runs + count; ++run) {
    const int64_t bytes = run->bytes;
    if (bytes < 0 || run->count < 0 || run->to_stride < bytes || run->from_stride < bytes) {
      return kInvalidValue;
    }
    for (int64_t i = 0; bytes > 0 && i < run->count; ++i) {
      std::byte* const to = static_cast<std::byte*>(run->to) + i * run->to_stride;
      const std::byte* const from = static_cast<const std::byte*>(run->from) + i * run->from_stride;
      const Range target{to, bytes};
      const Range source{from, bytes};
      runtime.check(target, direction == device::Direction::kDown);
      runtime.check(source, direction == device::Direction::kUp);
      if (target.overlaps(source)) die("a copy's source and destination overlap");
      each.push_back(transfer(target, {target, source}, [to, from, bytes] {
        std::memcpy(to, from, static_cast<size_t>(bytes));
      }));
      all.uses.insert(all.uses.end(), each.back().uses.begin(), each.back().uses.end());
    }
  }
  if (each.empty()) return device::kOk;
  all.begin = [each] {
    for (const Work& work : each) work.begin();
  };
  all.end = [each] {
    for (const Work& work : each) work.end();
  };
  return runtime.add(stream, std::move(all));
}

int fill(void* to, int32_t byte, int64_t bytes, device::Stream stream) {
  if (bytes < 0) return kInvalidValue;
  if (bytes == 0) return device::kOk;
  Runtime& runtime = Runtime::get();
  const Runtime::Lock lock(runtime);
  const Range target{static_cast<std::byte*>(to), bytes};
  runtime.check(target, false);
  return runtime.add(stream, transfer(target, {target}, [to, byte, bytes] {
                       std::memset(to, byte, static_cast<size_t>(bytes));
                     }));
}

}  // namespace kvpager::shim

using kvpager::shim::Graph;
using kvpager::shim::Runtime;

int kvpager_shim_begin_capture(void* stream) {
  Runtime& runtime = Runtime::get();
  const Runtime::Lock lock(runtime);
  return runtime.begin_capture(stream);
}

int kvpager_shim_end_capture(void* stream, void** graph) {
  Runtime& runtime = Runtime::get();
  const Runtime::Lock lock(runtime);
  return runtime.end_capture(stream, graph);
}

int kvpager_shim_replay(void* graph, void* stream) {
  Runtime& runtime = Runtime::get();
  const Runtime::Lock lock(runtime);
  return runtime.replay(*static_cast<const Graph*>(graph), stream);
}

int kvpager_shim_release(void* graph) {
  Runtime& runtime = Runtime::get();
  const Runtime::Lock lock(runtime);
  delete static_cast<Graph*>(graph);
  return kvpager::device::kOk;
}

int64_t kvpager_shim_unfinished() {
  Runtime& runtime = Runtime::get();
  const Runtime::Lock lock(runtime);
  return runtime.unfinished();
}

void kvpager_shim_drain() {
  Runtime& runtime = Runtime::get();
  const Runtime::Lock lock(runtime);
  runtime.drain();
}
