// Chunks that a commit fills. Everything that can fail is prepared for all of them before the first is
// applied (invariant 6): prepare() of each part, then apply(). What was prepared and not applied goes back
// with the object.
//
// Used under the pager's lock.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "pager/forward.h"
#include "pager/residency.h"
#include "pager/sequences.h"

namespace kvpager {

class Sealing : PagerParts {
 public:
  Sealing(const PagerParts& parts, Residency& residency, Sequences& sequences,
          const Forward& forward);
  ~Sealing() { roll_back(); }
  Sealing(const Sealing&) = delete;
  Sealing& operator=(const Sealing&) = delete;

  // The chunks of the part that its first `count` positions to commit fill.
  void prepare(const ForwardPart& part, int64_t count, Provenance provenance);
  // After the last prepare(): what apply() needs of the ledger.
  void reserve_records();
  // Each chunk becomes its sequence's next sealed one. Does not fail.
  void apply();
  // The end of a chain goes first, as when a sequence is closed.
  void roll_back() noexcept;

 private:
  // A chunk about to be sealed, and what was allocated for it.
  struct Seal {
    Sequence* sequence = nullptr;
    RecordId open;
    SharedArray<TokenId> tokens;
    ChunkName name;
    Provenance provenance = Provenance::kExact;
    std::optional<RecordId> existing;  // an identical chunk, referenced
    bool heals = false;                // ... whose snapshot is damaged: it gets the home
    SharedArray<uint64_t> checksums;
    SlotId summary;
    Home home;
    bool has_home = false;
  };

  SharedArray<TokenId> tokens_of(const ForwardPart& part, int64_t first, int64_t last) const;
  ChunkName last_name(const Sequence& sequence) const;
  void prepare(Seal* seal);
  void find_identical(Seal* seal, BlockId block);
  void rewrite_spilled(Seal* seal, BlockId block);
  const SharedArray<uint64_t>& checksums(Seal* seal);
  void apply(Seal& seal, ChunkUse use);
  void share(Seal& seal, ChunkUse* use);
  void seal_open(Seal& seal);

  Residency& residency_;
  Sequences& sequences_;
  const Forward& forward_;
  std::vector<Seal> seals_;  // prepared, and not applied yet
};

}  // namespace kvpager
