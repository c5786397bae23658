#include "kvpager/require.h"

#include <doctest/doctest.h>

#include <vector>

#include "core/slot_pool.h"
#include "died.h"
#include "kvpager/types.h"

namespace kvpager {
namespace {

using testing::last_words;

#ifdef KVPAGER_CHECK_INVARIANTS

TEST_CASE("a precondition that does not hold ends a checking build with its words and its line") {
  const std::string words = last_words([] {
    SlotPool<SlotId> pool(2);
    const SlotId slot = *pool.take();
    pool.give_back(slot);
    pool.give_back(slot);
  });
  CHECK(words.find("slot_pool.h:") != std::string::npos);
  CHECK(words.find("precondition does not hold: taken(id)") != std::string::npos);
}

TEST_CASE("an index beyond a vector ends a checking build") {
  const std::string words = last_words([] {
    const std::vector<int> none;
    volatile size_t index = 3;
    std::fprintf(stderr, "%d", none[index]);
  });
  CHECK(words.find("__n < this->size()") != std::string::npos);
}

#else

TEST_CASE("a precondition is not evaluated outside of a checking build") {
  int evaluated = 0;
  KVPAGER_REQUIRE(++evaluated == 0);
  CHECK(evaluated == 0);
}

#endif

TEST_CASE("a precondition that holds is evaluated once at most, and nothing comes of it") {
  CHECK(last_words([] {
          int evaluated = 0;
          KVPAGER_REQUIRE(++evaluated > 0);
          if (evaluated > 1) std::abort();
        }) == "lived");
}

}  // namespace
}  // namespace kvpager
