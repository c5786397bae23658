// Chunks that are being read: they stay in their blocks and slots while this counts them as read.
// Used under the pager's lock.
#pragma once

#include <vector>

#include "core/ledger.h"

namespace kvpager {

class Readers {
 public:
  explicit Readers(Ledger& ledger) : ledger_(&ledger) {}
  ~Readers() { release(); }
  Readers(const Readers&) = delete;
  Readers& operator=(const Readers&) = delete;

  // True: it had no reader before.
  bool add(RecordId id) {
    records_.push_back(id);
    return (*ledger_)[id].readers++ == 0;
  }
  // Room for `more`, so that adding them allocates nothing.
  void expect(int64_t more) { records_.reserve(records_.size() + static_cast<size_t>(more)); }
  void release() noexcept {
    for (const RecordId id : records_) --(*ledger_)[id].readers;
    records_.clear();
  }

 private:
  Ledger* ledger_;
  std::vector<RecordId> records_;
};

}  // namespace kvpager
