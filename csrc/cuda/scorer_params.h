// What the device's kernels are told of a scorer.
#pragma once

#include <optional>
#include <string>

#include "cuda/params.h"
#include "kvpager/layout.h"
#include "kvpager/selection.h"

namespace kvpager::gpu {

// Empty for scorers that were registered by users: they run on the processor only. Names of the
// built-in ones cannot be registered again, so that a name says which kernels make its bits.
inline std::optional<ScorerParams> scorer_params(const Scorer& scorer, const Layout& layout) {
  const std::string name = scorer.name();
  ScorerParams params;
  params.summary_page_bytes = scorer.summary_bytes(layout);
  if (name == "exact") {
    params.family = ScorerParams::Family::kExact;
  } else if (name == "bits1" || name == "bits2") {
    params.family = ScorerParams::Family::kSketch;
    params.bits = name == "bits1" ? 1 : 2;
  } else if (name == "mean" || name == "meanstd" || name == "minmax" || name == "sub16") {
    params.family = ScorerParams::Family::kBoxes;
    params.boxes = name == "sub16" ? layout.chunk_tokens / 16 : 1;
    params.spread = name == "mean" ? 0 : name == "meanstd" ? 1 : 2;
  } else {
    return std::nullopt;
  }
  return params;
}

}  // namespace kvpager::gpu
