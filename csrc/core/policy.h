// Residency policies: which resident chunk leaves when a block is needed. A policy sees ledger
// facts and nothing else, and what it decides changes no result, only where bytes are.
#pragma once

#include <cstdint>
#include <vector>

#include "kvpager/pager.h"
#include "kvpager/types.h"

namespace kvpager {

struct VictimFacts {
  RecordId record;
  bool sheltered = false;  // a sink or in some recent window: leaves only when nothing else can
  double score = 0;
  uint64_t last_use = 0;

  friend bool operator==(const VictimFacts& a, const VictimFacts& b) {
    return a.record == b.record && a.sheltered == b.sheltered && a.score == b.score &&
           a.last_use == b.last_use;
  }
};

// Total order: true if `a` is to be evicted before `b`. LRU: older use first; QK: lower score first,
// then older.
bool evicted_before(Policy policy, const VictimFacts& a, const VictimFacts& b);

// Whether loading `candidate` is worth evicting `victim`: sheltered chunks stay, and under QK
// the candidate must beat the victim's score by the hysteresis fraction, so that near-ties do not
// swap forever.
bool worth_recalling(Policy policy, double hysteresis, const VictimFacts& candidate,
                     const VictimFacts& victim);

}  // namespace kvpager
