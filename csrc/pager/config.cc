#include "pager/config.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "kvpager/attention.h"
#include "kvpager/error.h"

namespace kvpager {
namespace {

constexpr int64_t kMostWindow = int64_t{1} << 40;
constexpr int32_t kMostHeads = 65536;
constexpr int64_t kMostBytes = int64_t{1} << 50;  // of a budget: more than there is memory
constexpr int64_t kMostSlots =
    std::numeric_limits<int32_t>::max();  // what BlockId and SlotId count

// Blocks of chunks of c tokens that hold `rows` positions, wherever the first one lies.
int64_t blocks_for(int64_t rows, int64_t c) { return (c - 1 + rows + c - 1) / c; }

void require_rows(const PagerOptions& options) {
  if (options.rows < 1 || options.rows > 4096) {
    throw InvalidArgumentError(str("rows: ", options.rows, ", expected 1 to 4096"));
  }
  for (size_t i = 0; i < options.smaller_rows.size(); ++i) {
    const int64_t rows = options.smaller_rows[i];
    if (rows < 1 || rows >= options.rows || (i > 0 && rows <= options.smaller_rows[i - 1])) {
      throw InvalidArgumentError(str("smaller_rows[", i, "]: ", rows,
                                     ", expected ascending counts from 1 to ", options.rows - 1));
    }
  }
}

void require_budgets(const PagerOptions& options) {
  const int64_t c = options.layout.chunk_tokens;
  const int64_t frontier = blocks_for(options.rows, c);
  if (options.pool_blocks < frontier + 1) {
    throw InvalidArgumentError(
        str("pool_tokens: ", options.pool_blocks * c, " (", options.pool_blocks, " chunks of ", c,
            ") cannot hold the ", frontier, " unsealed chunks a forward of ", options.rows,
            " rows needs beside one sealed chunk; expected at least ", (frontier + 1) * c));
  }
  const int64_t chunk = options.layout.chunk_bytes();
  if (options.pool_blocks > std::min(kMostSlots, kMostBytes / chunk)) {
    throw InvalidArgumentError(str("pool_tokens: ", options.pool_blocks, " chunks of ", c,
                                   " tokens, of ", chunk, " bytes each; expected at most ",
                                   std::min(kMostSlots, kMostBytes / chunk), " chunks"));
  }
  for (const auto& [name, bytes] :
       {std::pair<const char*, int64_t>("host_bytes", options.host_bytes),
        {"disk_bytes", options.disk_bytes}}) {
    const int64_t most = bytes / chunk > kMostSlots ? kMostSlots * chunk : kMostBytes;
    if (bytes < 0 || bytes > most) {
      throw InvalidArgumentError(str(name, ": ", bytes, ", expected 0 or more, at most ", most));
    }
    if (bytes > 0 && bytes < chunk) {
      throw InvalidArgumentError(
          str(name, ": ", bytes, " cannot hold one chunk; expected 0 or at least ", chunk));
    }
  }
  if (options.summary_bytes < -1 || options.summary_bytes > kMostBytes) {
    throw InvalidArgumentError(str("summary_bytes: ", options.summary_bytes,
                                   ", expected 0 or more, at most ", kMostBytes,
                                   ", or -1 for enough"));
  }
  if (options.disk_bytes > 0 && options.disk_path.empty()) {
    throw InvalidArgumentError(
        "disk_path: empty, expected an existing folder when disk_bytes is given");
  }
  if (options.disk_bytes > 0 && options.device == "meta") {
    throw InvalidArgumentError(
        str("disk_bytes: ", options.disk_bytes, ", expected 0 on device meta, which has no bytes"));
  }
}

void require_policies(const PagerOptions& options) {
  for (const auto& [name, tokens] :
       {std::pair<const char*, int64_t>("window", options.window), {"rewind", options.rewind}}) {
    if (tokens < 0 || tokens > kMostWindow) {
      throw InvalidArgumentError(
          str(name, ": ", tokens, ", expected 0 to ", kMostWindow, " tokens"));
    }
  }
  if (options.recall_chunks < 0) {
    throw InvalidArgumentError(
        str("recall_chunks: ", options.recall_chunks, ", expected 0 or more"));
  }
  if (!(options.hysteresis >= 0) || !std::isfinite(options.hysteresis)) {
    throw InvalidArgumentError(str("hysteresis: ", options.hysteresis, ", expected 0 or more"));
  }
}

void require_machine(const PagerOptions& options) {
  if (options.threads < 1 || options.threads > 1024) {
    throw InvalidArgumentError(str("threads: ", options.threads, ", expected 1 to 1024"));
  }
  if (options.q_heads < 0 || options.q_heads > kMostHeads) {
    throw InvalidArgumentError(str("q_heads: ", options.q_heads, ", expected 0 to ", kMostHeads));
  }
  if (options.attention != "auto" && options.attention != "reference") {
    throw InvalidArgumentError(
        str("attention: \"", options.attention, "\", expected \"auto\" or \"reference\""));
  }
  if (options.missed_chunks != "auto" && options.missed_chunks != "direct" &&
      options.missed_chunks != "staged") {
    throw InvalidArgumentError(str("missed_chunks: \"", options.missed_chunks,
                                   "\", expected \"auto\", \"direct\" or \"staged\""));
  }
  if (options.staging_bytes < -1 || options.scratch_bytes < -1) {
    throw InvalidArgumentError(str("staging_bytes: ", options.staging_bytes, ", scratch_bytes: ",
                                   options.scratch_bytes, "; expected 0 or more, or -1"));
  }
}

const PagerOptions& validated(const PagerOptions& options) {
  isa_name();  // a KVPAGER_ISA that cannot be had is refused here rather than in a first forward
  options.layout.validate();
  require_rows(options);
  options.selection.validate(options.layout.chunk_tokens, options.rows);
  require_budgets(options);
  require_policies(options);
  require_machine(options);
  return options;
}

SlotCounts slot_counts(const PagerOptions& options, int64_t summary_slot_bytes) {
  const int64_t chunk = options.layout.chunk_bytes();
  SlotCounts slots{options.pool_blocks, options.host_bytes / chunk, options.disk_bytes / chunk, 0};
  // Summaries of every chunk that can have a home, as many again for chunks that live in snapshots,
  // and a pool.
  slots.summaries = options.summary_bytes >= 0 ? options.summary_bytes / summary_slot_bytes
                                               : 2 * (slots.host + slots.disk) + slots.pool;
  slots.summaries = std::min(
      {slots.summaries, kMostSlots, kMostBytes / std::max<int64_t>(1, summary_slot_bytes)});
  return slots;
}

}  // namespace

Config::Config(const PagerOptions& given)
    : options(validated(given)),
      layout(options.layout),
      summary_page_bytes(bits2::summary_bytes(layout)),
      summary_slot_bytes(summary_page_bytes * layout.layers * layout.kv_heads),
      slots(slot_counts(options, summary_slot_bytes)) {}

int64_t Config::frontier_blocks() const { return blocks_for(options.rows, layout.chunk_tokens); }

int64_t Config::home_capacity() const {
  return blocks_are_homes() ? slots.pool - frontier_blocks() : slots.host + slots.disk;
}

bool Config::scores(int layer, bool forward_is_dense) const {
  if (!forward_is_dense) return true;
  return options.policy == Policy::kQk && layer == layout.layers / 2;
}

int64_t Config::scored_layers(bool forward_is_dense) const {
  if (!forward_is_dense) return layout.layers;
  return options.policy == Policy::kQk ? 1 : 0;
}

void Config::summarize_page(const std::byte* chunk, int64_t page, std::byte* summary) const {
  const int layer = static_cast<int>(page / layout.kv_heads);
  const int head = static_cast<int>(page % layout.kv_heads);
  bits2::summarize(layout.of_layer(layer), chunk + layout.page_offset(layer, head),
                   summary + page * summary_page_bytes);
}

}  // namespace kvpager
