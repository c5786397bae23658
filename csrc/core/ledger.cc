#include "core/ledger.h"

#include <algorithm>

namespace kvpager {

namespace {

constexpr size_t kFewestPlaces = 64;

}  // namespace

RecordId Ledger::create(ChunkState state) {
  RecordId id;
  if (free_.empty()) {
    id = RecordId(static_cast<int32_t>(records_.size()));
    records_.emplace_back();
    free_.reserve(records_.capacity());  // so that drop() cannot fail
  } else {
    id = free_.back();
    free_.pop_back();
  }
  (*this)[id].state = state;
  ++live_;
  return id;
}

void Ledger::expect(int64_t more) {
  const size_t wanted = static_cast<size_t>(live_ + more);
  if (wanted > records_.capacity()) records_.reserve(std::max(wanted, 2 * records_.capacity()));
  make_room(published_ + static_cast<size_t>(more));
}

void Ledger::drop(RecordId id) {
  withdraw(id);
  if ((*this)[id].cached) uncache(id);
  (*this)[id] = ChunkRecord();
  free_.push_back(id);
  --live_;
}

void Ledger::cache(RecordId id) {
  ChunkRecord& record = (*this)[id];
  record.cached = true;
  record.older = newest_;
  record.newer = RecordId();
  (newest_.value() >= 0 ? (*this)[newest_].newer : oldest_) = id;
  newest_ = id;
  ++cached_;
}

void Ledger::uncache(RecordId id) {
  ChunkRecord& record = (*this)[id];
  (record.older.value() >= 0 ? (*this)[record.older].newer : oldest_) = record.newer;
  (record.newer.value() >= 0 ? (*this)[record.newer].older : newest_) = record.older;
  record.cached = false;
  --cached_;
}

std::optional<RecordId> Ledger::oldest_cached() const {
  if (cached_ == 0) return std::nullopt;
  return oldest_;
}

size_t Ledger::place_of(const Hash128& hash) const {
  size_t place = home_of(hash);
  while (index_[place].value() >= 0 && !((*this)[index_[place]].hash == hash)) place = after(place);
  return place;
}

void Ledger::make_room(size_t published) {
  if (2 * published <= index_.size()) return;
  size_t places = std::max(kFewestPlaces, index_.size());
  while (places < 2 * published) places *= 2;
  std::vector<RecordId> old(places);
  old.swap(index_);
  for (const RecordId id : old) {
    if (id.value() >= 0) index_[place_of((*this)[id].hash)] = id;
  }
}

void Ledger::publish(RecordId id) {
  make_room(published_ + 1);
  RecordId& place = index_[place_of((*this)[id].hash)];
  if (place.value() >= 0) return;
  place = id;
  ++published_;
}

bool Ledger::published(RecordId id) const {
  return !index_.empty() && index_[place_of((*this)[id].hash)] == id;
}

// Whoever was pushed past the place that becomes empty moves into it, so that no search ends early.
void Ledger::withdraw(RecordId id) {
  if (!published(id)) return;
  size_t hole = place_of((*this)[id].hash);
  for (size_t place = after(hole); index_[place].value() >= 0; place = after(place)) {
    const size_t home = home_of((*this)[index_[place]].hash);
    const size_t mask = index_.size() - 1;
    if (((place - home) & mask) < ((place - hole) & mask)) continue;
    index_[hole] = index_[place];
    hole = place;
  }
  index_[hole] = RecordId();
  --published_;
}

std::optional<RecordId> Ledger::find(const Hash128& hash, const Hash128& parent,
                                     const TokenId* tokens, int64_t count) const {
  if (index_.empty()) return std::nullopt;
  const RecordId found = index_[place_of(hash)];
  if (found.value() < 0) return std::nullopt;
  const ChunkRecord& record = (*this)[found];
  if (!(record.parent == parent) || static_cast<int64_t>(record.tokens.size()) != count ||
      !std::equal(tokens, tokens + count, record.tokens.begin())) {
    return std::nullopt;
  }
  return found;
}

}  // namespace kvpager
