// What crosses the link, and that nothing of it shows in a bit.
#include "../device/devices.h"
#include "small_pager.h"

namespace kvpager::pager_test {
namespace {

std::vector<float> probe_on_processor(const PagerOptions& like, int64_t tokens, int64_t rows) {
  return on_processor(like,
                      [&](Pager& pager) { return probe(pager, written(pager, tokens, 1), rows); });
}

DEVICE_TEST("a clean chunk leaves the pool without a byte going down") {
  Pager pager(small_options(24, 40));
  const Known sequence = create(pager, 20 * 16, 1);
  probe(pager, sequence);
  const PagerStats before = pager.stats();
  CHECK(before.bytes_written_through == 20 * kChunkBytes);
  CHECK(before.bytes_copied_down >= 20 * kChunkBytes);
  CHECK(pager.evict_all() == 20);
  const PagerStats after = pager.stats();
  CHECK(after.bytes_copied_down == before.bytes_copied_down);
  CHECK(after.bytes_copied_up == before.bytes_copied_up);
  pager.pin(sequence.id, 0, 3 * 16);
  CHECK(pager.stats().bytes_copied_up == after.bytes_copied_up + 3 * kChunkBytes);
  CHECK(pager.stats().bytes_copied_down == after.bytes_copied_down);
  require_intact(pager, sequence);
}

DEVICE_TEST("dense attention through an eighth of the pool is dense attention, staged or in place" *
            doctest::test_suite("long")) {
  for (const char* mode : {"direct", "staged", "auto"}) {
    CAPTURE(mode);
    PagerOptions options = small_options(5, 80);
    options.missed_chunks = mode;
    Pager pager(options);
    const Known sequence = create(pager, 40 * 16, 1);
    const PagerStats before = pager.stats();
    CHECK(same_bits(probe(pager, sequence, 16), probe_on_processor(options, 40 * 16, 16)));
    CHECK(same_bits(probe(pager, sequence, 1), probe_on_processor(options, 40 * 16, 1)));
    const PagerStats after = pager.stats();
    const int64_t staged = after.slices_staged - before.slices_staged;
    CHECK(after.bytes_staged - before.bytes_staged == staged * small_layout().slice_bytes(0));
    // Two layers of the chunks that are not resident; one row of few queries reads them in place.
    if (std::string(mode) == "direct") CHECK(staged == 0);
    if (std::string(mode) == "staged") CHECK(staged >= 2 * 2 * 35);
  }
}

DEVICE_TEST("staging that holds a few of the missing chunks stages these, with the same bits") {
  PagerOptions options = small_options(5, 80);
  options.missed_chunks = "staged";
  options.staging_bytes = 2 * 7 * options.layout.slice_bytes(0);
  Pager pager(options);
  CHECK(pager.stats().staging_bytes == options.staging_bytes);
  const Known sequence = create(pager, 40 * 16, 1);
  const int64_t before = pager.stats().slices_staged;
  CHECK(same_bits(probe(pager, sequence, 16), probe_on_processor(options, 40 * 16, 16)));
  CHECK(pager.stats().slices_staged == before + 2 * 7);
}

DEVICE_TEST("what staging does not hold at once is brought in wave by wave, each slice once") {
  PagerOptions options = small_options(5, 200);
  options.missed_chunks = "staged";
  const int64_t slice = options.layout.slice_bytes(0);
  const int64_t tokens = 190 * 16;  // three groups of 64 chunks, less two
  for (const int64_t room : {64, 100, 130, 185}) {
    CAPTURE(room);
    options.staging_bytes = 2 * room * slice;
    Pager pager(options);
    const Known sequence = written(pager, tokens, 1);
    const auto chunks = pager.ledger(sequence.id);
    const auto missed = std::count_if(chunks.begin(), chunks.end(), [](const ChunkInfo& info) {
      return (info.tiers & kTierResident) == 0;
    });
    const PagerStats before = pager.stats();
    CHECK(same_bits(probe(pager, sequence, 16), probe_on_processor(options, tokens, 16)));
    const PagerStats after = pager.stats();
    CHECK(after.slices_staged - before.slices_staged == 2 * missed);  // two layers
    CHECK(after.bytes_staged - before.bytes_staged == 2 * missed * slice);
  }
}

DEVICE_TEST("sequences share waves, and what two of them have in common is staged once in a wave") {
  PagerOptions options = small_options(5, 400);
  options.missed_chunks = "staged";
  int64_t slices = 0;
  const auto run = [&](Pager& pager) {
    const Known first = written(pager, 30 * 16, 1);
    const Known fork = forked(pager, first);
    const Known second = written(pager, 80 * 16, 2);
    pager.evict_all();
    std::vector<RowDescriptor> rows;
    for (const Known* known : {&first, &fork, &second}) {
      const auto length = static_cast<int64_t>(known->tokens.size());
      for (int64_t i = 0; i < 5; ++i) {
        rows.push_back({known->id, length - 1 - 7 * i, 0, RowKind::kRead});
      }
    }
    rows.resize(kRows);
    const int64_t before = pager.stats().slices_staged;
    const std::vector<float> outputs = run_forward(pager, rows, second.tokens);
    slices = pager.stats().slices_staged - before;
    return outputs;
  };
  const std::vector<float> expected = on_processor(options, run);
  // The fork's chunks are in the first wave; of 64 slices it has room for 30, with the second's first
  // group it would have 94.
  for (const int64_t room : {64, 400}) {
    CAPTURE(room);
    options.staging_bytes = 2 * room * options.layout.slice_bytes(0);
    Pager pager(options);
    CHECK(same_bits(run(pager), expected));
    CHECK(slices == 2 * (30 + 80));
  }
}

DEVICE_TEST("a layer with a window is brought what it sees, once its window is known") {
  PagerOptions options = small_options(5, 200);
  options.missed_chunks = "staged";
  options.staging_bytes = 2 * 70 * options.layout.slice_bytes(0);
  const int64_t length = 150 * 16;
  // A forward of the last four positions; layer 1 has the window.
  const auto run = [&](Pager& pager, const Known& sequence, int64_t window) {
    std::vector<RowDescriptor> rows;
    for (int64_t i = 4; i > 0; --i) rows.push_back({sequence.id, length - i, 0, RowKind::kRead});
    rows.resize(kRows);
    std::vector<float> outputs;
    pager.begin(rows);
    for (int layer = 0; layer < 2; ++layer) {
      Tensors t(kRows);
      for (int64_t i = 0; i < 4; ++i) {
        fill_row(static_cast<uint64_t>(i) + 9, layer, kQuery, kQueryHeads * 16, t.q.row(i));
      }
      AttendOptions attend;
      attend.scaling = 0.25f;
      attend.window = layer == 1 ? window : 0;
      t.attend(pager, layer, attend);
      outputs.insert(outputs.end(), t.out.data.begin(), t.out.data.end());
    }
    pager.commit_all();
    return outputs;
  };
  Pager pager(options);
  const Known sequence = written(pager, length, 1);
  pager.evict_all();
  const auto staged_by = [&](int64_t window) {
    CAPTURE(window);
    const int64_t before = pager.stats().slices_staged;
    CHECK(same_bits(run(pager, sequence, window), on_processor(options, [&](Pager& processor) {
                      return run(processor, written(processor, length, 1), window);
                    })));
    return pager.stats().slices_staged - before;
  };
  CHECK(staged_by(0) == 2 * 150);
  // Begun before the window is known; what is staged for the other waves is within it.
  CHECK(staged_by(16 * 30) == 150 + 64 + 31);
  CHECK(staged_by(16 * 30) == 150 + 31);
  CHECK(staged_by(16 * 10) == 150 + 31 - 20);
  // Behind what is staged there are keys that a larger window sees: they are read in place.
  staged_by(16 * 90);
  CHECK(staged_by(16 * 90) == 150 + 91);
  staged_by(0);
  CHECK(staged_by(0) == 2 * 150);
}

DEVICE_TEST("rows that select chunks are staged as far as there is room, in one wave") {
  PagerOptions options = top_k(small_options(5, 200), 3);
  options.missed_chunks = "staged";
  options.staging_bytes = 2 * 70 * options.layout.slice_bytes(0);
  Pager pager(options);
  const Known sequence = written(pager, 150 * 16, 1);
  pager.evict_all();
  const int64_t before = pager.stats().slices_staged;
  CHECK(same_bits(probe(pager, sequence, 16), probe_on_processor(options, 150 * 16, 16)));
  CHECK(pager.stats().slices_staged - before == 2 * 70);
}

DEVICE_TEST("slots are staged by one call for each layer, wherever they lie") {
  if (test_device() != "shim") return;
  const testing::ShimHooks hooks;
  for (const uint64_t shuffle : {uint64_t{0}, uint64_t{11}}) {
    CAPTURE(shuffle);
    PagerOptions options = small_options(5, 80);
    options.missed_chunks = "staged";
    options.shuffle_seed = shuffle;
    Pager pager(options);
    const Known sequence = create(pager, 40 * 16, 1);
    pager.evict_all();
    hooks.drain();
    std::vector<RowDescriptor> rows(kRows);
    rows[0] = {sequence.id, 40 * 16 - 1, 0, RowKind::kRead};
    const int64_t slices = pager.stats().slices_staged;
    pager.begin(rows);
    CHECK(pager.stats().slices_staged == slices);  // a graph may follow, which reads in place
    Tensors t(kRows);
    Caller& caller = Caller::current();
    const TensorView k = caller.upload(t.k.view());
    const TensorView v = caller.upload(t.v.view());
    const int64_t before = hooks.unfinished();
    pager.write(0, k, v, caller.stream());
    CHECK(hooks.unfinished() - before == 1);
    CHECK(pager.stats().slices_staged - slices >= 35);
    caller.finish();
    pager.abort();
    CHECK(same_bits(probe(pager, sequence, 16), probe_on_processor(options, 40 * 16, 16)));
  }
}

DEVICE_TEST(
    "chunks on disk are read once into pinned memory that no home needs, and give way to homes") {
  const Folder folder;
  PagerOptions options = small_options(6, 24, 60, folder.path());
  Pager pager(options);
  Known sequence = create(pager, 20 * 16, 1);
  Known other = create(pager, 20 * 16, 2);  // sends the first one's homes to disk
  CHECK(pager.stats().disk_bytes_used >= 16 * kChunkBytes);
  CHECK(same_bits(probe(pager, sequence, 16), probe_on_processor(options, 20 * 16, 16)));
  int64_t copies = 0;
  for (const ChunkInfo& info : pager.ledger(sequence.id)) {
    copies += (info.tiers & kTierHost) != 0 && (info.tiers & kTierDisk) != 0 ? 1 : 0;
  }
  CHECK(copies > 0);
  const Disarm disarm;
  fault::arm("disk.read", 0, EIO);  // it is not read again
  probe(pager, sequence, 16);
  CHECK(fault::any_armed.load());
  fault::disarm_all();
  append(pager, &other, some_tokens(16, 9));
  require_intact(pager, sequence);
  require_intact(pager, other);
}

DEVICE_TEST("a forward whose chunks do not fit in memory is refused with the host_bytes it takes") {
  const Folder folder;
  Pager pager(small_options(6, 4, 60, folder.path()));
  Known sequence = create(pager, 9 * 16, 1);
  const PagerStats before = pager.stats();
  const std::string message =
      error_of<CapacityError>(pager, [&] { append(pager, &sequence, some_tokens(16 * 16, 4)); });
  CHECK(contains(message, "begin: "));
  CHECK(contains(message, "Raise host_bytes to at least"));
  CHECK_FALSE(pager.forward_running());
  CHECK(pager.stats().sequences == before.sequences);
  CHECK(pager.stats().reserved_chunks == 0);
  sequence.tokens.resize(static_cast<size_t>(pager.length(sequence.id)));
  trim(pager, &sequence, 9 * 16);
  require_intact(pager, sequence);
}

DEVICE_TEST("memory is had up front, counted, and within its budgets as the pager works") {
  const int64_t device = device::total_device_bytes();
  const int64_t pinned = device::total_pinned_bytes();
  {
    PagerOptions options = small_options(6, 40);
    Pager pager(options);
    const PagerStats before = pager.stats();
    CHECK(device::total_device_bytes() == device + before.device_bytes);
    CHECK(device::total_pinned_bytes() == pinned + before.pinned_bytes);
    CHECK(before.pool_bytes == 6 * kChunkBytes);
    CHECK(before.host_bytes == 40 * kChunkBytes);
    Known a = create(pager, 200, 1);
    pager.evict_all();
    probe(pager, a, 16);
    const PagerStats after = pager.stats();
    CHECK(after.device_bytes == before.device_bytes);
    CHECK(after.pinned_bytes == before.pinned_bytes);
    CHECK(after.host_waits > before.host_waits);
    options.scratch_bytes = after.scratch_bytes / 2;
    CHECK_THROWS_AS(Pager{options}, CapacityError);
  }
  CHECK(device::total_device_bytes() == device);
  CHECK(device::total_pinned_bytes() == pinned);
}

DEVICE_TEST("options of a device are checked by name") {
  const auto refusal = [](PagerOptions options) {
    try {
      const Pager pager(options);
    } catch (const InvalidArgumentError& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  PagerOptions options = small_options(6, 8);
  options.q_heads = 3;
  CHECK(contains(refusal(options), "q_heads: 3"));
  options = small_options(6, 8);
  options.attention = "fast";
  CHECK(contains(refusal(options), "attention: \"fast\""));
  options = small_options(6, 8);
  options.missed_chunks = "never";
  CHECK(contains(refusal(options), "missed_chunks: \"never\""));
  options = small_options(6, 8);
  options.device = "abacus";
  CHECK(contains(refusal(options), "abacus"));
  options = small_options(6, 8);
  CHECK(attention_of(options, DType::kFloat32).name == "reference");
  CHECK(std::string(Pager(options).attention_name(DType::kFloat32)) == "reference");
  CHECK(contains(Pager(options).device_place().name, test_device()));
}

DEVICE_TEST("writing a layer of a forward that only reads launches nothing") {
  if (test_device() != "shim") return;
  const testing::ShimHooks hooks;
  Pager pager(small_options(6, 16));
  const Known sequence = create(pager, 40, 1);
  const auto launches = [&](RowKind kind) {
    std::vector<RowDescriptor> rows(kRows);
    rows[0] = {sequence.id, kind == RowKind::kRead ? 39 : 40, 5, kind};
    pager.begin(rows);
    Tensors t(kRows);
    Caller& caller = Caller::current();
    const TensorView k = caller.upload(t.k.view());
    const TensorView v = caller.upload(t.v.view());
    const int64_t before = hooks.unfinished();
    pager.write(0, k, v, caller.stream());
    const int64_t after = hooks.unfinished();
    caller.finish();
    pager.abort();
    return after - before;
  };
  CHECK(launches(RowKind::kRead) == 0);
  CHECK(launches(RowKind::kCommit) == 1);
}

DEVICE_TEST(
    "a device without the shared memory for tensor attention attends in the reference order") {
  if (test_device() != "shim") return;
  PagerOptions options = small_options(3, 8);
  options.attention = "auto";
  options.layout.chunk_tokens = 64;
  options.layout.k_dim = options.layout.v_dim = 128;
  options.layout.k_dtype = options.layout.v_dtype = DType::kBFloat16;
  options.host_bytes = 8 * options.layout.chunk_bytes();
  options.selection.recent = 64;
  const auto kind = [&] { return attention_of(options, DType::kBFloat16).name; };
  const int64_t hopper = 227 << 10;
  const int64_t ada = 99 << 10;  // compute capability 8.6, 8.9 and 12.0
  for (const int64_t limit : {hopper, ada}) {
    CAPTURE(limit);
    const testing::Environment shared("KVPAGER_SHIM_SHARED", std::to_string(limit));
    const char* const expected = limit == hopper ? "tensor" : "reference";
    CHECK(kind() == expected);
    CHECK(std::string(Pager(options).attention_name(DType::kBFloat16)) == expected);
  }
  const testing::Environment shared("KVPAGER_SHIM_SHARED", std::to_string(ada));
  options.layout.k_dim = options.layout.v_dim = 64;  // takes less
  CHECK(kind() == "tensor");
}

DEVICE_TEST("sinks of the host are the sinks of the device, and of the processor") {
  const std::vector<float> sinks = {0.5f, -1.0f, 2.0f, 0.0f};
  const auto run = [&](bool given_on_device) {
    Pager pager(small_options(6, 16));
    const Known sequence = create(pager, 40, 1);
    std::vector<RowDescriptor> rows(kRows);
    rows[0] = {sequence.id, 39, 0, RowKind::kRead};
    pager.begin(rows);
    Tensors t(kRows);
    fill_row(7, 0, kQuery, 64, t.q.row(0));
    AttendOptions options;
    options.sinks = sinks.data();
    Rows copy(1, 1, 4, 0);
    copy.data = sinks;
    if (given_on_device) {
      options.sinks = static_cast<const float*>(Caller::current().upload(copy.view()).data);
      options.sinks_on_device = true;
    }
    t.attend(pager, 0, options);
    pager.abort();
    return t.out.data;
  };
  const std::vector<float> outputs = run(false);
  CHECK(same_bits(outputs, run(true)));
  const OnDevice processor("cpu");
  CHECK(same_bits(outputs, run(false)));
}

}  // namespace
}  // namespace kvpager::pager_test
