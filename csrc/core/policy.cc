#include "core/policy.h"

#include <tuple>

namespace kvpager {

bool evicted_before(Policy policy, const VictimFacts& a, const VictimFacts& b) {
  const double score_a = policy == Policy::kQk ? a.score : 0;
  const double score_b = policy == Policy::kQk ? b.score : 0;
  return std::tuple(a.sheltered, score_a, a.last_use, a.record.value()) <
         std::tuple(b.sheltered, score_b, b.last_use, b.record.value());
}

bool worth_recalling(Policy policy, double hysteresis, const VictimFacts& candidate,
                     const VictimFacts& victim) {
  if (victim.sheltered) return false;
  if (policy == Policy::kLru) return candidate.last_use > victim.last_use;
  return candidate.score > victim.score * (1 + hysteresis);
}

}  // namespace kvpager
