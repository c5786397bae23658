#include "core/ledger.h"

#include <algorithm>

#include "kvpager/require.h"

namespace kvpager {

namespace {

constexpr size_t kFewestPlaces = 64;

}  // namespace

RecordId Ledger::create(ChunkState state) {
  RecordId id;
  if (free_.empty()) {
    grow(records_.size() + 1);
    id = RecordId(static_cast<int32_t>(records_.size()));
    records_.emplace_back();
  } else {
    id = free_.back();
    free_.pop_back();
  }
  ChunkRecord& record = (*this)[id];
  record.state = state;
  held_ += record.held() ? 1 : 0;
  ++live_;
  return id;
}

// Both lists or neither, so that drop() cannot fail.
void Ledger::grow(size_t records) {
  if (records <= records_.capacity()) return;
  const size_t room = std::max(records, 2 * records_.capacity());
  free_.reserve(room);
  records_.reserve(room);
}

void Ledger::expect(int64_t more) {
  grow(static_cast<size_t>(live_ + more));
  make_room(published_ + static_cast<size_t>(more));
}

void Ledger::drop(RecordId id) {
  ChunkRecord& record = (*this)[id];
  KVPAGER_REQUIRE(record.state != ChunkState::kFree && record.readers == 0 && record.borrows == 0);
  KVPAGER_REQUIRE(!record.resident() && !record.on_host() && !record.on_disk());
  KVPAGER_REQUIRE(record.summary.value() < 0);
  if (record.published) withdraw(record);
  if (record.cached) uncache(id);
  held_ -= record.held() ? 1 : 0;
  record = ChunkRecord();
  free_.push_back(id);
  --live_;
}

void Ledger::seal(RecordId id) {
  ChunkRecord& record = (*this)[id];
  KVPAGER_REQUIRE(record.state == ChunkState::kOpen && !record.paged_out);
  record.state = ChunkState::kSealed;
  held_ -= record.held() ? 0 : 1;
}

void Ledger::page(RecordId id, bool out) {
  ChunkRecord& record = (*this)[id];
  KVPAGER_REQUIRE(record.state == ChunkState::kOpen && record.paged_out != out);
  held_ -= record.held() ? 1 : 0;
  record.paged_out = out;
  held_ += record.held() ? 1 : 0;
}

void Ledger::pin(RecordId id, int32_t amount) {
  ChunkRecord& record = (*this)[id];
  KVPAGER_REQUIRE(record.pins + amount >= 0);
  held_ -= record.held() ? 1 : 0;
  record.pins += amount;
  held_ += record.held() ? 1 : 0;
}

void Ledger::cache(RecordId id) {
  ChunkRecord& record = (*this)[id];
  KVPAGER_REQUIRE(record.state == ChunkState::kSealed && !record.cached && record.references == 0);
  record.cached = true;
  record.older = newest_;
  record.newer = RecordId();
  (newest_.value() >= 0 ? (*this)[newest_].newer : oldest_) = id;
  newest_ = id;
  ++cached_;
}

void Ledger::uncache(RecordId id) {
  ChunkRecord& record = (*this)[id];
  KVPAGER_REQUIRE(record.cached);
  (record.older.value() >= 0 ? (*this)[record.older].newer : oldest_) = record.newer;
  (record.newer.value() >= 0 ? (*this)[record.newer].older : newest_) = record.older;
  record.cached = false;
  --cached_;
}

std::optional<RecordId> Ledger::oldest_cached() const {
  if (cached_ == 0) return std::nullopt;
  return oldest_;
}

size_t Ledger::place_of(const ChunkName& name) const {
  const uint32_t tag = tag_of(name);
  size_t place = home_of(tag);
  for (;; place = after(place)) {
    const Entry& entry = index_[place];
    if (entry.record.value() < 0) return place;
    if (entry.tag == tag && (*this)[entry.record].name == name) return place;
  }
}

void Ledger::make_room(size_t published) {
  if (2 * published <= index_.size()) return;
  size_t places = std::max(kFewestPlaces, index_.size());
  while (places < 2 * published) places *= 2;
  std::vector<Entry> old(places);
  old.swap(index_);
  for (const Entry& entry : old) {
    if (entry.record.value() < 0) continue;
    size_t place = home_of(entry.tag);
    while (index_[place].record.value() >= 0) place = after(place);
    index_[place] = entry;
  }
}

void Ledger::publish(RecordId id) {
  KVPAGER_REQUIRE((*this)[id].state == ChunkState::kSealed &&
                  (*this)[id].provenance == Provenance::kExact);
  make_room(published_ + 1);
  ChunkRecord& record = (*this)[id];
  Entry& entry = index_[place_of(record.name)];
  if (entry.record.value() >= 0) return;
  entry = {id, tag_of(record.name)};
  record.published = true;
  ++published_;
}

// An entry that was pushed past the place that becomes empty moves into it, so that no search ends early.
void Ledger::withdraw(const ChunkRecord& record) {
  KVPAGER_REQUIRE(record.published);
  size_t hole = place_of(record.name);
  for (size_t place = after(hole); index_[place].record.value() >= 0; place = after(place)) {
    const size_t home = home_of(index_[place].tag);
    const size_t mask = index_.size() - 1;
    if (((place - home) & mask) < ((place - hole) & mask)) continue;
    index_[hole] = index_[place];
    hole = place;
  }
  index_[hole] = Entry();
  --published_;
}

std::optional<RecordId> Ledger::find(const ChunkName& name, const TokenId* tokens,
                                     int64_t count) const {
  if (index_.empty()) return std::nullopt;
  const RecordId found = index_[place_of(name)].record;
  if (found.value() < 0) return std::nullopt;
  const ChunkRecord& record = (*this)[found];
  if (static_cast<int64_t>(record.tokens.size()) != count ||
      !std::equal(tokens, tokens + count, record.tokens.begin())) {
    return std::nullopt;
  }
  return found;
}

}  // namespace kvpager
