// The scorers that come with kvpager, for the registry.
#pragma once

#include <memory>

#include "kvpager/selection.h"

namespace kvpager {

// score = q . centre + |q| . spread per box of tokens, the best box: mean, meanstd, minmax, sub16.
enum class BoxKind { kMean, kMeanStd, kMinMax, kSub16 };
std::unique_ptr<Scorer> make_box_scorer(BoxKind kind);

// One or two bits per key dimension, every token its own score, the best token: bits1, bits2.
std::unique_ptr<Scorer> make_sketch_scorer(int bits);

// All keys in float32.
std::unique_ptr<Scorer> make_exact_scorer();

}  // namespace kvpager
