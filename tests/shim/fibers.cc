#include "shim/fibers.h"

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>

#include "base/float_environment.h"
#include "shim/races.h"
#include "shim/switch.h"

#if defined(__SANITIZE_ADDRESS__)
#define KVP_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVP_ASAN 1
#endif
#endif
#ifdef KVP_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

namespace kvpager::shim {

__thread Lane* current = nullptr;

namespace {

#ifdef KVP_ASAN
constexpr size_t kStackBytes = 256 * 1024;  // redzones around every variable
constexpr size_t kCanaryBytes = 0;          // the redzones of malloc do better
#else
constexpr size_t kStackBytes = 64 * 1024;
constexpr size_t kCanaryBytes = 128;
#endif
constexpr unsigned char kCanary = 0xA5;

struct Random {
  uint64_t state;

  uint64_t next() {  // SplitMix64
    uint64_t z = (state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  uint64_t below(uint64_t bound) { return next() % bound; }
};

// Orders of lanes, drawn once; each is used with all 32 flips.
constexpr int kOrders = 128;
using Orders = std::array<std::array<uint8_t, kWarp>, kOrders>;

const Orders& orders() {
  static const Orders table = [] {
    Orders made;
    Random random{1};
    for (std::array<uint8_t, kWarp>& order : made) {
      std::iota(order.begin(), order.end(), uint8_t{0});
      for (uint64_t i = kWarp - 1; i > 0; --i) std::swap(order[i], order[random.below(i + 1)]);
    }
    return made;
  }();
  return table;
}

const char* name_of(Collective kind) {
  switch (kind) {
    case Collective::kNone:
      return "nothing";
    case Collective::kSyncBlock:
      return "sync_block";
    case Collective::kSyncWarp:
      return "sync_warp";
    case Collective::kShuffle:
      return "a shuffle";
    case Collective::kBallot:
      return "ballot";
    case Collective::kLoadMatrix:
      return "load_matrix_x4";
    case Collective::kLoadMatrixTransposed:
      return "load_matrix_x4_trans";
    case Collective::kMmaBFloat16:
      return "mma_bfloat16";
    case Collective::kMmaFloat16:
      return "mma_float16";
    case Collective::kMmaUint8:
      return "mma_uint8";
  }
  return "?";
}

// The stacks of one warp, each above a page that cannot be touched.
class Stacks {
 public:
  Stacks() : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    memory_ = static_cast<unsigned char*>(mmap(nullptr, bytes(), PROT_READ | PROT_WRITE,
                                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (memory_ == MAP_FAILED) {
      std::perror("shim: no memory for the stacks of a warp");
      std::abort();
    }
    for (size_t i = 0; i < kWarp; ++i) mprotect(memory_ + i * stride(), page_, PROT_NONE);
  }
  ~Stacks() { munmap(memory_, bytes()); }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  void* bottom(size_t lane) const { return memory_ + lane * stride() + page_; }

 private:
  size_t stride() const { return kStackBytes + page_; }
  size_t bytes() const { return kWarp * stride(); }

  size_t page_;
  unsigned char* memory_;
};

}  // namespace

// The warps of one host thread and the launch they are running.
struct Machine {
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<std::unique_ptr<Lane[]>> lanes;
  std::vector<std::unique_ptr<Stacks>> stacks;

  const Launch* launch = nullptr;
  Random random{0};
  uint32_t make_way = 0;  // of 2^16 rendezvous, after how many another warp may go on
  int64_t block = 0;
  std::vector<Warp*> ready;    // at the start of a sweep
  std::vector<Warp*> waiting;  // at sync_block
  Lane host;                   // where run_blocks goes on

  void grow(int threads);
  void run(const Launch& what, uint64_t seed);
  void run_block(int64_t index);
  void start_sweep(Warp& warp);
  Lane* next_in_sweep(Warp& warp);
  Lane* end_sweep(Warp& warp);
  void pass(Lane& self);
  void switch_to(Lane& from, Lane& to);
};

namespace {

// What a fiber does for as long as it lives: its thread of one block after the other.
void run_threads() {
#ifdef KVP_ASAN
  const void* bottom = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  Lane& host = current->machine->host;
  if (host.stack == nullptr) {  // the machine's first fiber, started by the host thread
    host.stack = const_cast<void*>(bottom);
    host.stack_bytes = bytes;
  }
#endif
  for (;;) {
    Lane& self = *current;
    const Launch& launch = *self.machine->launch;
    launch.body(launch.closure);
    self.warp->returned |= 1u << self.lane;
    self.copies.clear();
    self.copies_done = 0;
    self.copy_groups = 0;
    self.machine->pass(self);
  }
}

}  // namespace

void Machine::grow(int threads) {
  while (static_cast<int>(warps.size()) * kWarp < threads) {
    const int index = static_cast<int>(warps.size());
    stacks.push_back(std::make_unique<Stacks>());
    lanes.push_back(std::make_unique<Lane[]>(kWarp));
    warps.push_back(std::make_unique<Warp>());
    Warp& warp = *warps.back();
    warp.lanes = lanes.back().get();
    warp.index = index;
    for (int i = 0; i < kWarp; ++i) {
      Lane& lane = warp.lanes[i];
      lane.lane = i;
      lane.thread = index * kWarp + i;
      lane.warp = &warp;
      lane.machine = this;
      lane.stack = stacks.back()->bottom(static_cast<size_t>(i));
      lane.stack_bytes = kStackBytes;
      // Stacks a power of two apart would share the sets of the cache.
      const int stagger = (lane.thread * 5 % 64) * 64;
      unsigned char* const top = static_cast<unsigned char*>(lane.stack) + kStackBytes - stagger;
      lane.stack_pointer = prepare_stack(top, lane.stack, run_threads);
    }
  }
}

void Machine::start_sweep(Warp& warp) {
  const uint64_t draw = random.next();
  warp.order = orders()[draw % kOrders].data();
  warp.flip = static_cast<uint8_t>((draw >> 8) % kWarp);
  warp.swept = 0;
  warp.arrived = 0;
  warp.kind = Collective::kNone;
}

Lane* Machine::next_in_sweep(Warp& warp) {
  while (warp.swept < kWarp) {
    const int lane = warp.order[warp.swept++] ^ warp.flip;
    if ((warp.returned >> lane & 1u) == 0) return &warp.lanes[lane];
  }
  return nullptr;
}

// Every live lane of the warp has arrived somewhere. Returns who runs next, null after the block.
Lane* Machine::end_sweep(Warp& warp) {
  if (warp.arrived == 0 || warp.kind == Collective::kSyncBlock) {
    for (Warp*& other : ready) {
      if (other != &warp) continue;
      other = ready.back();
      ready.pop_back();
      break;
    }
    if (warp.arrived != 0) waiting.push_back(&warp);
    if (ready.empty()) {  // the barrier opens
      if (kFindsRaces) note_block_barrier();
      ready.swap(waiting);
      for (Warp* other : ready) start_sweep(*other);
    }
    if (ready.empty()) return nullptr;
    return next_in_sweep(*ready[random.below(ready.size())]);
  }
  if (warp.returned != 0) {
    fail(warp, "lanes 0x%08x wait at %s (%s:%d), the others have returned", warp.arrived,
         name_of(warp.kind), warp.place.file, warp.place.line);
  }
  perform(warp);
  start_sweep(warp);
  if (make_way != 0 && (random.state >> 40 & 0xFFFFu) < make_way) {
    return next_in_sweep(*ready[random.below(ready.size())]);
  }
  return next_in_sweep(warp);
}

void Machine::switch_to(Lane& from, Lane& to) {
  current = &to == &host ? nullptr : &to;
#ifdef KVP_ASAN
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.stack_bytes);
#endif
  switch_stack(&from.stack_pointer, to.stack_pointer);
#ifdef KVP_ASAN
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

// The lane has arrived at a collective or returned; comes back when it may go on.
void Machine::pass(Lane& self) {
  Lane* next = next_in_sweep(*self.warp);
  if (next == nullptr) next = end_sweep(*self.warp);
  if (next == nullptr) next = &host;
  if (next != &self) switch_to(self, *next);
}

void Machine::run_block(int64_t index) {
  block = index;
  const size_t bytes = static_cast<size_t>(launch->shared_bytes);
  void* memory = nullptr;
  if (posix_memalign(&memory, 128, bytes + 2 * kCanaryBytes) != 0) {
    std::fprintf(stderr, "shim: no memory for the shared memory of a block\n");
    std::abort();
  }
  unsigned char* const shared = static_cast<unsigned char*>(memory) + kCanaryBytes;
  std::memset(memory, kCanary, kCanaryBytes);
  std::memset(shared, 0xFF, bytes);
  std::memset(shared + bytes, kCanary, kCanaryBytes);

  if (kFindsRaces) note_block_begins(launch->shared_bytes, launch->kernel);
  const int count = launch->threads / kWarp;
  ready.clear();
  waiting.clear();
  for (int i = 0; i < count; ++i) {
    Warp& warp = *warps[static_cast<size_t>(i)];
    warp.returned = 0;
    start_sweep(warp);
    for (int j = 0; j < kWarp; ++j) {
      Lane& lane = warp.lanes[j];
      lane.threads = launch->threads;
      lane.block = index;
      lane.blocks = launch->blocks;
      lane.shared = shared;
      lane.shared_bytes = launch->shared_bytes;
    }
    ready.push_back(&warp);
  }
  switch_to(host, *next_in_sweep(*ready[random.below(ready.size())]));

  for (size_t i = 0; i < kCanaryBytes; ++i) {
    if (static_cast<unsigned char*>(memory)[i] == kCanary && shared[bytes + i] == kCanary) continue;
    std::fprintf(stderr, "shim: block %lld wrote outside of its %zu bytes of shared memory\n",
                 static_cast<long long>(index), bytes);
    std::abort();
  }
  std::free(memory);
}

void Machine::run(const Launch& what, uint64_t seed) {
  if (launch != nullptr || current != nullptr) {
    std::fprintf(stderr, "shim: a kernel launched a kernel\n");
    std::abort();
  }
  const FloatEnvironment environment;
  launch = &what;
  random.state = seed;
  const uint32_t readiness[] = {0, 0x400, 0x4000, 0x10000};
  make_way = readiness[random.below(4)];
  grow(what.threads);
  // Blocks in the order start + i * step: a permutation, as step has no factor in common.
  const uint64_t blocks = static_cast<uint64_t>(what.blocks);
  uint64_t step = 1 + random.below(blocks);
  while (std::gcd(step, blocks) != 1) ++step;
  uint64_t at = random.below(blocks);
  for (uint64_t i = 0; i < blocks; ++i) {
    run_block(static_cast<int64_t>(at));
    at = (at + step) % blocks;
  }
  launch = nullptr;
}

namespace {

// KVPAGER_SHIM_WITHOUT=file.cu:123 leaves out the barrier of that line, so that tests can be asked
// whether they notice.
struct LeftOut {
  std::string file;
  int line = 0;
};

LeftOut read_left_out() {
  const char* const text = std::getenv("KVPAGER_SHIM_WITHOUT");
  const char* const colon = text == nullptr ? nullptr : std::strrchr(text, ':');
  if (colon == nullptr) return {};
  return {"/" + std::string(text, colon), std::atoi(colon + 1)};
}

const LeftOut left_out = read_left_out();

bool is_left_out(Place place) {
  if (place.line != left_out.line) return false;
  const std::string file = place.file;
  const size_t size = left_out.file.size();
  return file.size() >= size && file.compare(file.size() - size, size, left_out.file) == 0;
}

}  // namespace

void collect(Collective kind, Place place) {
  if (kind <= Collective::kSyncWarp && is_left_out(place)) return;
  Lane& self = *current;
  Warp& warp = *self.warp;
  if (warp.kind == Collective::kNone) {
    warp.kind = kind;
    warp.place = place;
  } else if (warp.kind != kind || warp.place.line != place.line) {
    fail(warp, "lanes 0x%08x wait at %s (%s:%d), lane %d at %s (%s:%d)", warp.arrived,
         name_of(warp.kind), warp.place.file, warp.place.line, self.lane, name_of(kind), place.file,
         place.line);
  }
  warp.arrived |= 1u << self.lane;
  self.machine->pass(self);
}

void fail(const Warp& warp, const char* format, ...) {
  const Machine& machine = *warp.lanes[0].machine;
  std::fprintf(stderr, "shim: block %lld of %lld, warp %d: ", static_cast<long long>(machine.block),
               static_cast<long long>(machine.launch->blocks), warp.index);
  std::va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
  std::abort();
}

namespace {

std::atomic<int64_t> shared_limit{kMaxSharedBytes};

}  // namespace

void set_shared_limit(int64_t bytes) { shared_limit.store(bytes, std::memory_order_relaxed); }

bool is_valid(int64_t blocks, int threads, int64_t shared_bytes) {
  return blocks > 0 && blocks <= INT32_MAX && threads > 0 && threads <= 1024 &&
         threads % kWarp == 0 && shared_bytes >= 0 &&
         shared_bytes <= shared_limit.load(std::memory_order_relaxed);
}

void run_blocks(const Launch& launch, uint64_t seed) {
  thread_local Machine machine;
  machine.run(launch, seed);
}

namespace {

std::atomic<uint64_t>& next_launch() {
  static std::atomic<uint64_t> state([] {
    const char* const text = std::getenv("KVPAGER_SHIM_SEED");
    return text == nullptr ? 1 : std::strtoull(text, nullptr, 10);
  }());
  return state;
}

}  // namespace

uint64_t next_seed() {
  // Far steps, so that neighbouring seeds do not give the same launches.
  return Random{next_launch().fetch_add(0xD1342543DE82EF95ull)}.next();
}

void set_seed(uint64_t seed) { next_launch().store(seed); }

}  // namespace kvpager::shim
