// A pager of tiny chunks whose keys and values are a function of the tokens before them, so that
// every byte it holds can be predicted: chunks of 16 tokens, 2 layers, 2 kv heads, 16 dimensions,
// forwards of 16 rows.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "../disarm.h"
#include "../folder.h"
#include "base/fault.h"
#include "kvpager/error.h"
#include "kvpager/pager.h"
#include "test_device.h"

namespace kvpager::pager_test {

inline constexpr int kRows = 16;
inline constexpr int kQueryHeads = 4;

inline Layout small_layout() {
  Layout layout;
  layout.layers = 2;
  layout.kv_heads = 2;
  layout.chunk_tokens = 16;
  layout.k_dim = 16;
  layout.v_dim = 16;
  return layout;
}

inline const int64_t kChunkBytes = small_layout().chunk_bytes();

// Blocks are shuffled and free ones are NaN: what depends on placement by luck fails.
inline PagerOptions small_options(int64_t pool_blocks, int64_t host_chunks, int64_t disk_chunks = 0,
                                  const std::string& folder = "") {
  PagerOptions options;
  options.layout = small_layout();
  options.pool_blocks = pool_blocks;
  options.rows = kRows;
  options.host_bytes = host_chunks * kChunkBytes;
  options.disk_bytes = disk_chunks * kChunkBytes;
  options.disk_path = folder;
  options.shuffle_seed = 11;
  options.poison = true;
  options.namespace_key = "{\"model\":\"test\"}";
  options.recall_chunks = 0;
  options.selection.sinks = 0;  // what residency shelters
  options.selection.recent = 16;
  options.device = test_device();
  options.q_heads = kQueryHeads;
  options.attention = "reference";  // the processor's bits
  return options;
}

// The chunks that score best, `chunks` of them, and those of the first `sinks` positions.
inline PagerOptions top_k(PagerOptions options, int32_t chunks, int64_t sinks = 0) {
  options.selection.kind = Selection::Kind::kTopK;
  options.selection.chunks = chunks;
  options.selection.sinks = sinks;
  return options;
}

using testing::Disarm;
using testing::Folder;

inline uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

inline float unit(uint64_t x) {
  return static_cast<float>(static_cast<double>(mix(x) >> 40) / (1 << 23)) - 1.0f;
}

// A number for all tokens up to and including each position.
inline std::vector<uint64_t> histories(const std::vector<TokenId>& tokens) {
  std::vector<uint64_t> result;
  uint64_t h = 1;
  for (const TokenId token : tokens)
    result.push_back(h = mix(h ^ static_cast<uint64_t>(token + 1)));
  return result;
}

// Rows of one tensor of a forward: [rows][heads][dim].
struct Rows {
  Rows(int64_t rows, int64_t heads, int64_t dim, float fill)
      : data(static_cast<size_t>(rows * heads * dim), fill), rows(rows), heads(heads), dim(dim) {}
  float* row(int64_t i) { return data.data() + i * heads * dim; }
  TensorView view() { return {data.data(), DType::kFloat32, rows, heads, dim, heads * dim, dim}; }
  std::vector<float> data;
  int64_t rows, heads, dim;
};

// What the row of a history holds at one layer.
inline void fill_row(uint64_t history, int layer, uint64_t what, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = unit(history ^ (what << 56) ^ (static_cast<uint64_t>(layer) << 40) ^
                  static_cast<uint64_t>(i));
  }
}

enum What : uint64_t { kKey = 1, kValue = 2, kQuery = 3 };

// The tensors of a running forward. Rows that are not written hold NaN.
struct Tensors {
  explicit Tensors(int64_t rows)
      : q(rows, kQueryHeads, 16, std::numeric_limits<float>::quiet_NaN()),
        k(rows, 2, 16, std::numeric_limits<float>::quiet_NaN()),
        v(rows, 2, 16, std::numeric_limits<float>::quiet_NaN()),
        out(rows, kQueryHeads, 16, std::numeric_limits<float>::quiet_NaN()) {}
  // What a row of this history has at a layer.
  void fill(int64_t row, uint64_t history, int layer, RowKind kind = RowKind::kCommit) {
    if (kind == RowKind::kPadding) return;
    fill_row(history, layer, kQuery, kQueryHeads * 16, q.row(row));
    if (kind == RowKind::kRead) return;
    fill_row(history, layer, kKey, 32, k.row(row));
    fill_row(history, layer, kValue, 32, v.row(row));
  }
  void attend(Pager& pager, int layer, const AttendOptions& options = {}) {
    attend_on_device(pager, layer, q.view(), k.view(), v.view(), out.view(), options);
  }
  Rows q, k, v, out;
};

inline std::vector<RowDescriptor> commit_rows(SequenceId id, int64_t start, const TokenId* tokens,
                                              int64_t count, int64_t total = kRows) {
  std::vector<RowDescriptor> rows;
  for (int64_t i = 0; i < count; ++i) rows.push_back({id, start + i, tokens[i], RowKind::kCommit});
  rows.resize(static_cast<size_t>(std::max(count, total)));
  return rows;
}

// A forward of rows that read these positions.
inline std::vector<RowDescriptor> read_rows_at(SequenceId id,
                                               const std::vector<int64_t>& positions) {
  std::vector<RowDescriptor> rows;
  for (const int64_t position : positions) rows.push_back({id, position, 0, RowKind::kRead});
  rows.resize(kRows);
  return rows;
}

// Runs every layer of a forward that was begun; history_of(row) is a number for the tokens up to its
// position. before(layer) comes ahead of each.
template <class HistoryOf>
std::vector<float> run_layers_of(
    Pager& pager, const std::vector<RowDescriptor>& rows, const HistoryOf& history_of,
    bool attend = true, const std::function<void(int)>& before = [](int) {}) {
  std::vector<float> outputs;
  for (int layer = 0; layer < small_layout().layers; ++layer) {
    before(layer);
    Tensors t(static_cast<int64_t>(rows.size()));
    for (size_t i = 0; i < rows.size(); ++i) {
      if (rows[i].kind == RowKind::kPadding) continue;
      t.fill(static_cast<int64_t>(i), history_of(rows[i]), layer, rows[i].kind);
    }
    if (attend) {
      AttendOptions options;
      options.scaling = 0.25f;
      options.window = pager.options().window;
      t.attend(pager, layer, options);
      outputs.insert(outputs.end(), t.out.data.begin(), t.out.data.end());
    } else {
      write_on_device(pager, layer, t.k.view(), t.v.view());
    }
  }
  return outputs;
}

// `all` is the whole history of each row's sequence.
inline std::vector<float> run_layers(
    Pager& pager, const std::vector<RowDescriptor>& rows, const std::vector<TokenId>& all,
    bool attend = true, const std::function<void(int)>& before = [](int) {}) {
  const std::vector<uint64_t> history = histories(all);
  const auto history_of = [&](const RowDescriptor& row) {
    return history[static_cast<size_t>(row.position)];
  };
  return run_layers_of(pager, rows, history_of, attend, before);
}

inline std::vector<float> run_forward(Pager& pager, const std::vector<RowDescriptor>& rows,
                                      const std::vector<TokenId>& all,
                                      Provenance provenance = Provenance::kExact) {
  pager.begin(rows);
  std::vector<float> outputs = run_layers(pager, rows, all);
  pager.commit_all(provenance);
  return outputs;
}

inline std::vector<TokenId> joined(std::vector<TokenId> tokens, const std::vector<TokenId>& more) {
  tokens.insert(tokens.end(), more.begin(), more.end());
  return tokens;
}
// Tokens [begin, end); end -1: all from `begin` on.
inline std::vector<TokenId> cut(const std::vector<TokenId>& tokens, int64_t begin,
                                int64_t end = -1) {
  return {tokens.begin() + begin, end < 0 ? tokens.end() : tokens.begin() + end};
}

// A sequence and the tokens it should hold.
struct Known {
  SequenceId id;
  std::vector<TokenId> tokens;

  int64_t length() const { return static_cast<int64_t>(tokens.size()); }
  // The same when it holds `more`.
  Known with(const std::vector<TokenId>& more) const { return {id, joined(tokens, more)}; }
  // Rows that commit `more`, of a forward of `total`.
  std::vector<RowDescriptor> rows(const std::vector<TokenId>& more, int64_t total = kRows) const {
    return commit_rows(id, length(), more.data(), static_cast<int64_t>(more.size()), total);
  }
};

inline std::vector<TokenId> some_tokens(int64_t count, uint64_t seed = 0) {
  std::vector<TokenId> tokens;
  for (int64_t i = 0; i < count; ++i) {
    tokens.push_back(static_cast<TokenId>(mix(seed * 1000003 + static_cast<uint64_t>(i)) % 1000));
  }
  return tokens;
}

// Begins a forward that appends `more`, and runs its layers.
inline std::vector<float> run_to_commit(Pager& pager, const Known& sequence,
                                        const std::vector<TokenId>& more, int64_t total = kRows,
                                        bool attend = true) {
  const std::vector<RowDescriptor> rows = sequence.rows(more, total);
  pager.begin(rows);
  return run_layers(pager, rows, sequence.with(more).tokens, attend);
}

// Appends tokens in one forward of `total` rows; its outputs.
inline std::vector<float> append_with(Pager& pager, Known* sequence,
                                      const std::vector<TokenId>& more, int64_t total,
                                      Provenance provenance = Provenance::kExact,
                                      bool attend = true) {
  std::vector<float> outputs = run_to_commit(pager, *sequence, more, total, attend);
  pager.commit_all(provenance);
  *sequence = sequence->with(more);
  return outputs;
}

// Appends tokens in forwards of kRows rows and returns the attention outputs of the last one.
inline std::vector<float> append(Pager& pager, Known* sequence, const std::vector<TokenId>& more,
                                 Provenance provenance = Provenance::kExact, bool attend = true) {
  std::vector<float> outputs;
  const auto count = static_cast<int64_t>(more.size());
  for (int64_t first = 0; first < count; first += kRows) {
    const int64_t last = std::min<int64_t>(first + kRows, count);
    outputs = append_with(pager, sequence, cut(more, first, last), kRows, provenance, attend);
  }
  return outputs;
}

inline Known create(Pager& pager, int64_t count = 0, uint64_t seed = 0,
                    const std::string& salt = "") {
  Known sequence{pager.create_sequence(salt), {}};
  append(pager, &sequence, some_tokens(count, seed));
  return sequence;
}

// A sequence whose rows have attended to nothing.
inline Known written(Pager& pager, int64_t tokens, uint64_t seed) {
  Known sequence{pager.create_sequence(""), {}};
  append(pager, &sequence, some_tokens(tokens, seed), Provenance::kExact, false);
  return sequence;
}

inline Known forked(Pager& pager, const Known& sequence) {
  return {pager.fork(sequence.id), sequence.tokens};
}

inline void trim(Pager& pager, Known* sequence, int64_t position) {
  pager.trim(sequence->id, position);
  sequence->tokens.resize(static_cast<size_t>(position));
}

// The outputs of read-only rows at the sequence's last `count` positions: they see all of it.
inline std::vector<float> probe(Pager& pager, const Known& sequence, int64_t count = 1) {
  std::vector<int64_t> last(static_cast<size_t>(count));
  std::iota(last.begin(), last.end(), sequence.length() - count);
  return run_forward(pager, read_rows_at(sequence.id, last), sequence.tokens);
}

// What `run` makes of such a pager on the processor, whose pool holds everything.
template <class Run>
auto on_processor(PagerOptions options, const Run& run) {
  const OnDevice processor("cpu");
  options.device = "cpu";
  options.pool_blocks = 400;
  Pager pager(options);
  return run(pager);
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && !a.empty() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
}

// The first keys or values that are not those of the sequence's tokens, of all that it has not let go
// of; empty if there are none.
inline std::string wrong_bytes(Pager& pager, const Known& sequence) {
  const std::vector<uint64_t> history = histories(sequence.tokens);
  const int64_t length = sequence.length(), held = pager.released(sequence.id);
  std::vector<float> k(static_cast<size_t>((length - held) * 32)), v(k.size());
  std::vector<float> expected(32);
  for (int layer = 0; layer < small_layout().layers; ++layer) {
    pager.read_kv(sequence.id, layer, held, length, reinterpret_cast<std::byte*>(k.data()),
                  reinterpret_cast<std::byte*>(v.data()));
    for (int64_t p = held; p < length; ++p) {
      for (const What what : {kKey, kValue}) {
        const float* found = (what == kKey ? k : v).data() + (p - held) * 32;
        fill_row(history[static_cast<size_t>(p)], layer, what, 32, expected.data());
        if (std::memcmp(found, expected.data(), 128) == 0) continue;
        return str(what == kKey ? "keys" : "values", " of layer ", layer, " position ", p);
      }
    }
  }
  return "";
}

// The invariants hold, and the sequence has these tokens and all their bytes.
inline void require_intact(Pager& pager, const Known& sequence) {
  pager.check_invariants();
  REQUIRE(pager.length(sequence.id) == sequence.length());
  REQUIRE(pager.tokens(sequence.id) == sequence.tokens);
  REQUIRE(wrong_bytes(pager, sequence) == "");
}

// Writes what a frozen sequence holds to a file of its own; its size in bytes.
inline int64_t save(const SnapshotContent& content, const std::string& path,
                    const std::string& fingerprint, const std::string& session = "{}") {
  std::vector<int64_t> all(content.meta().chunks.size());
  std::iota(all.begin(), all.end(), int64_t{0});
  SnapshotWriter writer(path, content.meta().layout);
  const int64_t bytes = writer.write_content(content, all, fingerprint, session, nullptr);
  writer.publish();
  return bytes;
}

// The fingerprint that pagers of small_options() have.
inline const std::string kFingerprint = small_options(4, 4).namespace_key;

inline int64_t save(Pager& pager, SequenceId id, const std::string& path,
                    const std::string& fingerprint, int64_t upto = -1) {
  return save(*pager.freeze(id, upto), path, fingerprint);
}

inline SequenceId restore(Pager& pager, std::shared_ptr<SnapshotReader> reader, int64_t upto = -1,
                          const ReleasedText& before = {}) {
  return pager.restore(std::move(reader), "", Provenance::kExact, kFingerprint, upto, before);
}
inline SequenceId restore(Pager& pager, const std::string& path) {
  return restore(pager, SnapshotReader::open(path));
}

// A pager with a sequence that is saved in a file.
struct Saved {
  Saved(const PagerOptions& options, int64_t length, uint64_t seed = 1,
        const std::string& salt = "")
      : path(folder.file("turn")), pager(options), known(create(pager, length, seed, salt)) {
    save(pager, known.id, path, kFingerprint);
  }
  const Folder folder;
  const std::string path;
  Pager pager;
  const Known known;
};

// A sequence that has all the homes reserved that are left, so that no open chunk can leave the pool.
inline Known with_every_home(Pager& pager) {
  const Known all = create(pager);
  const PagerStats now = pager.stats();
  pager.reserve(all.id, (now.home_chunks - now.home_chunks_used - now.reserved_chunks) * 16);
  return all;
}

// The message of the error of this type that a step throws; the invariants must hold after it.
template <class Error, class Step>
std::string error_of(Pager& pager, const Step& step) {
  std::string message = "no error";
  try {
    step();
  } catch (const Error& error) {
    message = error.what();
  }
  pager.check_invariants();
  return message;
}

inline bool contains(const std::string& text, const std::string& part) {
  const bool found = text.find(part) != std::string::npos;
  if (!found) MESSAGE("'", part, "' is not in: ", text);
  return found;
}

}  // namespace kvpager::pager_test
