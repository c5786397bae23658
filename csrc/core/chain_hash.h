// The name of a sealed chunk: a hash of all tokens up to its end, under a namespace.
//
//   root  = H(namespace_key, salt)      chunk = H(parent hash, the chunk's token ids, provenance)
//
// Chunks that are not exact get other hashes from the first one on, so the two kinds never meet
// (invariant 10). A hash finds a candidate; token ids and the parent's hash are compared before it
// is served.
#pragma once

#include <string>

#include "kvpager/types.h"

namespace kvpager {

Hash128 chain_root(const std::string& namespace_key, const std::string& salt);
Hash128 chain_next(const Hash128& parent, const TokenId* tokens, int64_t count,
                   Provenance provenance);

}  // namespace kvpager
