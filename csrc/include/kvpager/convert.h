// Snapshots in another dtype. Attention over what was rounded again is another computation: every chunk of
// such a content is approximate, under names of its own.
#pragma once

#include <memory>
#include <string>

#include "kvpager/snapshot.h"

namespace kvpager {

// What a converted content's chunks are named under: kvpager/snapshot.h, core/chunk_namer.h.
struct ConvertedNames {
  std::string namespace_key;  // the fingerprint that is saved with it
  std::string salt;
  ReleasedText before;  // of the text, what `source` does not have
};

// `source` with its keys and values in the dtypes of `layout`, which has the source's shape. Each chunk is
// converted whenever it is read, with the bits that a pager of that layout stores for the numbers that
// the source's bytes stand for; summaries are made of them. There are no checksums before it is
// written to a self-contained file: no manifest can be made of it.
// InvalidArgumentError: another shape. Reading a chunk throws what the source does, and
// InvalidArgumentError if a number does not fit the dtype.
std::shared_ptr<SnapshotContent> converted(std::shared_ptr<const SnapshotContent> source,
                                           const Layout& layout, const ConvertedNames& names);

}  // namespace kvpager
