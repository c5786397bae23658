// Calls from several threads take turns: whatever the others do meanwhile, a forward's bits are its
// own.
#include <atomic>
#include <thread>

#include "small_pager.h"

namespace kvpager::pager_test {
namespace {

PAGER_TEST(
    "eviction, inspection and other sequences' changes beside a running forward change no bit") {
  // On a device a forward keeps the blocks it may read until it ends.
  PagerOptions options = small_options(on_device() ? 24 : 8, 64);
  options.threads = 2;
  options.recall_chunks = 2;
  Pager plain(options);
  Known expected_sequence = create(plain);
  std::vector<std::vector<float>> expected;
  for (uint64_t round = 0; round < 12; ++round) {
    expected.push_back(append(plain, &expected_sequence, some_tokens(20, round)));
  }

  Pager pager(options);
  Known sequence = create(pager);
  const Known bystander = create(pager, 50, 99);
  std::atomic<bool> done{false};
  std::thread evictor([&] {
    while (!done) {
      pager.evict_all();
      std::this_thread::yield();
    }
  });
  std::thread user([&] {
    std::vector<std::byte> k(50 * 128), v(50 * 128);
    while (!done) {
      pager.check_invariants();
      pager.stats();
      pager.ledger(bystander.id);
      pager.read_kv(bystander.id, 1, 0, 50, k.data(), v.data());
      const SequenceId child = pager.fork(bystander.id);
      pager.trim(child, 20);
      const PinId pin = pager.pin(child, 0, 16);
      pager.unpin(pin);
      pager.destroy_sequence(child);
      std::this_thread::yield();
    }
  });
  std::vector<std::vector<float>> outputs;
  for (uint64_t round = 0; round < 12; ++round) {
    outputs.push_back(append(pager, &sequence, some_tokens(20, round)));
  }
  done = true;
  evictor.join();
  user.join();
  for (size_t i = 0; i < expected.size(); ++i) CHECK(same_bits(outputs[i], expected[i]));
  require_intact(pager, sequence);
  require_intact(pager, bystander);
}

}  // namespace
}  // namespace kvpager::pager_test
