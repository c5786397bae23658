#include "core/ledger.h"

#include <algorithm>

namespace kvpager {

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
  by_hash_.reserve(wanted);
}

void Ledger::drop(RecordId id) {
  ChunkRecord& record = (*this)[id];
  if (published(id)) by_hash_.erase(record.hash);
  record = ChunkRecord();
  free_.push_back(id);
  --live_;
}

void Ledger::publish(RecordId id) { by_hash_.emplace((*this)[id].hash, id); }

bool Ledger::published(RecordId id) const {
  const auto found = by_hash_.find((*this)[id].hash);
  return found != by_hash_.end() && found->second == id;
}

std::optional<RecordId> Ledger::find(const Hash128& hash, const Hash128& parent,
                                     const TokenId* tokens, int64_t count) const {
  const auto found = by_hash_.find(hash);
  if (found == by_hash_.end()) return std::nullopt;
  const ChunkRecord& record = (*this)[found->second];
  if (!(record.parent == parent) || static_cast<int64_t>(record.tokens.size()) != count ||
      !std::equal(tokens, tokens + count, record.tokens.begin())) {
    return std::nullopt;
  }
  return found->second;
}

}  // namespace kvpager
