// What the device's kernels are told of a scorer.
#pragma once

#include <string>

#include "cuda/params.h"
#include "kvpager/layout.h"
#include "kvpager/selection.h"

namespace kvpager::gpu {

inline ScorerParams scorer_params(const Scorer& scorer, const Layout& layout) {
  const std::string name = scorer.name();
  ScorerParams params;
  params.family = name == "exact"  ? ScorerParams::Family::kExact
                  : name == "mean" ? ScorerParams::Family::kMean
                                   : ScorerParams::Family::kSketch;
  params.summary_page_bytes = scorer.summary_bytes(layout);
  return params;
}

}  // namespace kvpager::gpu
