// A pager of tiny chunks whose keys and values are a function of the tokens before them, so that
// every byte it holds can be predicted: chunks of 16 tokens, 2 layers, 2 kv heads, 16 dimensions,
// forwards of 16 rows.
#pragma once

#include <dirent.h>
#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "kvpager/error.h"
#include "kvpager/fault.h"
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

class Folder {
 public:
  Folder() {
    const char* base = std::getenv("TMPDIR");
    path_ = std::string(base != nullptr ? base : "/tmp") + "/kvpager_pager_XXXXXX";
    REQUIRE(mkdtemp(path_.data()) != nullptr);
  }
  ~Folder() {
    for (const std::string& name : names()) unlink(file(name).c_str());
    rmdir(path_.c_str());
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    DIR* folder = opendir(path_.c_str());
    while (const dirent* entry = readdir(folder)) {
      const std::string name = entry->d_name;
      if (name != "." && name != "..") all.push_back(name);
    }
    closedir(folder);
    return all;
  }

 private:
  std::string path_;
};

struct Disarm {
  ~Disarm() { fault::disarm_all(); }
};

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
  Rows q, k, v, out;
};

inline std::vector<RowDescriptor> commit_rows(SequenceId id, int64_t start, const TokenId* tokens,
                                              int64_t count, int64_t total = kRows) {
  std::vector<RowDescriptor> rows;
  for (int64_t i = 0; i < count; ++i) rows.push_back({id, start + i, tokens[i], RowKind::kCommit});
  rows.resize(static_cast<size_t>(total));
  return rows;
}

// Runs every layer of a forward that was begun; `all` is the whole history of each row's sequence.
// before(layer) comes ahead of each.
inline std::vector<float> run_layers(
    Pager& pager, const std::vector<RowDescriptor>& rows, const std::vector<TokenId>& all,
    bool attend = true, const std::function<void(int)>& before = [](int) {}) {
  const std::vector<uint64_t> history = histories(all);
  std::vector<float> outputs;
  for (int layer = 0; layer < small_layout().layers; ++layer) {
    before(layer);
    Tensors t(static_cast<int64_t>(rows.size()));
    for (size_t i = 0; i < rows.size(); ++i) {
      if (rows[i].kind == RowKind::kPadding) continue;
      const uint64_t h = history[static_cast<size_t>(rows[i].position)];
      const int64_t r = static_cast<int64_t>(i);
      fill_row(h, layer, kQuery, kQueryHeads * 16, t.q.row(r));
      if (rows[i].kind == RowKind::kRead) continue;
      fill_row(h, layer, kKey, 32, t.k.row(r));
      fill_row(h, layer, kValue, 32, t.v.row(r));
    }
    if (attend) {
      AttendOptions options;
      options.scaling = 0.25f;
      options.window = pager.options().window;
      attend_on_device(pager, layer, t.q.view(), t.k.view(), t.v.view(), t.out.view(), options);
      outputs.insert(outputs.end(), t.out.data.begin(), t.out.data.end());
    } else {
      write_on_device(pager, layer, t.k.view(), t.v.view());
    }
  }
  return outputs;
}

// A sequence and the tokens it should hold.
struct Known {
  SequenceId id;
  std::vector<TokenId> tokens;
};

inline std::vector<TokenId> some_tokens(int64_t count, uint64_t seed = 0) {
  std::vector<TokenId> tokens;
  for (int64_t i = 0; i < count; ++i) {
    tokens.push_back(static_cast<TokenId>(mix(seed * 1000003 + static_cast<uint64_t>(i)) % 1000));
  }
  return tokens;
}

// Appends tokens in forwards of kRows rows and returns the attention outputs of the last one.
inline std::vector<float> append(Pager& pager, Known* sequence, const std::vector<TokenId>& more,
                                 Provenance provenance = Provenance::kExact, bool attend = true) {
  std::vector<float> outputs;
  for (size_t first = 0; first < more.size(); first += kRows) {
    const int64_t n = static_cast<int64_t>(std::min<size_t>(kRows, more.size() - first));
    const auto rows = commit_rows(sequence->id, static_cast<int64_t>(sequence->tokens.size()),
                                  more.data() + first, n);
    std::vector<TokenId> all = sequence->tokens;
    all.insert(all.end(), more.begin() + static_cast<int64_t>(first),
               more.begin() + static_cast<int64_t>(first) + n);
    pager.begin(rows);
    outputs = run_layers(pager, rows, all, attend);
    pager.commit_all(provenance);
    sequence->tokens = std::move(all);
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

// The outputs of read-only rows at the sequence's last `count` positions: they see all of it.
inline std::vector<float> probe(Pager& pager, const Known& sequence, int64_t count = 1) {
  std::vector<RowDescriptor> rows;
  const int64_t length = static_cast<int64_t>(sequence.tokens.size());
  for (int64_t i = length - count; i < length; ++i) {
    rows.push_back({sequence.id, i, 0, RowKind::kRead});
  }
  rows.resize(kRows);
  pager.begin(rows);
  const std::vector<float> outputs = run_layers(pager, rows, sequence.tokens);
  pager.commit_all();
  return outputs;
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

// The invariants hold, and the sequence has these tokens and every byte of the keys and values it has
// not let go of.
inline void require_intact(Pager& pager, const Known& sequence) {
  pager.check_invariants();
  const int64_t length = static_cast<int64_t>(sequence.tokens.size());
  REQUIRE(pager.length(sequence.id) == length);
  REQUIRE(pager.tokens(sequence.id) == sequence.tokens);
  const std::vector<uint64_t> history = histories(sequence.tokens);
  const int64_t held = pager.released(sequence.id);
  std::vector<float> k(static_cast<size_t>((length - held) * 32)), v(k.size());
  std::vector<float> expected(32);
  for (int layer = 0; layer < small_layout().layers; ++layer) {
    pager.read_kv(sequence.id, layer, held, length, reinterpret_cast<std::byte*>(k.data()),
                  reinterpret_cast<std::byte*>(v.data()));
    for (int64_t p = held; p < length; ++p) {
      const uint64_t h = history[static_cast<size_t>(p)];
      const int64_t at = (p - held) * 32;
      fill_row(h, layer, kKey, 32, expected.data());
      REQUIRE_MESSAGE(std::memcmp(k.data() + at, expected.data(), 128) == 0, "keys of layer ",
                      layer, " position ", p);
      fill_row(h, layer, kValue, 32, expected.data());
      REQUIRE_MESSAGE(std::memcmp(v.data() + at, expected.data(), 128) == 0, "values of layer ",
                      layer, " position ", p);
    }
  }
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

inline int64_t save(Pager& pager, SequenceId id, const std::string& path,
                    const std::string& fingerprint, int64_t upto = -1) {
  return save(*pager.freeze(id, upto), path, fingerprint);
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
