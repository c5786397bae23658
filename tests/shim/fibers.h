// Runs the blocks of a launch on the calling host thread: one fiber per thread of a block.
//
// A fiber runs until it waits: at sync_block, or at a warp collective (sync_warp, shuffles, ballot,
// matrix loads and products). The fibers of a warp are swept in a random order, a new one after each
// rendezvous. A warp runs until all its threads wait at a block barrier or have returned, and sometimes
// makes way for another at a warp collective. Warps, blocks and the readiness to make way are drawn
// from the launch's seed, so that a missing barrier shows in some seeds. Kernels must not wait for
// other warps or blocks in any other way.
//
// Aborts, with a message that names the source line: threads of a warp at different collectives, a
// collective some threads of the warp never reach, addresses that are misaligned or not in shared
// memory where they have to be, bytes written outside of shared memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvpager::shim {

struct Place {
  const char* file;
  int line;
};

enum class Collective : uint8_t {
  kNone,
  kSyncBlock,
  kSyncWarp,
  kShuffle,
  kBallot,
  kLoadMatrix,
  kLoadMatrixTransposed,
  kMmaBFloat16,
  kMmaFloat16,
  kMmaUint8,
};

inline constexpr int kWarp = 32;

struct Machine;
struct Warp;

// One asynchronous copy of 16 bytes; it happens when its group has to be complete.
struct AsyncCopy {
  unsigned char* to;
  const unsigned char* from;
  bool valid;
  uint32_t group;
};

// One thread of the running block.
struct Lane {
  int thread = 0;
  int lane = 0;
  int threads = 0;  // of the block
  int64_t block = 0, blocks = 0;
  unsigned char* shared = nullptr;
  int64_t shared_bytes = 0;
  Warp* warp = nullptr;
  Machine* machine = nullptr;

  std::vector<AsyncCopy> copies;
  size_t copies_done = 0;    // copies[0, copies_done) have happened
  uint32_t copy_groups = 0;  // committed

  void* stack_pointer = nullptr;
  void* stack = nullptr;
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;  // AddressSanitizer's
};

// What the lanes of a warp bring to a collective and take from it, and how far its sweep is.
struct Warp {
  Lane* lanes = nullptr;  // [kWarp]
  int index = 0;

  const uint8_t* order = nullptr;  // lanes are swept as order[i] ^ flip
  uint8_t flip = 0;
  int swept = 0;          // of `order`
  uint32_t arrived = 0;   // bit per lane
  uint32_t returned = 0;  // bit per lane
  uint32_t barriers = 0;  // sync_warp passed, of all launches
  Collective kind = Collective::kNone;
  Place place{};

  uint64_t values[kWarp];
  uint64_t results[kWarp];
  uint8_t sources[kWarp];
  struct {
    uint32_t* out;
    const void* row;
  } matrix[kWarp];
  struct {
    void* d;  // float[4], or int32_t[4] of kMmaUint8
    const uint32_t* a;
    uint32_t b[2];
  } product[kWarp];
};

// The thread that runs now; null outside of kernels. The whole launch stays on one host thread.
extern __thread Lane* current __attribute__((tls_model("initial-exec")));

// Has every live lane of the warp arrive here (for kSyncBlock: of the block) before any goes on.
void collect(Collective kind, Place place);

uint64_t exchange(uint64_t value, int source, Place place);
uint32_t vote(bool yes, Place place);
void load_matrix(uint32_t* out, const void* row, bool transposed, Place place);
void multiply(void* d, const uint32_t* a, uint32_t b0, uint32_t b1, Collective kind, Place place);

void copy_async(void* shared, const void* global, bool valid, Place place);
void commit_copies();
void wait_copies(uint32_t pending);

// What a complete collective does; called by its last lane.
void perform(Warp& warp);
// Prints where in the launch it happened, and aborts.
[[noreturn]] void fail(const Warp& warp, const char* format, ...)
    __attribute__((format(printf, 2, 3)));
// 16 bytes in the block's shared memory, aligned.
void check_shared(const Lane& lane, const void* address, Place place, const char* what);

struct Launch {
  int64_t blocks = 0;
  int threads = 0;
  int64_t shared_bytes = 0;
  void (*body)(const void* closure) = nullptr;  // the kernel, for the current thread
  const void* kernel = nullptr;                 // its address, for reports; may be null
  const void* closure = nullptr;
};

inline constexpr int kInvalidLaunch = 1;
inline constexpr int kMultiprocessors = 3;              // few, so that persistent blocks go round
inline constexpr int64_t kMaxSharedBytes = 227 * 1024;  // per block, of sm_90 and sm_100

bool is_valid(int64_t blocks, int threads, int64_t shared_bytes);
// What is valid from now on: shared memory of a block, kMaxSharedBytes to begin with.
void set_shared_limit(int64_t bytes);
// The order in which things happen is a function of the seed (and of the launch) alone.
void run_blocks(const Launch& launch, uint64_t seed);
// Another seed for each launch, drawn from KVPAGER_SHIM_SEED or what set_seed was given since.
uint64_t next_seed();
void set_seed(uint64_t seed);

}  // namespace kvpager::shim
