// The names of a text's sealed chunks under one namespace (a fingerprint) and salt.
//
//   key  = BLAKE2b-256("kvpager key", lengths of namespace and salt, namespace, salt)
//   name = BLAKE2b-256(key, "kvpager chunk", parent's name, provenance, number of ids, ids)
//
// The parent of a text's first chunk has the empty name. So a name stands for all token ids up to its
// chunk's end, for the provenance of each chunk, and for namespace and salt; two texts with one name
// would be a collision of BLAKE2b, and without the salt none can be computed. Chunks that are not
// exact have other names from the first one on, so that the kinds never meet (invariant 10).
#pragma once

#include <cstddef>
#include <string>

#include "core/blake2b.h"
#include "kvpager/types.h"

namespace kvpager {

class ChunkNamer {
 public:
  ChunkNamer(const std::string& namespace_key, const std::string& salt);

  ChunkName next(const ChunkName& parent, const TokenId* tokens, int64_t count,
                 Provenance provenance) const;

  // A chunk whose parent's name is known already.
  struct Link {
    const ChunkName* parent;
    const TokenId* tokens;
    Provenance provenance;
  };
  // `next` of each link, all of `tokens` ids, faster than one after the other; out[count].
  void next_of_each(const Link* links, size_t count, int64_t tokens, ChunkName* out) const;

 private:
  Blake2b hash_;
};

}  // namespace kvpager
