// How many homes and summaries are taken (invariant 2): by chunks that sequences use and that need a home,
// and by reservations for chunks to come. Together they never exceed what there is. Cached chunks, which
// no sequence uses, give theirs up when one is asked for.
//
// Used under the pager's lock.
#pragma once

#include <cstdint>

#include "pager/config.h"

namespace kvpager {

struct HomeBudget {
  explicit HomeBudget(const Config& of) : config(of) {}

  // CapacityError naming `action` and the bytes, unless `more` homes and summaries can be reserved.
  void require(int64_t more, const char* action) const;
  // How many more can be reserved.
  int64_t left() const;

  int64_t reserved = 0;    // for chunks that are not sealed yet, over all sequences
  int64_t referenced = 0;  // records that need a home and are used by a sequence
  int64_t restored = 0;    // records backed by a snapshot, which need a summary alone

  const Config& config;
};

}  // namespace kvpager
