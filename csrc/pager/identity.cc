#include "pager/identity.h"

namespace kvpager {

bool can_follow(const Ledger& ledger, const PagerOptions& options, RecordId found, int64_t chunk,
                RecordId previous) {
  if (ledger[found].index != chunk) return false;
  if (chunk == 0 || previous.value() >= 0) {
    if (ledger.follows(found, previous)) return true;
    return chunk > 0 && options.window > 0 && ledger.orphaned(found);
  }
  return options.window > 0;
}

void publish(Ledger* ledger, const PagerOptions& options, RecordId id, RecordId previous) {
  ledger->publish(id);
  if (ledger->published(id)) return;
  ChunkRecord& record = (*ledger)[id];
  const auto found = ledger->find(record.name, record.tokens.data(), options.layout.chunk_tokens);
  if (!found || !can_follow(*ledger, options, *found, record.index, previous)) return;
  const SharedArray<uint64_t>& theirs = (*ledger)[*found].checksums;
  const bool known = !theirs.empty() && !record.checksums.empty();
  if (!known || theirs == record.checksums) record.serial = (*ledger)[*found].serial;
}

}  // namespace kvpager
