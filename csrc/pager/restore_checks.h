// Whether a pager can go on from a snapshot: shapes, scorer, window, and the proof that the file's chunks
// are those of the tokens, fingerprint and salt that it is restored under.
#pragma once

#include <cstdint>
#include <string>

#include "core/chunk_namer.h"
#include "core/sequence.h"
#include "kvpager/snapshot.h"
#include "pager/config.h"

namespace kvpager {

// FingerprintMismatchError unless its chunks have this shape and its summaries are bits2's.
void require_readable(const SnapshotReader& reader, const Config& config);

// Throws unless `before` is the beginning of a text of which a pager with these options can do without
// the chunks, given the `saved` positions behind it.
void require_released(const ReleasedText& before, const PagerOptions& options, int64_t saved,
                      const std::string& path);

// FingerprintMismatchError unless the names of the first `sealed` chunks are those that their tokens have
// behind `before`, under this namespace and salt.
void verify_chain(const SnapshotReader& reader, int64_t sealed, const ReleasedText& before,
                  const std::string& name_space, const std::string& salt);

// The name of the last chunk of these tokens, `counts[i]` chunks of each provenance in turn.
ChunkName last_name(const ChunkNamer& namer, const std::vector<TokenId>& tokens,
                    const ProvenanceCounts& counts, int64_t chunk_tokens);

}  // namespace kvpager
