#include <string>
#include <utility>
#include <vector>

#include "kernels/scorers.h"
#include "kvpager/error.h"

namespace kvpager {
namespace {

using Registry = std::vector<std::unique_ptr<Scorer>>;

Registry& registry() {
  static Registry scorers = [] {
    Registry all;
    all.push_back(make_box_scorer(BoxKind::kMean));
    all.push_back(make_box_scorer(BoxKind::kMeanStd));
    all.push_back(make_box_scorer(BoxKind::kMinMax));
    all.push_back(make_box_scorer(BoxKind::kSub16));
    all.push_back(make_sketch_scorer(1));
    all.push_back(make_sketch_scorer(2));
    all.push_back(make_exact_scorer());
    return all;
  }();
  return scorers;
}

const Scorer* lookup(const std::string& name) {
  for (const auto& scorer : registry()) {
    if (name == scorer->name()) return scorer.get();
  }
  return nullptr;
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
  if (const Scorer* scorer = lookup(name)) return *scorer;
  std::string known;
  for (const std::string& other : scorer_names()) known += (known.empty() ? "" : ", ") + other;
  throw InvalidArgumentError(str("scorer is \"", name, "\"; expected one of ", known));
}

std::vector<std::string> scorer_names() {
  std::vector<std::string> names;
  for (const auto& scorer : registry()) names.emplace_back(scorer->name());
  return names;
}

void register_scorer(std::unique_ptr<Scorer> scorer) {
  if (scorer == nullptr) throw InvalidArgumentError("scorer is null; expected a scorer");
  if (lookup(scorer->name()) != nullptr) {
    throw InvalidArgumentError(str("scorer \"", scorer->name(), "\" is already registered"));
  }
  registry().push_back(std::move(scorer));
}

}  // namespace kvpager
