#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "kvpager/error.h"
#include "kvpager/require.h"
#include "kvpager/selection.h"

namespace kvpager {
namespace {

// Orders that are gathered beyond twice those wanted before the best are picked out.
constexpr int64_t kSpareOrders = 64;

// Bounds of a configuration, far beyond any text: sums of two positions stay within 64 bits.
constexpr int64_t kMostTokens = int64_t{1} << 40;
constexpr size_t kMostRanges = 65536;  // each row looks at every one

// Half-open chunk ranges of one row.
struct Spans {
  int64_t own = 0;           // the row's own chunk, the last one it sees
  int64_t low = 0;           // the first chunk a sliding window leaves in
  int64_t sinks_end = 0;     // [0, sinks_end)
  int64_t recent_begin = 0;  // [recent_begin, own]
};

Spans spans_of(const Selection& selection, int64_t chunk_tokens, int64_t position, int64_t window) {
  Spans spans;
  spans.own = position / chunk_tokens;
  if (window > 0 && position >= window) spans.low = (position - window + 1) / chunk_tokens;
  if (selection.kind != Selection::Kind::kDense) {
    spans.sinks_end = (selection.sinks + chunk_tokens - 1) / chunk_tokens;
    spans.recent_begin = std::max<int64_t>(0, position + 1 - selection.recent) / chunk_tokens;
  }
  return spans;
}

// A double as an integer of the same order; NaN below everything, both zeros equal. Bits alone: what
// arithmetic makes of zeros and denormals depends on the calling thread's settings.
uint64_t order_of(double score) {
  uint64_t bits;
  std::memcpy(&bits, &score, sizeof bits);
  constexpr uint64_t kSign = uint64_t{1} << 63;
  constexpr uint64_t kInfinity = uint64_t{0x7FF} << 52;
  if ((bits & ~kSign) > kInfinity) return 0;
  if (bits == kSign) return kSign;
  return (bits & kSign) != 0 ? ~bits : bits | kSign;
}

// Whether ascending chunks belong to `always`. One pass, no search: the ranges ascend.
class AlwaysCursor {
 public:
  AlwaysCursor(const Selection& selection, int64_t chunk_tokens)
      : ranges_(selection.kind == Selection::Kind::kTopK && !selection.always.empty()
                    ? &selection.always
                    : nullptr),
        chunk_tokens_(chunk_tokens) {}

  // REQUIRES: chunks are asked for in ascending order.
  bool holds(int64_t chunk) {
    if (ranges_ == nullptr) return false;
    const int64_t start = chunk * chunk_tokens_;
    KVPAGER_REQUIRE(next_ == 0 || (*ranges_)[next_ - 1].second <= start);
    while (next_ < ranges_->size() && (*ranges_)[next_].second <= start) ++next_;
    return next_ < ranges_->size() && (*ranges_)[next_].first < start + chunk_tokens_;
  }

 private:
  const std::vector<std::pair<int64_t, int64_t>>* ranges_;
  int64_t chunk_tokens_;
  size_t next_ = 0;
};

void append_range(int64_t begin, int64_t end, std::vector<int32_t>* out) {
  for (int64_t chunk = begin; chunk < end; ++chunk) out->push_back(static_cast<int32_t>(chunk));
}

}  // namespace

void Selection::validate(int64_t chunk_tokens, int64_t rows) const {
  if (chunk_tokens < 1) {
    throw InvalidArgumentError(str("chunk_tokens is ", chunk_tokens, "; expected at least 1"));
  }
  if (kind == Kind::kDense) return;
  if (kind == Kind::kTopK && chunks < 1) {
    throw InvalidArgumentError(str("selection.chunks is ", chunks, "; expected at least 1"));
  }
  if (sinks < 0 || sinks > kMostTokens) {
    throw InvalidArgumentError(
        str("selection.sinks is ", sinks, "; expected 0 to ", kMostTokens, " tokens"));
  }
  if (recent > kMostTokens) {
    throw InvalidArgumentError(
        str("selection.recent is ", recent, "; expected at most ", kMostTokens, " tokens"));
  }
  if (recent < rows || recent < 1) {
    throw InvalidArgumentError(str("selection.recent is ", recent,
                                   "; expected at least rows = ", rows,
                                   ", so that every candidate is sealed before it is chosen"));
  }
  if (kind != Kind::kTopK) return;
  if (always.size() > kMostRanges) {
    throw InvalidArgumentError(
        str("selection.always has ", always.size(), " ranges; expected at most ", kMostRanges));
  }
  int64_t previous = 0;
  for (size_t i = 0; i < always.size(); ++i) {
    const auto& range = always[i];
    if (range.first < 0 || range.first >= range.second || range.second > kMostTokens) {
      throw InvalidArgumentError(str("selection.always[", i, "] is [", range.first, ", ",
                                     range.second,
                                     "); expected 0 <= begin < end <= ", kMostTokens));
    }
    if (range.first < previous) {
      throw InvalidArgumentError(str("selection.always[", i, "] begins at ", range.first,
                                     "; expected ", previous,
                                     " or more: ranges ascend and do not overlap"));
    }
    previous = range.second;
  }
}

CandidateRange candidate_range(const Selection& selection, int64_t chunk_tokens, int64_t position,
                               int64_t held) {
  if (selection.kind != Selection::Kind::kTopK) return {};
  const Spans spans = spans_of(selection, chunk_tokens, position, 0);
  return {std::min(std::max(spans.sinks_end, held), spans.recent_begin), spans.recent_begin};
}

void select_chunks(const Selection& selection, int64_t chunk_tokens, int64_t position,
                   int64_t window, const double* scores, std::vector<int32_t>* out, int64_t held) {
  const Spans spans = spans_of(selection, chunk_tokens, position, window);
  KVPAGER_REQUIRE(held <= spans.low);
  const int64_t end = spans.own + 1;
  if (selection.kind == Selection::Kind::kDense) {
    append_range(spans.low, end, out);
    return;
  }
  const int64_t sinks_end = std::min(spans.sinks_end, end);
  append_range(spans.low, sinks_end, out);
  const int64_t middle_begin = std::max(spans.low, sinks_end);
  const int64_t middle_end = std::max(middle_begin, spans.recent_begin);
  if (selection.kind == Selection::Kind::kTopK) {
    const CandidateRange candidates = candidate_range(selection, chunk_tokens, position, held);
    // Everything above the k-th order is in; of its equals, the first ones by id. Few orders are
    // ever kept: one that is not above the k-th best so far cannot raise it.
    const int64_t places = selection.chunks;
    const size_t most = static_cast<size_t>(2 * places + kSpareOrders);
    std::vector<uint64_t> orders;
    orders.reserve(std::min(most, static_cast<size_t>(middle_end - middle_begin)));
    int64_t seen = 0;
    uint64_t threshold = 0;
    const auto keep_best = [&] {
      const auto kth = orders.begin() + (places - 1);
      std::nth_element(orders.begin(), kth, orders.end(), std::greater<uint64_t>());
      threshold = *kth;
      orders.resize(static_cast<size_t>(places));
    };
    AlwaysCursor counted(selection, chunk_tokens);
    for (int64_t chunk = middle_begin; chunk < middle_end; ++chunk) {
      if (counted.holds(chunk)) continue;
      const uint64_t order = order_of(scores[chunk - candidates.begin]);
      if (seen++ >= places && order <= threshold) continue;
      orders.push_back(order);
      if (orders.size() == most) keep_best();
    }
    int64_t ties = std::numeric_limits<int64_t>::max();
    if (seen > places) {
      keep_best();
      ties = places - std::count_if(orders.begin(), orders.end(),
                                    [&](uint64_t order) { return order > threshold; });
    } else {
      threshold = 0;
    }
    AlwaysCursor always(selection, chunk_tokens);
    for (int64_t chunk = middle_begin; chunk < middle_end; ++chunk) {
      bool chosen = always.holds(chunk);
      if (!chosen) {
        const uint64_t order = order_of(scores[chunk - candidates.begin]);
        chosen = order > threshold || (order == threshold && ties-- > 0);
      }
      if (chosen) out->push_back(static_cast<int32_t>(chunk));
    }
  }
  append_range(middle_end, end, out);
}

}  // namespace kvpager
