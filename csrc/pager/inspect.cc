// Reading the pager's state: ledger, stats, raw K/V, a selection that was not run, and the
// invariants.
#include <algorithm>
#include <cstring>
#include <set>

#include "kvpager/attention.h"
#include "kvpager/error.h"
#include "pager/impl.h"
#include "pager/scan.h"

namespace kvpager {

std::vector<ChunkInfo> Pager::Impl::inspect(SequenceId id) const {
  const Sequence& sequence = find(id);
  std::vector<ChunkInfo> infos;
  infos.reserve(static_cast<size_t>(sequence.chunks()));
  for (int64_t c = 0; c < sequence.released; ++c) {
    ChunkInfo info;
    info.chunk = c;
    info.start = c * layout.chunk_tokens;
    info.stop = info.start + layout.chunk_tokens;
    info.sealed = true;
    info.released = true;
    info.k_dtype = layout.k_dtype;
    info.v_dtype = layout.v_dtype;
    info.provenance = sequence.released_provenance(c);
    infos.push_back(info);
  }
  for (int64_t c = sequence.released; c < sequence.chunks(); ++c) {
    const ChunkUse& use = sequence.use(c);
    const ChunkRecord& record = ledger[use.record];
    ChunkInfo info;
    info.chunk = c;
    info.start = c * layout.chunk_tokens;
    info.stop = std::max(info.start, std::min(info.start + layout.chunk_tokens, sequence.length));
    info.sealed = record.state == ChunkState::kSealed;
    info.tiers = static_cast<uint8_t>(
        (record.resident() ? kTierResident : 0) | (record.on_host() ? kTierHost : 0) |
        (record.on_disk() ? kTierDisk : 0) | (record.source != nullptr ? kTierSnapshot : 0));
    info.damaged = record.damaged;
    info.block = record.block;
    info.k_dtype = layout.k_dtype;
    info.v_dtype = layout.v_dtype;
    info.provenance = info.sealed ? record.provenance : sequence.provenance;
    info.chain_hash = record.name;
    info.references = record.references;
    info.pins = use.pins;
    info.qk_score = use.qk_score;
    info.last_use = use.last_use;
    info.selected = use.selected;
    info.recalled = record.recalled;
    infos.push_back(info);
  }
  return infos;
}

PagerStats Pager::Impl::stats() const {
  PagerStats s = counters;
  backend->add_to(&s);
  s.pool_blocks = blocks.slots();
  s.free_blocks = blocks.free();
  s.resident_bytes = blocks.used() * layout.chunk_bytes();
  s.host_bytes_used = host_slots.used() * layout.chunk_bytes();
  s.disk_bytes = disk_slots.slots() * layout.chunk_bytes();
  s.disk_bytes_used = disk_slots.used() * layout.chunk_bytes();
  s.summary_bytes_used = summary_slots.used() * config.summary_slot_bytes;
  s.chunk_bytes = layout.chunk_bytes();
  s.summary_bytes_per_chunk = config.summary_slot_bytes;
  for (const auto& [key, sequence] : sequences) s.sequences += sequence.frozen ? 0 : 1;
  s.records = ledger.live();
  s.cached_records = ledger.cached();
  s.reserved_chunks = reserved_homes;
  s.home_chunks = config.home_capacity();
  std::set<SnapshotReader*> readers;
  ledger.each([&](RecordId, const ChunkRecord& record) {
    s.open_blocks += record.state == ChunkState::kOpen ? 1 : 0;
    s.pinned_blocks += record.pins > 0 && record.resident() ? 1 : 0;
    if (record.source != nullptr) readers.insert(record.source.get());
  });
  for (const SnapshotReader* reader : readers)
    s.snapshot_bytes_read += reader->payload_bytes_read();
  return s;
}

void Pager::Impl::read_kv(SequenceId id, int layer, int64_t start, int64_t stop, std::byte* k,
                          std::byte* v) {
  const Sequence& sequence = find(id);
  if (layer < 0 || layer >= layout.layers) {
    throw InvalidArgumentError(str("layer: ", layer, " is not in [0, ", layout.layers, ")"));
  }
  if (start < 0 || stop < start || stop > sequence.length) {
    throw InvalidArgumentError(str("range [", start, ", ", stop,
                                   "): expected 0 <= start <= stop <= ", sequence.length,
                                   ", the positions this sequence holds"));
  }
  if (start == stop) return;
  require_held(sequence, start, str("range [", start, ", ", stop, ")"));
  const int64_t c = layout.chunk_tokens;
  const int64_t k_element = dtype_bytes(layout.k_dtype);
  const int64_t v_element = dtype_bytes(layout.v_dtype);
  std::vector<std::byte> buffer(static_cast<size_t>(layout.slice_bytes()));
  for (int64_t chunk = start / c; chunk * c < stop; ++chunk) {
    const ChunkRecord& record = ledger[sequence.use(chunk).record];
    const std::byte* slice =
        backend->view(record, layout.slice_offset(layer), layout.slice_bytes());
    if (slice == nullptr) {
      files.read_slice(record, layer, buffer.data());
      slice = buffer.data();
    }
    for (int64_t p = std::max(start, chunk * c); p < std::min(stop, (chunk + 1) * c); ++p) {
      const int64_t t = p % c;
      for (int h = 0; h < layout.kv_heads; ++h) {
        const std::byte* k_tile = slice + layout.page_bytes() * h;
        const std::byte* v_tile = k_tile + layout.k_tile_bytes();
        std::byte* k_out = k + ((p - start) * layout.kv_heads + h) * layout.k_dim * k_element;
        for (int d = 0; d < layout.k_dim; ++d) {  // keys are stored with tokens innermost
          std::memcpy(k_out + d * k_element, k_tile + (d * c + t) * k_element,
                      static_cast<size_t>(k_element));
        }
        std::memcpy(v + ((p - start) * layout.kv_heads + h) * layout.v_dim * v_element,
                    v_tile + t * layout.v_dim * v_element,
                    static_cast<size_t>(layout.v_dim * v_element));
      }
    }
  }
}

std::vector<std::vector<int32_t>> Pager::Impl::select(SequenceId id, int layer, const TensorView& q,
                                                      int64_t position, int64_t window) {
  Sequence& sequence = find(id);
  if (layer < 0 || layer >= layout.layers) {
    throw InvalidArgumentError(str("layer: ", layer, " is not in [0, ", layout.layers, ")"));
  }
  if (position < 0 || position > sequence.length) {
    throw InvalidArgumentError(
        str("position: ", position, " is not in [0, ", sequence.length, "]"));
  }
  if (q.rows != 1 || q.heads <= 0 || q.heads % layout.kv_heads != 0 || q.dim != layout.k_dim) {
    throw InvalidArgumentError(str("q: shape [", q.rows, ", ", q.heads, ", ", q.dim,
                                   "], expected [1, a multiple of ", layout.kv_heads, ", ",
                                   layout.k_dim, "]"));
  }
  if (constexpr int32_t kPart = 0; find_non_finite(q, &kPart) >= 0) {
    throw NonFiniteError(str("layer ", layer, ": the query at position ", position, " of sequence ",
                             id.value(), " is not finite, so that it selects nothing"));
  }
  require_held(sequence, window > 0 ? std::max<int64_t>(0, position - window + 1) : 0,
               str("a selection at position ", position, " (window=", window, ")"));
  load_summaries(sequence);
  std::vector<const std::byte*> bases(static_cast<size_t>(sequence.released), nullptr);
  for (const ChunkUse& use : sequence.sealed) {
    bases.push_back(backend->summary(ledger[use.record].summary));
  }
  const CandidateRange range =
      candidate_range(options.selection, layout.chunk_tokens, position, sequence.released);
  std::vector<std::vector<int32_t>> result(static_cast<size_t>(layout.kv_heads));
  Scan scan;
  scan.run({&config.scorer, &layout, config.summary_page_bytes}, layer, q, {{0, &bases, range}},
           threads);
  for (int h = 0; h < layout.kv_heads; ++h) {
    select_chunks(options.selection, layout.chunk_tokens, position, window, scan.scores(0, h),
                  &result[static_cast<size_t>(h)], sequence.released);
  }
  return result;
}

// Whoever may leave is noted as it is, so that the first one noted is the one the policy names. What is
// noted beside them is found out when it comes up.
void Pager::Impl::check_orders() const {
  const auto check = [&](const LeaveOrder& order, const auto& candidate, const auto& facts_of) {
    mutex.held();
    if (order.stale()) return;
    std::map<int32_t, int> known;
    for (const VictimFacts& note : order.notes()) {
      if (facts_of(note.record) == note) ++known[note.record.value()];
    }
    ledger.each([&](RecordId id, const ChunkRecord& record) {
      mutex.held();
      if (candidate(record) && known[id.value()] == 0) {
        throw InvariantError(str("invariant 2: record ", id.value(), " (chunk ", record.index,
                                 ") may leave and is not noted for it"));
      }
    });
  };
  if (!victims.stale() && sheltered != sheltered_records()) {
    throw InvariantError("invariant 2: who is sheltered is not who was noted to be");
  }
  const auto all_facts = [&](RecordId id) {
    mutex.held();
    return facts(id);
  };
  check(victims, [&](const ChunkRecord& record) { return evictable(record); }, all_facts);
  check(spills, [](const ChunkRecord& record) { return record.home_on_host(); }, all_facts);
  check(
      host_copies, [](const ChunkRecord& record) { return record.host_copy(); },
      [&](RecordId id) {
        mutex.held();
        return use_alone(id);
      });
}

void Pager::Impl::check_invariants() const {
  const auto require = [](bool holds, int number, const std::string& what) {
    if (!holds) throw InvariantError(str("invariant ", number, ": ", what));
  };
  // 1. Every block is in exactly one place. 2. Every budget is a sum over records.
  std::vector<int> owners(static_cast<size_t>(blocks.slots()), 0);
  std::set<int32_t> host_used;
  std::set<int32_t> disk_used;
  std::set<int32_t> summaries_used;
  int64_t resident = 0;
  int64_t homes = 0;
  int64_t restored = 0;
  int64_t cached = 0;
  int64_t held = 0;
  ledger.each([&](RecordId id, const ChunkRecord& record) {
    mutex.held();
    const std::string name = str("record ", id.value(), " (chunk ", record.index, ")");
    if (record.resident()) {
      require(blocks.taken(record.block), 1, name + " owns a block that is free");
      require(++owners[static_cast<size_t>(record.block.value())] == 1, 1,
              str("block ", record.block.value(), " has two owners"));
      ++resident;
    }
    if (record.on_host())
      require(host_used.insert(record.host.value()).second, 2, name + " shares a host slot");
    if (record.on_disk())
      require(disk_used.insert(record.disk.value()).second, 2, name + " shares a disk slot");
    if (record.state == ChunkState::kOpen) {
      require(record.resident() && record.references == 1 && !record.has_lower_copy(), 1,
              name + " is open but not a private block");
      require(record.summary.value() < 0, 9, name + " is open but has a summary");
    } else {
      require(record.resident() || record.has_lower_copy(), 1, name + " has no copy anywhere");
      require(record.summary.value() >= 0, 9, name + " is sealed without a summary");
      require(summaries_used.insert(record.summary.value()).second, 9, name + " shares a summary");
      require(!record.summary_pending || record.source != nullptr, 9,
              name + " waits for a summary no file has");
      const bool put_off = record.checksums.empty() && (record.resident() || record.on_host());
      require((put_off || static_cast<int64_t>(record.checksums.size()) == layout.layers) &&
                  static_cast<int64_t>(record.tokens.size()) == layout.chunk_tokens,
              9, name + " is sealed without checksums or token ids");
      require(!ledger.published(id) || record.provenance == Provenance::kExact, 10,
              name + " is not exact but can be found as if it were");
    }
    require(record.pins == 0 || record.resident(), 3, name + " is pinned but not resident");
    require(record.readers == 0 || forward != nullptr, 5,
            name + " is being read outside a forward");
    require(record.borrows == 0 || record.home_on_host() ||
                (record.resident() && !record.has_lower_copy()),
            5, name + " was lent to a save and has moved");
    require(!record.damaged || record.on_disk() || record.source != nullptr, 9,
            name + " is damaged but neither on disk nor in a snapshot");
    if (record.source != nullptr) {
      const TokenId* theirs = record.source->meta().tokens.data();
      require(record.tokens.data() == theirs + record.source_chunk * layout.chunk_tokens, 9,
              name + " has token ids that its snapshot does not keep");
    }
    require(record.cached == (record.references == 0), 1,
            name + " is used by nobody and not cached, or the other way around");
    if (record.cached) ++cached;
    if (record.held()) ++held;
    if (record.needs_home() && record.references > 0) ++homes;
    if (record.source != nullptr) ++restored;
  });
  int64_t listed = 0;
  for (auto id = ledger.oldest_cached(); id && listed <= cached; ++listed) {
    const RecordId newer = ledger[*id].newer;
    require(ledger[*id].cached, 1, "a record in use is listed as cached");
    id = newer.value() >= 0 ? std::optional(newer) : std::nullopt;
  }
  require(listed == cached && cached == ledger.cached(), 1, "the list of cached records is broken");
  require(held == ledger.held(), 3, "the records that are open or pinned are miscounted");
  check_orders();
  require(resident == blocks.used(), 1, "a block is taken but no record owns it");
  require(blocks.slots() == options.pool_blocks, 2, "the pool is not the size it was given");
  require(static_cast<int64_t>(host_used.size()) == host_slots.used(), 2, "a host slot leaked");
  require(static_cast<int64_t>(disk_used.size()) == disk_slots.used(), 2, "a disk slot leaked");
  require(static_cast<int64_t>(summaries_used.size()) == summary_slots.used(), 2,
          "a summary slot leaked");
  require(homes == referenced_homes && restored == restored_records, 2,
          "home counts do not add up");
  require(referenced_homes + reserved_homes <= config.home_capacity(), 2,
          "more homes promised than there are");
  require(referenced_homes + reserved_homes + restored_records <= summary_slots.slots(), 2,
          "more summaries promised than there are");

  std::map<int32_t, int32_t> references;
  std::map<int32_t, int32_t> pin_counts;
  int64_t reserved = 0;
  for (const auto& [key, sequence] : sequences) {
    const std::string name = str("sequence ", key);
    const int64_t c = layout.chunk_tokens;
    require(sequence.sealed_chunks() == sequence.length / c, 6,
            name + " has the wrong number of sealed chunks");
    require(static_cast<int64_t>(sequence.tokens.size()) == sequence.length, 6,
            name + " has the wrong number of token ids");
    const bool in_forward = sequence.part >= 0;
    require(
        !in_forward ||
            (forward && forward->parts[static_cast<size_t>(sequence.part)].sequence == &sequence),
        14, name + " takes part in a forward that does not run");
    if (!in_forward) {
      require(static_cast<int64_t>(sequence.frontier.size()) == (sequence.length % c == 0 ? 0 : 1),
              14, name + " keeps frontier chunks outside a forward");
    }
    int64_t released = 0;
    for (const int64_t of_one : sequence.released_worth) released += of_one;
    require(sequence.released == 0 || sequence.frozen ||  // to which no row comes
                (options.window > 0 && earliest_trim(sequence) <= sequence.length),
            16, name + " has let go of what its window shows");
    require(released == sequence.released && sequence.released_provenance() <= sequence.provenance,
            10, name + " does not know what its released chunks were worth");
    require(sequence.released > 0 || sequence.base.empty(), 10,
            name + " begins after a chunk that it never had");
    ChunkName chain = sequence.base;
    for (int64_t i = sequence.released; i < sequence.chunks(); ++i) {
      const ChunkUse& use = sequence.use(i);
      const ChunkRecord& record = ledger[use.record];
      require(
          record.state == (i < sequence.sealed_chunks() ? ChunkState::kSealed : ChunkState::kOpen),
          6, str(name, " chunk ", i, " is in the wrong state"));
      require(!record.summary_pending || !sequence.summaries_loaded, 9,
              str(name, " takes the summary of chunk ", i,
                  " for loaded, but it is still in the snapshot"));
      require(record.index == i, 9, str(name, " chunk ", i, " is another chunk's record"));
      require(i >= sequence.sealed_chunks() ||
                  sequence.tokens.equals(static_cast<size_t>(i * c), record.tokens.data(),
                                         record.tokens.size()),
              10, str(name, " chunk ", i, " holds other tokens"));
      require(i >= sequence.sealed_chunks() || record.provenance <= sequence.provenance, 10,
              str(name, " chunk ", i, " is worth less than its sequence says"));
      if (i < sequence.sealed_chunks()) {
        if (!record.name_checked) {  // once: it is made again from the one before, for each chunk
          require(
              record.name == sequence.namer.next(chain, record.tokens.data(), c, record.provenance),
              10,
              str(name, " chunk ", i,
                  " has another name than its tokens and the chunks before give"));
          record.name_checked = true;
        }
        chain = record.name;
        require(
            i == sequence.released || ledger.follows(use.record, sequence.use(i - 1).record), 10,
            str(name, " chunk ", i, " was computed after another record than the one before it"));
      }
      ++references[use.record.value()];
      pin_counts[use.record.value()] += use.pins;
    }
    reserved += sequence.reserved;
  }
  require(reserved == reserved_homes, 2, "reserved homes do not add up");
  ledger.each([&](RecordId id, const ChunkRecord& record) {
    require(references[id.value()] == record.references, 1,
            str("record ", id.value(), " counts ", record.references, " references, has ",
                references[id.value()]));
    require(pin_counts[id.value()] == record.pins, 3,
            str("record ", id.value(), " has the wrong number of pins"));
  });
  backend->check_invariants();
}

}  // namespace kvpager
