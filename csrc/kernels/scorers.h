// The scorers that come with kvpager, for the registry.
#pragma once

#include <memory>

#include "kvpager/selection.h"

namespace kvpager {

// The mean key.
std::unique_ptr<Scorer> make_mean_scorer();

// Two bits per key dimension, every token its own score, the best token.
std::unique_ptr<Scorer> make_sketch_scorer();

// All keys in float32.
std::unique_ptr<Scorer> make_exact_scorer();

}  // namespace kvpager
