// What a save writes from and what a restore makes: sequences whose sealed chunks are lent to a writer, and
// sequences whose chunks are still in a file.
//
//   freeze.cc          sealed chunks by reference, a tail by copy
//   restore.cc         a sequence whose chunks are in a snapshot
//   restore_checks.cc  whether this pager can use the snapshot
//
// What throws has changed nothing. Used under the pager's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvpager/snapshot.h"
#include "pager/residency.h"
#include "pager/sequences.h"

namespace kvpager {

class Snapshots : PagerParts {
 public:
  Snapshots(const PagerParts& parts, Residency& residency, Sequences& sequences);

  // A frozen sequence, which no forward can name, of the first `upto` positions (-1: all). Sequences::thaw
  // ends it.
  SequenceId freeze(SequenceId id, int64_t upto, SnapshotMeta* meta, std::vector<std::byte>* tail);

  // As Pager::restore.
  SequenceId restore(const std::shared_ptr<SnapshotReader>& reader, const std::string& salt,
                     Provenance provenance, const std::string& file_namespace, int64_t upto,
                     const ReleasedText& before);

 private:
  int64_t freezable_length(const Sequence& source, int64_t upto) const;
  void describe(const Sequence& source, const SharedArray<TokenId>& tokens, SnapshotMeta* meta,
                std::vector<std::byte>* tail);
  SnapshotChunk copy_tail(const Sequence& source, int64_t chunk, int32_t valid,
                          std::vector<std::byte>* tail);

  Residency& residency_;
  Sequences& sequences_;
};

}  // namespace kvpager
