// The chunk hashes of snapshots 1.0 and 1.1: XXH3-128, without a key.
//
//   root  = H(namespace_key, salt)      chunk = H(parent hash, the chunk's token ids, provenance)
//
// They show that a file is not damaged or mixed up. An author of token ids can make two texts of one
// hash, so nothing is found or shared by them: chunks of such a file get names as they are read.
#pragma once

#include <string>

#include "kvpager/types.h"

namespace kvpager {

Hash128 legacy_root(const std::string& namespace_key, const std::string& salt);
Hash128 legacy_next(const Hash128& parent, const TokenId* tokens, int64_t count,
                    Provenance provenance);

}  // namespace kvpager
