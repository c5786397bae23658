#include "pager/restore_checks.h"

#include <algorithm>
#include <vector>

#include "kvpager/error.h"

namespace kvpager {

void require_readable(const SnapshotReader& reader, const Config& config) {
  const SnapshotMeta& meta = reader.meta();
  if (!(meta.layout == config.layout)) {
    throw FingerprintMismatchError(
        str("layout: ", reader.path(), " holds chunks of another shape or dtype"));
  }
  if (meta.scorer != bits2::kName || meta.summary_page_bytes != config.summary_page_bytes) {
    throw FingerprintMismatchError(
        str("scorer: ", reader.path(), " has summaries of '", meta.scorer, "' (",
            meta.summary_page_bytes, " bytes), this version has '", bits2::kName, "' (",
            config.summary_page_bytes, " bytes); prefill the text again"));
  }
}

void require_released(const ReleasedText& before, const PagerOptions& options, int64_t saved,
                      const std::string& path) {
  const auto count = static_cast<int64_t>(before.tokens.size());
  if (count == 0) return;
  const int64_t c = options.layout.chunk_tokens;
  int64_t chunks = 0;
  bool counts_sound = true;
  for (const int64_t of_one : before.provenance) {
    counts_sound = counts_sound && of_one >= 0 && of_one <= count / c;
    chunks += counts_sound ? of_one : 0;
  }
  if (count % c != 0 || !counts_sound || chunks != count / c) {
    throw InvalidArgumentError(str("released tokens of ", path, ": ", count,
                                   ", expected whole chunks of ", c,
                                   " tokens, as many as their provenance counts"));
  }
  for (const TokenId id : before.tokens) {
    if (id < 0) throw InvalidArgumentError(str("released tokens of ", path, ": id ", id));
  }
  if (options.window == 0 || options.window > before.window) {
    throw FingerprintMismatchError(
        str("window: ", path, " holds no more than a window of ", before.window,
            " tokens shows, this pager's is ", options.window, options.window == 0 ? " (none)" : "",
            "; compute the text anew, or use a pager whose window is not wider"));
  }
  if (saved < options.window) {
    throw FingerprintMismatchError(str("window: ", path, " holds ", saved, " positions behind the ",
                                       count, " that were let go, expected at least the ",
                                       options.window, " of this pager's window"));
  }
}

namespace {

// The chain proves that tokens, order, fingerprint and salt are those the first `sealed` chunks were
// computed under. Each link is taken from the name before it as the file has it, which the link before
// has proved, so that none waits for another.
void verify_names(const SnapshotReader& reader, int64_t sealed, const ChunkName& base,
                  const ChunkNamer& namer) {
  constexpr int64_t kMost = 4;
  const SnapshotMeta& meta = reader.meta();
  const int64_t c = meta.layout.chunk_tokens;
  const auto name = [&](int64_t i) -> const ChunkName& {
    return i < 0 ? base : meta.chunks[static_cast<size_t>(i)].chain_hash;
  };
  for (int64_t first = 0; first < sealed; first += kMost) {
    const int64_t count = std::min(kMost, sealed - first);
    ChunkNamer::Link links[kMost];
    ChunkName names[kMost];
    for (int64_t i = 0; i < count; ++i) {
      const int64_t chunk = first + i;
      links[i] = {&name(chunk - 1), meta.tokens.data() + chunk * c,
                  meta.chunks[static_cast<size_t>(chunk)].provenance};
    }
    namer.next_of_each(links, static_cast<size_t>(count), c, names);
    for (int64_t i = 0; i < count; ++i) {
      if (names[i] == name(first + i)) continue;
      throw FingerprintMismatchError(
          str("salt: chunk ", first + i, " of ", reader.path(),
              " has a chain hash that this fingerprint, salt and its token ids do not give"));
    }
  }
}

}  // namespace

ChunkName last_name(const ChunkNamer& namer, const std::vector<TokenId>& tokens,
                    const ProvenanceCounts& counts, int64_t chunk_tokens) {
  ChunkName name;
  const TokenId* ids = tokens.data();
  for (size_t i = 0; i < counts.size(); ++i) {
    for (int64_t n = counts[i]; n-- > 0; ids += chunk_tokens) {
      name = namer.next(name, ids, chunk_tokens, static_cast<Provenance>(i));
    }
  }
  return name;
}

void verify_chain(const SnapshotReader& reader, int64_t sealed, const ReleasedText& before,
                  const std::string& name_space, const std::string& salt) {
  const int64_t c = reader.meta().layout.chunk_tokens;
  const ChunkNamer namer(name_space, salt);
  verify_names(reader, sealed, last_name(namer, before.tokens, before.provenance, c), namer);
}

}  // namespace kvpager
