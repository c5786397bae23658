// How many homes and summaries are taken (invariant 2): by chunks that sequences use and that need a home,
// by reservations for chunks to come, and homes by open chunks that are paged out. Together they never exceed what there is. Cached chunks, which
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
  // The same of homes alone.
  int64_t homes_left() const;

  int64_t reserved = 0;    // for chunks that are not sealed yet, over all sequences
  int64_t referenced = 0;  // records that need a home and are used by a sequence
  int64_t paged_out = 0;   // open records, which need no summary
  int64_t restored = 0;    // records backed by a snapshot, which need a summary alone

  const Config& config;
};

// Homes that stay free for what is about to need them, while blocks are allocated: an open chunk that gives up
// its block takes a home.
class HomesAside {
 public:
  // CapacityError naming `action`.
  HomesAside(HomeBudget& budget, int64_t homes, const char* action)
      : budget_(budget), homes_(homes) {
    if (homes > 0) budget.require(homes, action);
    budget.reserved += homes;
  }
  ~HomesAside() { budget_.reserved -= homes_; }
  HomesAside(const HomesAside&) = delete;
  HomesAside& operator=(const HomesAside&) = delete;

 private:
  HomeBudget& budget_;
  const int64_t homes_;
};

}  // namespace kvpager
