#include <memory>
#include <string>
#include <vector>

#include "kernels/scorers.h"
#include "kvpager/error.h"

namespace kvpager {
namespace {

const std::vector<std::unique_ptr<Scorer>>& all_scorers() {
  static const auto scorers = [] {
    std::vector<std::unique_ptr<Scorer>> all;
    all.push_back(make_mean_scorer());
    all.push_back(make_sketch_scorer());
    all.push_back(make_exact_scorer());
    return all;
  }();
  return scorers;
}

}  // namespace

void Scorer::score_rows(const Layout& layout, int group, int64_t rows,
                        const std::byte* const* queries, const std::byte* const* summaries,
                        int64_t count, double* const* scores) const {
  for (int64_t row = 0; row < rows; ++row) {
    score(layout, group, queries[row], summaries, count, scores[row]);
  }
}

const Scorer& find_scorer(const std::string& name) {
  for (const auto& scorer : all_scorers()) {
    if (name == scorer->name()) return *scorer;
  }
  std::string known;
  for (const std::string& other : scorer_names()) known += (known.empty() ? "" : ", ") + other;
  throw InvalidArgumentError(str("scorer is \"", name, "\"; expected one of ", known));
}

std::vector<std::string> scorer_names() {
  std::vector<std::string> names;
  for (const auto& scorer : all_scorers()) names.emplace_back(scorer->name());
  return names;
}

}  // namespace kvpager
