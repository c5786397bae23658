// Which record may stand where in a text. Names find, and identity decides (docs/adr/0038): a chunk must
// have been computed after the very record that is before it, and so on to the beginning, so that all token
// ids before it were compared.
#pragma once

#include <cstdint>

#include "core/ledger.h"
#include "kvpager/pager.h"

namespace kvpager {

// Whether a chunk that was found by its name may be used as chunk `chunk` of a text whose chunk before it is
// `previous`; none where the text has none. With a window the chunks before may be gone, in the text or in
// the ledger. There the name alone says what they were, which is sound as far as BLAKE2b has no collisions.
bool can_follow(const Ledger& ledger, const PagerOptions& options, RecordId found, int64_t chunk,
                RecordId previous);

// Makes an exact chunk findable. Of sequences that seal the same text in one forward each has a record of
// its own, and the first one's is found. The others get its serial, so that what is sealed behind them is
// found too.
void publish(Ledger* ledger, const PagerOptions& options, RecordId id, RecordId previous);

}  // namespace kvpager
