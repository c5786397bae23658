#include "pager/lease.h"

#include "kvpager/error.h"

namespace kvpager {

void BlockKind::require(Pager::Impl& pager, int64_t count, const char* action) {
  pager.mutex.held();
  pager.require_blocks(count, action);
}

BlockId BlockKind::take(Pager::Impl& pager) {
  pager.mutex.held();
  const auto block = pager.acquire_block();
  if (!block) throw CapacityError("no block is free, though there was room for one");
  return *block;
}

void BlockKind::give_back(Pager::Impl& pager, BlockId block) noexcept {
  pager.mutex.held();
  pager.free_block(block);
}

void HostSlotKind::give_back(Pager::Impl& pager, SlotId slot) noexcept {
  pager.mutex.held();
  pager.free_host_slot(slot);
}

SlotId SummaryKind::take(Pager::Impl& pager) {
  pager.mutex.held();
  return pager.take_summary_slot();
}

void SummaryKind::give_back(Pager::Impl& pager, SlotId slot) noexcept {
  pager.mutex.held();
  pager.summary_slots.give_back(slot);
}

}  // namespace kvpager
