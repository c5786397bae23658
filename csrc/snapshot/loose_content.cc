#include "snapshot/loose_content.h"

#include <utility>

#include "kvpager/error.h"
#include "snapshot/metadata.h"

namespace kvpager::snapshot {

LooseContent::LooseContent(const Layout& layout, std::vector<TokenId> tokens,
                           std::vector<Chunk> chunks) {
  if (const auto problem = check_geometry(layout, /*summary_page_bytes=*/0)) {
    throw InvalidArgumentError(
        str(problem->field, ": ", problem->value, ", expected ", problem->expected));
  }
  const size_t expected = chunks.size() * static_cast<size_t>(layout.chunk_tokens);
  if (chunks.empty()) {
    throw InvalidArgumentError("chunks: there are none, expected at least one");
  }
  if (tokens.size() != expected) {
    throw InvalidArgumentError(str("tokens: ", tokens.size(), " ids, expected ", expected, ", ",
                                   layout.chunk_tokens, " for each of ", chunks.size(), " chunks"));
  }
  meta_.layout = layout;
  meta_.tokens = std::move(tokens);
  for (size_t c = 0; c < chunks.size(); ++c) {
    Chunk& given = chunks[c];
    if (given.chain_hash.empty()) {
      throw InvalidArgumentError(str("chunks[", c, "].chain_hash: zero, which is a tail's"));
    }
    if (given.payload == nullptr) {
      throw InvalidArgumentError(
          str("chunks[", c, "].payload: null, expected ", layout.chunk_bytes(), " bytes"));
    }
    std::vector<uint64_t> checksums;
    for (int layer = 0; layer < layout.layers; ++layer) {
      checksums.push_back(slice_checksum(given.payload.get() + layout.slice_offset(layer),
                                         layout.slice_bytes(layer)));
    }
    SnapshotChunk record;
    record.valid = layout.chunk_tokens;
    record.provenance = given.provenance;
    record.chain_hash = given.chain_hash;
    record.slice_checksum = std::move(checksums);
    meta_.chunks.push_back(std::move(record));
    payload_.push_back(std::move(given.payload));
  }
}

const std::byte* LooseContent::borrow_chunk(int64_t chunk, std::byte*) const {
  return payload(chunk);
}

void LooseContent::read_summary(int64_t chunk, std::byte*) const { payload(chunk); }

const std::byte* LooseContent::payload(int64_t chunk) const {
  if (chunk < 0 || chunk >= static_cast<int64_t>(payload_.size())) {
    throw InvalidArgumentError(str("chunk is ", chunk, ", expected [0, ", payload_.size(), ")"));
  }
  return payload_[static_cast<size_t>(chunk)].get();
}

}  // namespace kvpager::snapshot
