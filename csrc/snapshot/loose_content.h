// Content made of sealed chunks that lie anywhere in memory: what is saved beside a sequence and is no
// sequence itself, such as the states of recurrent layers. Immutable; thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kvpager/snapshot.h"

namespace kvpager::snapshot {

class LooseContent final : public SnapshotContent {
 public:
  struct Chunk {
    ChunkName chain_hash;  // by which it is found; not zero
    Provenance provenance = Provenance::kExact;
    std::shared_ptr<const std::byte> payload;  // [layout.chunk_bytes()]
  };

  // `tokens`: layout.chunk_tokens ids for each chunk. There are no summaries. Checksums are of the
  // payloads as they are now. InvalidArgumentError: no chunks, another number of tokens, or a chunk
  // without a hash or payload.
  LooseContent(const Layout& layout, std::vector<TokenId> tokens, std::vector<Chunk> chunks);
  ~LooseContent() override = default;

  const SnapshotMeta& meta() const override { return meta_; }
  const std::byte* borrow_chunk(int64_t chunk, std::byte* scratch) const override;
  void give_back_chunk(int64_t) const override {}
  void read_summary(int64_t chunk, std::byte* out) const override;

 private:
  const std::byte* payload(int64_t chunk) const;

  SnapshotMeta meta_;
  std::vector<std::shared_ptr<const std::byte>> payload_;
};

}  // namespace kvpager::snapshot
