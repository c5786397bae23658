#include "small_pager.h"

namespace kvpager::pager_test {
namespace {

PAGER_TEST(
    "trimming to every position keeps exactly what was before it, and the rest can be written "
    "anew") {
  for (int64_t position = 0; position <= 53; ++position) {
    CAPTURE(position);
    Pager pager(small_options(6, 16));
    Known sequence = create(pager, 53, 1);
    trim(pager, &sequence, position);
    require_intact(pager, sequence);
    CHECK(static_cast<int64_t>(pager.ledger(sequence.id).size()) == (position + 15) / 16);
    append(pager, &sequence, some_tokens(30, 2));
    require_intact(pager, sequence);
  }
}

PAGER_TEST("positions outside the sequence are refused and change nothing") {
  Pager pager(small_options(6, 16));
  const Known sequence = create(pager, 40, 1);
  for (const int64_t position : {int64_t{-1}, int64_t{41}, int64_t{1} << 40}) {
    CHECK(
        contains(error_of<InvalidArgumentError>(pager, [&] { pager.trim(sequence.id, position); }),
                 str("trim position: ", position, " is not in [0, 40]")));
    require_intact(pager, sequence);
  }
  pager.trim(sequence.id, 40);
  require_intact(pager, sequence);
}

PAGER_TEST("trimming inside a shared chunk never changes what the others see") {
  Pager pager(small_options(8, 16));
  const Known parent = create(pager, 50, 1);
  for (const int64_t position : {int64_t{0}, int64_t{10}, int64_t{16}, int64_t{40}, int64_t{49}}) {
    Known child = forked(pager, parent);
    trim(pager, &child, position);
    append(pager, &child, some_tokens(20, static_cast<uint64_t>(position)));
    require_intact(pager, child);
    require_intact(pager, parent);
    pager.destroy_sequence(child.id);
  }
}

PAGER_TEST("trimming inside a chunk that is only on disk, or only evicted, brings its rows back") {
  const Folder folder;
  const int64_t memory = on_device() ? 6 : 4;  // there a forward's chunks are all in it
  Pager pager(small_options(memory, memory - 2, 16, folder.path()));
  for (const int64_t position : {int64_t{5}, int64_t{100}, int64_t{31}}) {
    Known sequence = create(pager, 130, 1);
    pager.evict_all();
    trim(pager, &sequence, position);
    require_intact(pager, sequence);
    append(pager, &sequence, some_tokens(20, 3));
    require_intact(pager, sequence);
    pager.destroy_sequence(sequence.id);
  }
}

PAGER_TEST("a trim whose chunk cannot be read, or finds no block, is refused and nothing is lost") {
  const Disarm disarm;
  const Folder folder;
  const int64_t blocks = on_device() ? 10 : 4;
  Pager pager(small_options(blocks, 0, 32, folder.path()));
  Known sequence = create(pager, 130, 1);
  pager.evict_all();
  fault::arm("disk.read", 0, EIO);
  CHECK(
      contains(error_of<StorageError>(pager, [&] { pager.trim(sequence.id, 5); }), "cannot read"));
  require_intact(pager, sequence);
  std::vector<Known> tails;
  for (int64_t i = 1; i <= blocks; ++i) tails.push_back(create(pager, 1, static_cast<uint64_t>(i)));
  with_every_home(pager);
  CHECK(contains(error_of<CapacityError>(pager, [&] { pager.trim(sequence.id, 5); }),
                 "trim: needs 1"));
  require_intact(pager, sequence);
  pager.trim(sequence.id, 128);  // at a boundary no block is needed
  pager.destroy_sequence(tails[0].id);
  trim(pager, &sequence, 5);
  require_intact(pager, sequence);
}

PAGER_TEST("a trim has the block of the open tail that it gives up, where no other can be had") {
  for (const int64_t position : {5, 21, 47}) {
    CAPTURE(position);
    Pager pager(small_options(6, 16));
    Known sequence = create(pager, 3 * 16 + 2, 1);
    const PinId own = pager.pin(sequence.id, 0, 3 * 16);
    std::vector<Known> tails;
    for (uint64_t i = 1; i <= 2; ++i) tails.push_back(create(pager, 1, i));
    CHECK(pager.stats().free_blocks == 0);
    trim(pager, &sequence, position);
    require_intact(pager, sequence);
    for (const Known& tail : tails) require_intact(pager, tail);
    pager.unpin(own);
    append(pager, &sequence, some_tokens(20, 3));
    require_intact(pager, sequence);
  }
}

PAGER_TEST("a trimmed sequence's homes are free for others, its cached chunks findable") {
  Pager pager(small_options(4, 6));
  Known a = create(pager, 6 * 16, 1);
  const std::vector<TokenId> tokens = a.tokens;
  pager.trim(a.id, 16);
  CHECK(pager.stats().cached_records == 5);
  Known b = create(pager);
  CHECK(pager.adopt_prefix(b.id, tokens) == 6 * 16);
  b.tokens = tokens;
  require_intact(pager, b);
  pager.trim(b.id, 0);
  Known c = create(pager, 5 * 16, 2);
  require_intact(pager, c);
}

}  // namespace
}  // namespace kvpager::pager_test
