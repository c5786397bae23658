// Problems drawn at random: dtypes, shapes, rows of several sequences in any order among padding,
// selections, windows, caps, sinks, threads, waves, tiers and modes. Every row of each has the bits of
// the scalar reference, which knows of no other row.
#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"
#include "random_problem.h"

namespace kvpager::testing {
namespace {

TEST_CASE("a row of any problem has the bits of the reference that computes it alone") {
  const auto tables = runnable_kernels();
  for (uint32_t seed = 0; seed < 400; ++seed) {
    CAPTURE(seed);
    Dice dice(seed);
    const Shape shape = random_shape(dice);
    RandomRows made = random_rows(dice, shape, seed);
    const std::vector<Sequence>& sequences = made.sequences;
    const std::vector<Sequence*>& pointers = made.pointers;
    const std::vector<Row>& rows = made.rows;
    RunOptions options;
    options.threads = dice.pick({1, 1, 2, 3, 5});
    options.mode = kModes[static_cast<size_t>(dice.roll(0, 5))].bits;
    for (int64_t cut = 1; dice.one_in(2); cut += dice.roll(1, 2)) options.cuts.push_back(cut);
    const KernelTable& table =
        *tables[static_cast<size_t>(dice.roll(0, static_cast<int>(tables.size()) - 1))];
    const KernelOverride tier(table);
    CAPTURE(std::string(table.name));
    const auto got = attend(shape, pointers, rows, options);
    int64_t wrong = 0;
    // Every row of a small problem, some of a large one.
    for (size_t i = 0; i < rows.size(); i += rows.size() > 16 ? 7 : 1) {
      if (rows[i].sequence < 0) {
        wrong +=
            std::count_if(got[i].begin(), got[i].end(), [](float x) { return float_bits(x) != 0; });
      } else {
        const Sequence& sequence = sequences[static_cast<size_t>(rows[i].sequence)];
        wrong += differing_bits(got[i], reference_in_order(shape, sequence, rows[i]));
      }
    }
    CHECK(wrong == 0);
  }
}

}  // namespace
}  // namespace kvpager::testing
