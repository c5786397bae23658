// Attention problems for tests: sequences in scattered chunk memory, and two references, one in
// binary64 and one that follows the documented order of operations with scalars.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "base/half.h"
#include "elements.h"
#include "float_mode.h"
#include "kvpager/attention.h"
#include "read_row.h"

namespace kvpager::testing {

inline float round_to(DType dtype, float value) {
  if (dtype == DType::kFloat16) return float16_to_float(float_to_float16(value));
  if (dtype == DType::kBFloat16) return bfloat16_to_float(float_to_bfloat16(value));
  return value;
}

struct Shape {
  static constexpr DType kSame = DType::kFloat8E4M3;  // no kernel meets one: the dtype of the keys

  int kv_heads = 2;
  int group = 2;
  int tokens = 64;
  int k_dim = 64;
  int v_dim = 64;
  DType dtype = DType::kFloat32;  // of keys, and of the rest where nothing else is said
  DType value_dtype = kSame;
  DType io_dtype = kSame;  // of queries and outputs
  bool k_rotated = false;
  bool v_rotated = false;
  int64_t window = 0;
  float softcap = 0.0f;
  bool sinks = false;
  float scaling = 0.0f;            // 0: 1 / sqrt(k_dim)
  std::vector<float> sink_logits;  // [q_heads]; empty: sink_of

  DType values() const { return value_dtype == kSame ? dtype : value_dtype; }
  DType io() const { return io_dtype == kSame ? dtype : io_dtype; }
};

// Element d of the key (or value) of token t at a kv head.
using Element = std::function<float(int64_t t, int head, int d)>;

// Keys and values of one sequence of `length` tokens, in ascending or reversed block addresses.
// Bytes of tokens that were never written are NaN.
class Sequence {
 public:
  Sequence(const Layout& layout, int64_t length, uint32_t seed, bool reversed = false)
      : layout_(layout), length_(length) {
    place(reversed);
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (float& x : k_) x = round_to(layout.k_dtype, normal(random));
    for (float& x : v_) x = round_to(layout.v_dtype, normal(random));
    write();
  }

  Sequence(const Layout& layout, int64_t length, const Element& key, const Element& value)
      : layout_(layout), length_(length) {
    place(false);
    for (int64_t t = 0; t < length; ++t) {
      for (int head = 0; head < layout.kv_heads; ++head) {
        for (int d = 0; d < layout.k_dim; ++d) {
          k_[index(t, head, layout.k_dim) + static_cast<size_t>(d)] =
              round_to(layout.k_dtype, key(t, head, d));
        }
        for (int d = 0; d < layout.v_dim; ++d) {
          v_[index(t, head, layout.v_dim) + static_cast<size_t>(d)] =
              round_to(layout.v_dtype, value(t, head, d));
        }
      }
    }
    write();
  }

  ChunkTableView table() const { return {slices_.data(), static_cast<int64_t>(slices_.size())}; }
  const float* k(int64_t t, int head) const { return k_.data() + index(t, head, layout_.k_dim); }
  const float* v(int64_t t, int head) const { return v_.data() + index(t, head, layout_.v_dim); }
  int64_t length() const { return length_; }
  Stored key(int64_t t, int head, int d) const { return stored(t, head, d, true); }
  Stored value(int64_t t, int head, int d) const { return stored(t, head, d, false); }

 private:
  Stored stored(int64_t t, int head, int d, bool keys) const {
    const std::byte* page =
        slices_[static_cast<size_t>(t / layout_.chunk_tokens)] + layout_.page_bytes() * head;
    return read_stored(keys ? layout_.k_dtype : layout_.v_dtype, keys,
                       keys ? page : page + layout_.k_tile_bytes(), layout_.chunk_tokens,
                       keys ? layout_.k_dim : layout_.v_dim, d, t % layout_.chunk_tokens);
  }

  size_t index(int64_t t, int head, int dim) const {
    return static_cast<size_t>((t * layout_.kv_heads + head) * dim);
  }

  void place(bool reversed) {
    const Layout& layout = layout_;
    const int64_t length = length_;
    const int64_t chunks = (length + layout.chunk_tokens - 1) / layout.chunk_tokens;
    memory_.assign(static_cast<size_t>((chunks + 1) * layout.chunk_bytes() + 64), std::byte{0xFF});
    auto address = reinterpret_cast<uintptr_t>(memory_.data());
    std::byte* base = memory_.data() + (64 - address % 64) % 64;
    for (int64_t c = 0; c < chunks; ++c) {
      slices_.push_back(base + (reversed ? chunks - c : c) * layout.chunk_bytes());
    }
    k_.resize(static_cast<size_t>(length * layout.kv_heads * layout.k_dim));
    v_.resize(static_cast<size_t>(length * layout.kv_heads * layout.v_dim));
  }

  void write() {
    const Layout& layout = layout_;
    const int64_t length = length_;
    std::vector<WriteRow> rows;
    for (int64_t t = 0; t < length; ++t) {
      rows.push_back({const_cast<std::byte*>(slices_[static_cast<size_t>(t / layout.chunk_tokens)]),
                      static_cast<int32_t>(t % layout.chunk_tokens)});
    }
    const auto view = [&](std::vector<float>& data, int dim) {
      return TensorView{data.data(), DType::kFloat32,
                        length,      layout.kv_heads,
                        dim,         int64_t{layout.kv_heads} * dim,
                        dim};
    };
    write_rows(layout, view(k_, layout.k_dim), view(v_, layout.v_dim), rows.data(), length);
    if (!is_coded(layout.k_dtype) && !is_coded(layout.v_dtype)) return;
    for (int64_t t = 0; t < length; ++t) {  // what the codes stand for
      for (int head = 0; head < layout.kv_heads; ++head) {
        read_row(layout, slices_[static_cast<size_t>(t / layout.chunk_tokens)], head,
                 static_cast<int>(t % layout.chunk_tokens), &k_[index(t, head, layout.k_dim)],
                 &v_[index(t, head, layout.v_dim)]);
      }
    }
  }

  Layout layout_;
  int64_t length_;
  std::vector<std::byte> memory_;
  std::vector<const std::byte*> slices_;
  std::vector<float> k_;
  std::vector<float> v_;
};

struct Row {
  int sequence = 0;  // -1: padding
  int64_t position = 0;
  uint32_t query_seed = 0;
  std::vector<std::vector<int32_t>> selected;  // per kv head; empty: every chunk
  std::vector<float> query;                    // [q_heads][k_dim]; empty: random, of query_seed
};

// Rows of one sequence, with queries of their own.
inline std::vector<Row> rows_at(const std::vector<int64_t>& positions, int sequence = 0) {
  std::vector<Row> rows;
  for (const int64_t position : positions) {
    Row& row = rows.emplace_back();
    row.sequence = sequence;
    row.position = position;
    row.query_seed = static_cast<uint32_t>(position * 3 + sequence + 1);
  }
  return rows;
}
inline std::vector<Row> last_rows(const Sequence& sequence, int64_t count) {
  std::vector<int64_t> positions(static_cast<size_t>(count));
  std::iota(positions.begin(), positions.end(), sequence.length() - count);
  return rows_at(positions);
}
inline Row padding_row() {
  Row row;
  row.sequence = -1;
  return row;
}

inline Layout layout_of(const Shape& shape) {
  Layout layout;
  layout.layers = 1;
  layout.kv_heads = shape.kv_heads;
  layout.chunk_tokens = shape.tokens;
  layout.k_dim = shape.k_dim;
  layout.v_dim = shape.v_dim;
  layout.k_dtype = shape.dtype;
  layout.v_dtype = shape.values();
  layout.k_rotated = shape.k_rotated;
  layout.v_rotated = shape.v_rotated;
  return layout;
}

inline std::vector<float> query_of(const Shape& shape, const Row& row) {
  if (!row.query.empty()) {
    std::vector<float> q = row.query;
    for (float& x : q) x = round_to(shape.io(), x);
    return q;
  }
  std::mt19937 random(row.query_seed * 7919 + 17);
  std::normal_distribution<float> normal;
  std::vector<float> q(static_cast<size_t>(shape.kv_heads * shape.group * shape.k_dim));
  for (float& x : q) x = round_to(shape.io(), normal(random));
  return q;
}

inline float sink_of(const Shape& shape, int q_head) {
  if (!shape.sink_logits.empty()) return shape.sink_logits[static_cast<size_t>(q_head)];
  return 0.25f * static_cast<float>(q_head) - 0.5f;
}
inline float scaling_of(const Shape& shape) {
  if (shape.scaling != 0.0f) return shape.scaling;
  return 1.0f / std::sqrt(static_cast<float>(shape.k_dim));
}

struct RunOptions {
  int threads = 1;
  std::vector<int64_t> cuts;             // wave boundaries in splits
  unsigned mode = kPlainMode;            // of the calling thread, and of the threads it starts
  AttendWorkspace* workspace = nullptr;  // null: a fresh one
};

// The Walsh-Hadamard transform of kvpager/codes.h, from its text.
template <class Number>
std::vector<Number> rotated(std::vector<Number> x) {
  size_t block = 1;
  while (x.size() % (2 * block) == 0) block *= 2;
  for (size_t h = 1; h < block; h *= 2) {
    for (size_t i = 0; i < x.size(); ++i) {
      if (i / h % 2 != 0) continue;
      const Number sum = x[i] + x[i + h];
      x[i + h] = x[i] - x[i + h];
      x[i] = sum;
    }
  }
  const auto factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(block)));
  for (Number& number : x) number = number * factor;
  return x;
}

// The rows' outputs as float32, [rows][q_heads * v_dim], each as attend wrote it (rounded to the
// shape's dtype of outputs).
inline std::vector<std::vector<float>> attend(const Shape& shape,
                                              const std::vector<Sequence*>& sequences,
                                              const std::vector<Row>& rows,
                                              const RunOptions& options = {}) {
  const Layout layout = layout_of(shape);
  const int q_heads = shape.kv_heads * shape.group;
  const int64_t count = static_cast<int64_t>(rows.size());
  const auto bytes = [&](int64_t dim) {
    return static_cast<size_t>(count * q_heads * dim * dtype_bytes(shape.io()));
  };
  std::vector<std::byte> q(bytes(shape.k_dim)), out(bytes(shape.v_dim), std::byte{0xA5});
  std::vector<AttendRow> attend_rows;
  std::vector<ChunkTableView> tables;
  for (const Sequence* sequence : sequences) tables.push_back(sequence->table());
  std::vector<int32_t> selected;
  std::vector<int64_t> offsets = {0};
  bool selecting = false;
  for (const Row& row : rows) selecting = selecting || !row.selected.empty();
  for (int64_t i = 0; i < count; ++i) {
    const Row& row = rows[static_cast<size_t>(i)];
    attend_rows.push_back({row.position, row.sequence});
    const std::vector<float> values = query_of(shape, row);
    for (size_t j = 0; j < values.size(); ++j) {
      round_to(shape.io(), values[j], q.data(),
               static_cast<int64_t>(static_cast<size_t>(i) * values.size() + j));
    }
    for (int head = 0; selecting && head < shape.kv_heads; ++head) {
      if (row.sequence >= 0) {
        const auto& list = row.selected[static_cast<size_t>(head)];
        selected.insert(selected.end(), list.begin(), list.end());
      }
      offsets.push_back(static_cast<int64_t>(selected.size()));
    }
  }
  std::vector<float> sinks;
  for (int h = 0; h < q_heads; ++h) sinks.push_back(sink_of(shape, h));

  AttendParams params;
  params.layout = &layout;
  params.q_heads = q_heads;
  params.rows = count;
  params.row = attend_rows.data();
  params.tables = tables.data();
  params.q = {q.data(),   shape.io(), count, q_heads, shape.k_dim, int64_t{q_heads} * shape.k_dim,
              shape.k_dim};
  params.out = {out.data(), shape.io(), count, q_heads, shape.v_dim, int64_t{q_heads} * shape.v_dim,
                shape.v_dim};
  params.scaling = scaling_of(shape);
  params.softcap = shape.softcap;
  params.window = shape.window;
  params.sinks = shape.sinks ? sinks.data() : nullptr;
  if (selecting) {
    params.selected = selected.data();
    params.selected_offsets = offsets.data();
  }
  {
    const FloatMode mode(options.mode);
    ThreadPool pool(options.threads, 0);  // shares small problems too
    AttendWorkspace fresh;
    AttendWorkspace& workspace = options.workspace != nullptr ? *options.workspace : fresh;
    attend_begin(params, workspace, pool);
    int64_t begin = 0;
    for (const int64_t cut : options.cuts) {
      attend_wave(params, begin, cut, workspace, pool);
      begin = cut;
    }
    attend_wave(params, begin, int64_t{1} << 40, workspace, pool);
    attend_finish(params, workspace, pool);
  }

  std::vector<std::vector<float>> result(rows.size());
  const size_t width = static_cast<size_t>(q_heads * shape.v_dim);
  for (size_t i = 0; i < rows.size(); ++i) {
    for (size_t j = 0; j < width; ++j) {
      result[i].push_back(widen(shape.io(), out.data(), static_cast<int64_t>(i * width + j)));
    }
  }
  return result;
}

inline bool sees(const Shape& shape, const Row& row, int head, int64_t t) {
  if (t > row.position) return false;
  if (shape.window > 0 && t <= row.position - shape.window) return false;
  if (row.selected.empty()) return true;
  const auto& list = row.selected[static_cast<size_t>(head)];
  for (const int32_t c : list) {
    if (c == t / shape.tokens) return true;
  }
  return false;
}

// Softmax attention in binary64, unrounded.
inline std::vector<double> reference64(const Shape& shape, const Sequence& sequence,
                                       const Row& row) {
  const std::vector<float> q = query_of(shape, row);
  std::vector<double> out;
  for (int h = 0; h < shape.kv_heads * shape.group; ++h) {
    const int head = h / shape.group;
    std::vector<double> query(q.begin() + h * shape.k_dim, q.begin() + (h + 1) * shape.k_dim);
    if (shape.k_rotated) query = rotated(query);
    std::vector<double> s;
    std::vector<int64_t> at;
    double m = shape.sinks ? double{sink_of(shape, h)} : -std::numeric_limits<double>::infinity();
    for (int64_t t = 0; t <= row.position; ++t) {
      if (!sees(shape, row, head, t)) continue;
      double dot = 0;
      for (int d = 0; d < shape.k_dim; ++d) {
        dot += query[static_cast<size_t>(d)] * double{sequence.k(t, head)[d]};
      }
      dot *= double{scaling_of(shape)};
      if (shape.softcap != 0) dot = double{shape.softcap} * std::tanh(dot / double{shape.softcap});
      s.push_back(dot);
      at.push_back(t);
      m = std::max(m, dot);
    }
    double l = shape.sinks ? std::exp(double{sink_of(shape, h)} - m) : 0.0;
    std::vector<double> acc(static_cast<size_t>(shape.v_dim));
    for (size_t i = 0; i < s.size(); ++i) {
      const double p = std::exp(s[i] - m);
      l += p;
      for (int j = 0; j < shape.v_dim; ++j)
        acc[static_cast<size_t>(j)] += p * double{sequence.v(at[i], head)[j]};
    }
    for (double& x : acc) x /= l;
    if (shape.v_rotated) acc = rotated(acc);
    out.insert(out.end(), acc.begin(), acc.end());
  }
  return out;
}

// ---- the documented order, one number at a time

inline float scalar_exp(float x) {
  if (x != x) return x;
  if (x < -87.0f) return 0.0f;
  const float t = std::fmaf(x, 1.44269504f, 12582912.0f);
  const float n = t - 12582912.0f;
  float r = std::fmaf(n, -0.693359375f, x);
  r = std::fmaf(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  for (const float c :
       {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    p = std::fmaf(p, r, c);
  }
  const float squared = r * r;
  p = std::fmaf(p, squared, r) + 1.0f;
  return p * std::ldexp(1.0f, static_cast<int>(n));
}

inline float scalar_tanh(float x) {
  const float e = scalar_exp(std::fabs(x) * -2.0f);
  return std::copysign((1.0f - e) / (1.0f + e), x);
}

struct ScalarState {
  float m = -std::numeric_limits<float>::infinity();
  float l = 0.0f;
  std::vector<float> acc;
};

inline void scalar_merge(const ScalarState& part, ScalarState* total) {
  const float m = total->m > part.m ? total->m : part.m;
  const float old_weight = scalar_exp(total->m - m);
  const float new_weight = scalar_exp(part.m - m);
  for (size_t j = 0; j < total->acc.size(); ++j) {
    const float scaled = part.acc[j] * new_weight;
    total->acc[j] = std::fmaf(total->acc[j], old_weight, scaled);
  }
  const float scaled = part.l * new_weight;
  total->l = std::fmaf(total->l, old_weight, scaled);
  total->m = m;
}

// Numbers as integers times a unit: kvpager/codes.h.
struct Rounded {
  explicit Rounded(const std::vector<float>& numbers) {
    float largest = 0.0f;
    for (const float x : numbers) largest = std::max(largest, std::fabs(x));
    const bool usable = largest >= 1e-30f;
    unit = usable ? largest / 32767.0f : 0.0f;
    const float factor = usable ? 32767.0f / largest : 0.0f;
    for (const float x : numbers) integers.push_back(std::lrintf(x * factor));
  }
  std::vector<int64_t> integers;
  float unit;
};

inline int group_of(DType dtype, int dim) { return dtype == DType::kQ4 ? kQ4Group : dim; }

// The score of one key before it is scaled, and what visible tokens of a chunk add to acc, by the steps
// of kvpager/attention.h or, for codes, of kvpager/codes.h.
inline float dot_in_order(const Shape& shape, const Sequence& sequence, const float* q, int64_t at,
                          int head) {
  float dot = 0.0f;
  if (!is_coded(shape.dtype)) {
    for (int d = 0; d < shape.k_dim; ++d) dot = std::fmaf(q[d], sequence.k(at, head)[d], dot);
    return dot;
  }
  const std::vector<float> given(q, q + shape.k_dim);
  const Rounded query(shape.k_rotated ? rotated(given) : given);
  const int group = group_of(shape.dtype, shape.k_dim);
  for (int g = 0; g < shape.k_dim; g += group) {
    int64_t sum = 0;
    for (int d = g; d < g + group; ++d) {
      sum += query.integers[static_cast<size_t>(d)] *
             static_cast<int64_t>(sequence.key(at, head, d).level);
    }
    dot = std::fmaf(static_cast<float>(sum), sequence.key(at, head, g).scale, dot);
  }
  return dot * query.unit;
}

inline void add_values_in_order(const Shape& shape, const Sequence& sequence, int head,
                                int64_t first, const std::vector<int>& visible,
                                const std::vector<float>& p, float r, std::vector<float>* acc) {
  for (float& x : *acc) x = x * r;
  if (!is_coded(shape.values())) {
    for (const int t : visible) {
      const float* v = sequence.v(first + t, head);
      for (int j = 0; j < shape.v_dim; ++j) {
        float& x = (*acc)[static_cast<size_t>(j)];
        x = std::fmaf(p[static_cast<size_t>(t)], v[j], x);
      }
    }
    return;
  }
  const int group = group_of(shape.values(), shape.v_dim);
  for (int g = 0; g < shape.v_dim; g += group) {
    std::vector<float> w;
    for (const int t : visible) {
      w.push_back(p[static_cast<size_t>(t)] * sequence.value(first + t, head, g).scale);
    }
    const Rounded weights(w);
    for (int j = g; j < g + group; ++j) {
      int64_t sum = 0;
      for (size_t i = 0; i < visible.size(); ++i) {
        sum += weights.integers[i] *
               static_cast<int64_t>(sequence.value(first + visible[i], head, j).level);
      }
      float& x = (*acc)[static_cast<size_t>(j)];
      x = std::fmaf(static_cast<float>(sum), weights.unit, x);
    }
  }
}

inline std::vector<float> reference_in_order(const Shape& shape, const Sequence& sequence,
                                             const Row& row) {
  const std::vector<float> q = query_of(shape, row);
  std::vector<float> out;
  const int64_t last = row.position / shape.tokens;
  for (int h = 0; h < shape.kv_heads * shape.group; ++h) {
    const int head = h / shape.group;
    ScalarState total;
    total.acc.assign(static_cast<size_t>(shape.v_dim), 0.0f);
    if (shape.sinks) {
      total.m = sink_of(shape, h);
      total.l = 1.0f;
    }
    for (int64_t split = 0; split * kChunksPerSplit <= last; ++split) {
      ScalarState part;
      part.acc.assign(static_cast<size_t>(shape.v_dim), 0.0f);
      bool any = false;
      for (int64_t c = split * kChunksPerSplit; c < (split + 1) * kChunksPerSplit && c <= last;
           ++c) {
        std::vector<int> visible;
        std::vector<float> s(static_cast<size_t>(shape.tokens));
        float m = part.m;
        for (int t = 0; t < shape.tokens; ++t) {
          const int64_t at = c * shape.tokens + t;
          if (!sees(shape, row, head, at)) continue;
          float dot =
              dot_in_order(shape, sequence, &q[static_cast<size_t>(h * shape.k_dim)], at, head) *
              scaling_of(shape);
          if (shape.softcap != 0) dot = scalar_tanh(dot / shape.softcap) * shape.softcap;
          s[static_cast<size_t>(t)] = dot;
          visible.push_back(t);
          m = dot > m ? dot : m;
        }
        if (visible.empty()) continue;
        any = true;
        const float r = scalar_exp(part.m - m);
        float lanes[16] = {};
        for (const int t : visible) {
          float& p = s[static_cast<size_t>(t)];
          p = scalar_exp(p - m);
          lanes[t % 16] = lanes[t % 16] + p;
        }
        add_values_in_order(shape, sequence, head, c * shape.tokens, visible, s, r, &part.acc);
        for (int width = 8; width >= 1; width /= 2) {
          for (int i = 0; i < width; ++i) lanes[i] = lanes[i] + lanes[i + width];
        }
        part.l = std::fmaf(part.l, r, lanes[0]);
        part.m = m;
      }
      if (any) scalar_merge(part, &total);
    }
    for (float& x : total.acc) x = x / total.l;
    if (shape.v_rotated) total.acc = rotated(total.acc);
    for (const float x : total.acc) out.push_back(round_to(shape.io(), x));
  }
  return out;
}

inline std::vector<std::vector<float>> reference_in_order(const Shape& shape,
                                                          const Sequence& sequence,
                                                          const std::vector<Row>& rows) {
  std::vector<std::vector<float>> all;
  for (const Row& row : rows) all.push_back(reference_in_order(shape, sequence, row));
  return all;
}

inline int64_t differing_bits(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return -1;
  int64_t count = 0;
  for (size_t i = 0; i < a.size(); ++i) count += float_bits(a[i]) != float_bits(b[i]);
  return count;
}

inline int64_t differing_bits(const std::vector<std::vector<float>>& a,
                              const std::vector<std::vector<float>>& b) {
  if (a.size() != b.size()) return -1;
  int64_t count = 0;
  for (size_t i = 0; i < a.size(); ++i) count += differing_bits(a[i], b[i]);
  return count;
}

}  // namespace kvpager::testing
