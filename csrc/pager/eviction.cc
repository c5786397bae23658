#include "pager/eviction.h"

#include <algorithm>
#include <map>
#include <utility>

#include "kvpager/error.h"

namespace kvpager {
namespace {

// Fills the order with every record that `can_go` holds of, as facts_of(id) has it.
template <class CanGo, class FactsOf>
void note_all(const Ledger& ledger, EvictionOrder* order, const CanGo& can_go,
              const FactsOf& facts_of) {
  std::vector<VictimFacts> notes;
  ledger.each([&](RecordId id, const ChunkRecord& record) {
    if (can_go(record)) notes.push_back(facts_of(id));
  });
  order->fill(std::move(notes));
}

bool host_slot_is_read(const ChunkRecord& record, HostReaders readers) {
  return record.readers > 0 && !(readers == HostReaders::kOfMissing && record.resident());
}

// What can leave the pool, now or once its readers are done: these come and go with every layer.
bool evictable_unread(const ChunkRecord& record) {
  return record.state == ChunkState::kSealed && record.resident() && record.pins == 0 &&
         record.has_lower_copy();
}

// An open chunk that can be paged out, now or once its sequence's forward has ended.
bool tail_unread(const ChunkRecord& record) {
  return record.state == ChunkState::kOpen && !record.paged_out && record.pins == 0;
}

}  // namespace

bool evictable(const ChunkRecord& record) {
  return evictable_unread(record) && record.readers == 0;
}

Eviction::Eviction(const Config& config, const Ledger& ledger, Backend& backend,
                   Sheltered sheltered)
    : config_(config),
      ledger_(ledger),
      backend_(backend),
      sheltered_now_(std::move(sheltered)),
      victims_(config.options.policy),
      tails_(Policy::kLru),
      spills_(config.options.policy),
      host_copies_(Policy::kLru) {}

VictimFacts Eviction::facts(RecordId id) const {
  const ChunkRecord& record = ledger_[id];
  const size_t i = static_cast<size_t>(id.value());
  return {id, i < sheltered_.size() && sheltered_[i] != 0, record.score, record.last_use};
}

VictimFacts Eviction::use_alone(RecordId id) const { return {id, false, 0, ledger_[id].last_use}; }

void Eviction::invalidate() {
  victims_.invalidate();
  tails_.invalidate();
  spills_.invalidate();
  host_copies_.invalidate();
}

void Eviction::note(RecordId id) {
  const ChunkRecord& record = ledger_[id];
  if (!victims_.stale() && evictable_unread(record)) victims_.add(facts(id));
  if (!tails_.stale() && tail_unread(record)) tails_.add(use_alone(id));
  if (!spills_.stale() && record.paged_out) spills_.add(facts(id));
  if (!host_copies_.stale() && record.host_copy()) host_copies_.add(use_alone(id));
}

void Eviction::refresh_victims() {
  if (!victims_.stale()) return;
  sheltered_ = sheltered_now_();
  spills_.invalidate();  // noted by what was sheltered before
  note_all(ledger_, &victims_, evictable_unread, [&](RecordId id) { return facts(id); });
  ++orders_made_;
}

std::optional<VictimFacts> Eviction::next_victim() {
  refresh_victims();
  std::optional<VictimFacts> soonest;
  uint64_t soonest_arrives = 0;
  const auto found = victims_.first([&](const VictimFacts& note) {
    const ChunkRecord& record = ledger_[note.record];
    if (!evictable_unread(record) || !(facts(note.record) == note)) return Verdict::kOutdated;
    if (record.readers > 0) return Verdict::kStays;
    const uint64_t arrives = backend_.arriving(record);
    if (arrives == 0) return Verdict::kGoes;
    if (!soonest || arrives < soonest_arrives) {  // notes come in the policy's order
      soonest = note;
      soonest_arrives = arrives;
    }
    return Verdict::kStays;
  });
  return found ? found : soonest;
}

template <class Judge>
int64_t Eviction::count(EvictionOrder* order, int64_t most, const Judge& judge) {
  int64_t found = 0;
  order->first([&](const VictimFacts& note) {
    const Verdict verdict = judge(note);
    if (verdict != Verdict::kGoes) return verdict;
    return ++found == most ? Verdict::kGoes : Verdict::kStays;
  });
  return found;
}

int64_t Eviction::victims(int64_t most) {
  refresh_victims();
  return count(&victims_, most, [&](const VictimFacts& note) {
    const ChunkRecord& record = ledger_[note.record];
    if (!evictable_unread(record) || !(facts(note.record) == note)) return Verdict::kOutdated;
    return record.readers > 0 ? Verdict::kStays : Verdict::kGoes;
  });
}

void Eviction::refresh_tails() {
  if (!tails_.stale()) return;
  note_all(ledger_, &tails_, tail_unread, [&](RecordId id) { return use_alone(id); });
  ++orders_made_;
}

Verdict Eviction::judge_tail(const VictimFacts& note) const {
  const ChunkRecord& record = ledger_[note.record];
  if (!tail_unread(record) || !(use_alone(note.record) == note)) return Verdict::kOutdated;
  return record.readers > 0 ? Verdict::kStays : Verdict::kGoes;
}

std::optional<RecordId> Eviction::next_tail() {
  refresh_tails();
  const auto found = tails_.first([&](const VictimFacts& note) { return judge_tail(note); });
  return found ? std::optional(found->record) : std::nullopt;
}

int64_t Eviction::tails(int64_t most) {
  refresh_tails();
  return count(&tails_, most, [&](const VictimFacts& note) { return judge_tail(note); });
}

std::optional<RecordId> Eviction::next_to_spill(HostReaders readers) {
  refresh_victims();  // by what is sheltered now
  if (spills_.stale()) {
    note_all(
        ledger_, &spills_, [](const ChunkRecord& record) { return record.home_on_host(); },
        [&](RecordId id) { return facts(id); });
    ++orders_made_;
  }
  const auto found = spills_.first([&](const VictimFacts& note) {
    const ChunkRecord& record = ledger_[note.record];
    if (!record.home_on_host() || !(facts(note.record) == note)) return Verdict::kOutdated;
    const bool in_use = record.borrows > 0 || host_slot_is_read(record, readers);
    return in_use ? Verdict::kStays : Verdict::kGoes;
  });
  return found ? std::optional(found->record) : std::nullopt;
}

std::optional<RecordId> Eviction::next_host_copy(HostReaders readers) {
  if (host_copies_.stale()) {
    note_all(
        ledger_, &host_copies_, [](const ChunkRecord& record) { return record.host_copy(); },
        [&](RecordId id) { return use_alone(id); });
    ++orders_made_;
  }
  const auto found = host_copies_.first([&](const VictimFacts& note) {
    const ChunkRecord& record = ledger_[note.record];
    if (!record.host_copy() || !(use_alone(note.record) == note)) return Verdict::kOutdated;
    return host_slot_is_read(record, readers) ? Verdict::kStays : Verdict::kGoes;
  });
  return found ? std::optional(found->record) : std::nullopt;
}

std::vector<VictimFacts> Eviction::most_valued(const std::vector<RecordId>& ids, int64_t count) {
  refresh_victims();  // what is sheltered is a fact too
  std::vector<VictimFacts> wanted;
  for (const RecordId id : ids) wanted.push_back(facts(id));
  const size_t best = std::min(wanted.size(), static_cast<size_t>(count));
  std::partial_sort(wanted.begin(), wanted.begin() + static_cast<int64_t>(best), wanted.end(),
                    [&](const VictimFacts& a, const VictimFacts& b) {
                      return evicted_before(config_.options.policy, b, a);
                    });
  wanted.resize(best);
  return wanted;
}

void Eviction::check_invariants() const {
  const auto check = [&](const EvictionOrder& order, const auto& can_go, const auto& facts_of) {
    if (order.stale()) return;
    std::map<int32_t, int> known;
    for (const VictimFacts& note : order.notes()) {
      if (facts_of(note.record) == note) ++known[note.record.value()];
    }
    ledger_.each([&](RecordId id, const ChunkRecord& record) {
      if (can_go(record) && known[id.value()] == 0) {
        throw InvariantError(str("invariant 2: record ", id.value(), " (chunk ", record.index,
                                 ") may leave and is not noted for it"));
      }
    });
  };
  if (!victims_.stale() && sheltered_ != sheltered_now_()) {
    throw InvariantError("invariant 2: who is sheltered is not who was noted to be");
  }
  const auto all_facts = [&](RecordId id) { return facts(id); };
  check(victims_, evictable_unread, all_facts);
  check(tails_, tail_unread, [&](RecordId id) { return use_alone(id); });
  check(spills_, [](const ChunkRecord& record) { return record.home_on_host(); }, all_facts);
  check(
      host_copies_, [](const ChunkRecord& record) { return record.host_copy(); },
      [&](RecordId id) { return use_alone(id); });
}

}  // namespace kvpager
