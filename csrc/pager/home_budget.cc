#include "pager/home_budget.h"

#include <algorithm>
#include <limits>
#include <string>

#include "kvpager/error.h"

namespace kvpager {
namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

// What so many chunks take, as messages say it.
std::string bytes_of(int64_t chunks, int64_t each) {
  if (chunks > kMost / each) return str("more than ", kMost, " bytes");
  return str(chunks * each, " bytes");
}

// The sum of two counts, or the largest there is.
int64_t total_of(int64_t a, int64_t b) { return a > kMost - b ? kMost : a + b; }

}  // namespace

void HomeBudget::require(int64_t more, const char* action) const {
  const int64_t chunk = config.layout.chunk_bytes();
  const int64_t committed = referenced + reserved + paged_out;
  const int64_t all = total_of(committed, more);
  if (all > config.home_capacity()) {
    const std::string bytes = bytes_of(all, chunk);
    throw CapacityError(
        str(action, ": ", more, " more chunks need ", bytes_of(more, chunk), "; with the ",
            committed, " chunks already promised that is ", bytes, ", and there is room for ",
            config.home_capacity() * chunk, " (host_bytes=", config.options.host_bytes,
            ", disk_bytes=", config.options.disk_bytes, "). ",
            config.blocks_are_homes() ? "Give a host_bytes" : "Raise host_bytes", " to at least ",
            bytes, ", or configure disk_path and disk_bytes, or close sessions."));
  }
  const int64_t summaries = total_of(referenced + reserved + restored, more);
  if (summaries > config.slots.summaries) {
    throw CapacityError(str(action, ": summaries of ", summaries, " chunks need ",
                            bytes_of(summaries, config.summary_slot_bytes),
                            "; summary_bytes=", config.slots.summaries * config.summary_slot_bytes,
                            ". Raise summary_bytes or close sessions."));
  }
}

int64_t HomeBudget::left() const {
  return std::min(homes_left(), config.slots.summaries - referenced - reserved - restored);
}

int64_t HomeBudget::homes_left() const {
  return config.home_capacity() - referenced - reserved - paged_out;
}

}  // namespace kvpager
