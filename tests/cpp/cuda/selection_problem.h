// Selections in device memory: sequences of summaries at shuffled addresses, the tables of a
// forward, poison around whatever kernels write, and what the processor's scores and
// select_chunks() make of the same rows.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "bits2_score.h"
#include "forward_tables.h"
#include "noise.h"
#include "problem.h"

namespace kvpager::testing {

struct SelectionRow {
  int sequence = 0;  // -1: padding
  int64_t position = 0;
};

struct SelectionProblem {
  Layout layout;
  int layer = 0;
  int group = 1;
  DType q_dtype = DType::kFloat32;
  int stride_padding = 0;  // elements between heads of q
  float q_scale = 1.0f;
  std::vector<float> q_sprinkled;  // every 7th element of q is one of these
  Selection selection;
  int64_t window = 0;
  float scaling = 0.125f;
  std::vector<int64_t> lengths;  // tokens of each sequence, those of the forward included
  std::vector<SelectionRow> rows;
  std::vector<int> score_rows;  // by part: -1 none, -2 its last row; default -2
  int distinct = 0;             // summaries: chunks share them, so that scores tie; 0: all differ
  // Key of a distinct summary's token and dimension; default: keys with means of their own.
  float (*key)(uint64_t summary, int64_t page, int64_t dim, int64_t token) = nullptr;
  int64_t scratch_slots = -1;  // rows whose scores fit scratch; -1: as the plug-in asks
  int spare = 0;  // rows, parts and chunks by which host counts and bounds exceed the forward's
  bool mass = true, read = true, selected = true;
  uint32_t seed = 1;
};

// What a forward's selection comes to: on a device, and on the processor.
struct Selected {
  std::vector<uint8_t> bits;   // [rows][kv_heads][stride]
  std::vector<uint64_t> mass;  // [entries]
  std::vector<uint8_t> read;   // [entries]
  std::vector<double> scores;  // kTopK: [ordered rows][kv_heads][scores_stride]
};

class SelectionRun {
 public:
  static constexpr uint8_t kPoison = 0xC3;
  static constexpr uint64_t kMassBefore = 5;
  static constexpr int64_t kGuard = 256;

  SelectionRun(device::Device& device, const SelectionProblem& problem)
      : device_(device), problem_(problem), stream_(device) {
    params_.summary_page_bytes = bits2::summary_bytes(problem.layout);
    fill_tables();
    make_summaries();
    make_queries();
  }

  const gpu::Header& header() const { return forward_.header; }
  int64_t selected_stride() const { return (most_chunks() + 7) / 8 / 4 * 4 + 8; }
  int64_t scores_stride() const { return (params_.counts.max_visible + 31) / 32 * 32; }
  const std::vector<int32_t>& order() const { return forward_.arrangement.order; }
  const std::vector<gpu::Part>& parts() const { return forward_.parts; }
  const std::vector<gpu::Row>& kernel_rows() const { return forward_.rows; }
  int heads() const { return problem_.layout.kv_heads; }

  Selected on_device() {
    const int64_t lines = static_cast<int64_t>(forward_.rows.size()) * heads();
    const device::Memory selected = guarded("selected", lines * selected_stride());
    const device::Memory mass = guarded("mass", forward_.header.entries * 8);
    const device::Memory read = guarded("read", forward_.header.entries);
    const gpu::Shape shape = params_.shape;
    const int64_t slot = scores_stride() * heads() * 8;
    const int64_t scratch_bytes = problem_.scratch_slots < 0
                                      ? device_.api().select_scratch_bytes(&shape, &bounds_)
                                      : problem_.scratch_slots * slot;
    const device::Memory scratch = guarded("scratch", scratch_bytes);
    stream_.fill(scratch.data(), 0xFF, scratch_bytes);  // NaN
    stream_.fill(read.data(), 0, forward_.header.entries);
    const std::vector<uint64_t> before(static_cast<size_t>(forward_.header.entries), kMassBefore);
    stream_.upload(mass.data(), before.data(), forward_.header.entries * 8);

    gpu::SelectParams params = params_;
    params.selected = problem_.selected ? reinterpret_cast<uint8_t*>(selected.data()) : nullptr;
    params.selected_stride = selected_stride();
    params.mass = problem_.mass ? reinterpret_cast<uint64_t*>(mass.data()) : nullptr;
    params.read = problem_.read ? reinterpret_cast<uint8_t*>(read.data()) : nullptr;
    params.scratch = scratch.data();
    params.scratch_bytes = scratch_bytes;
    device_.check(device_.api().select(device_.context(), &params, stream_.get()), "select");

    Selected out;
    out.bits = download<uint8_t>(selected, lines * selected_stride());
    out.mass = download<uint64_t>(mass, forward_.header.entries);
    out.read = download<uint8_t>(read, forward_.header.entries);
    if (scratch_bytes >= static_cast<int64_t>(order().size()) * slot) {
      out.scores = download<double>(scratch, static_cast<int64_t>(order().size()) * slot / 8);
    } else {
      download<uint8_t>(scratch, scratch_bytes);
    }
    return out;
  }

  Selected on_cpu() {
    const Layout& layout = problem_.layout;
    Selected out;
    out.bits.assign(forward_.rows.size() * static_cast<size_t>(heads() * selected_stride()),
                    kPoison);
    out.mass.assign(static_cast<size_t>(forward_.header.entries), kMassBefore);
    out.read.assign(static_cast<size_t>(forward_.header.entries), 0);
    out.scores.assign(order().size() * static_cast<size_t>(heads() * scores_stride()), 0.0);
    shares_.assign(static_cast<size_t>(forward_.header.entries), 0.0);
    for (size_t i = 0; i < order().size(); ++i) {
      const int32_t row = order()[i];
      const gpu::Row& at = forward_.rows[static_cast<size_t>(row)];
      const gpu::Part& part = forward_.parts[static_cast<size_t>(at.part)];
      for (int head = 0; head < heads(); ++head) {
        const bool ledger = part.score_row == row && problem_.mass;
        CandidateRange range =
            candidate_range(problem_.selection, layout.chunk_tokens, at.position);
        if (problem_.selection.kind == Selection::Kind::kDense && ledger) {
          range = {0, std::min(part.sealed, at.position / layout.chunk_tokens)};
        }
        std::vector<double> scores;
        const double scale = score(at.part, row, head, range, &scores);
        std::copy(
            scores.begin(), scores.end(),
            out.scores.begin() +
                static_cast<int64_t>(i * static_cast<size_t>(heads()) + static_cast<size_t>(head)) *
                    scores_stride() +
                range.begin);
        if (ledger) share(part, range, scores, scale * static_cast<double>(problem_.scaling));
        std::vector<int32_t> chosen;
        select_chunks(problem_.selection, layout.chunk_tokens, at.position, problem_.window,
                      scores.data(), &chosen);
        if (problem_.selected) {
          uint8_t* line = out.bits.data() + (int64_t{row} * heads() + head) * selected_stride();
          std::memset(line, 0, static_cast<size_t>(selected_stride()));
          for (const int32_t c : chosen)
            line[c / 8] = static_cast<uint8_t>(line[c / 8] | 1 << c % 8);
        }
        for (const int32_t c : chosen) {
          if (problem_.read) out.read[static_cast<size_t>(part.first + c)] = 1;
        }
      }
    }
    return out;
  }

  // Expected shares of 1 per kv head, by entry; after on_cpu().
  const std::vector<double>& shares() const { return shares_; }

  // Whether chunk's score was to be computed for the row, by the processor's ranges.
  bool is_scored(int32_t row, int64_t chunk) const {
    const gpu::Row& at = forward_.rows[static_cast<size_t>(row)];
    const CandidateRange range =
        candidate_range(problem_.selection, problem_.layout.chunk_tokens, at.position);
    int64_t begin = range.begin;
    if (problem_.window > 0 && at.position >= problem_.window) {
      begin = std::max(begin, (at.position - problem_.window + 1) / problem_.layout.chunk_tokens);
    }
    return chunk >= begin && chunk < range.end;
  }

 private:
  int64_t most_chunks() const { return forward_.header.max_visible + problem_.spare; }
  int64_t q_head() const { return problem_.layout.k_dim + problem_.stride_padding; }
  int64_t q_row() const { return q_head() * heads() * problem_.group + problem_.stride_padding; }
  int64_t summary_bytes() const {
    return params_.summary_page_bytes * problem_.layout.layers * heads();
  }

  void fill_tables() {
    const Layout& layout = problem_.layout;
    forward_ = ForwardTables(problem_.rows, layout.chunk_tokens);
    for (size_t i = 0; i < forward_.rows.size(); ++i) {
      if (forward_.rows[i].part >= 0) {
        forward_.parts[static_cast<size_t>(forward_.rows[i].part)].score_row =
            static_cast<int32_t>(i);
      }
    }
    for (size_t p = 0; p < forward_.parts.size(); ++p) {
      // Sealed is what was complete before the forward's first row.
      forward_.parts[p].sealed =
          std::min(forward_.parts[p].visible, forward_.starts[p] / layout.chunk_tokens);
      if (p < problem_.score_rows.size() && problem_.score_rows[p] != -2) {
        forward_.parts[p].score_row = problem_.score_rows[p];
      }
    }
    forward_.arrange(problem_.group);

    bounds_.rows = forward_.header.rows + problem_.spare;
    bounds_.chunks = most_chunks();
    bounds_.entries = forward_.header.entries + problem_.spare;
    params_.counts = {forward_.header.rows + problem_.spare, forward_.header.parts + problem_.spare,
                      forward_.header.small_tiles, forward_.header.large_tiles, most_chunks()};
    params_.shape = kernel_shape_of(layout, problem_.group, problem_.q_dtype);
    params_.layer = problem_.layer;
    params_.scaling = problem_.scaling;
    params_.window = problem_.window;
    params_.kind = static_cast<int32_t>(problem_.selection.kind);
    params_.k = problem_.selection.chunks;
    params_.sinks = problem_.selection.sinks;
    params_.recent = problem_.selection.recent;
    if (problem_.selection.kind == Selection::Kind::kTopK && !problem_.selection.always.empty()) {
      std::vector<int64_t> ranges;
      for (const auto& range : problem_.selection.always) {
        ranges.push_back(range.first);
        ranges.push_back(range.second);
      }
      always_ = guarded("always", static_cast<int64_t>(ranges.size()) * 8);
      stream_.upload(always_.data(), ranges.data(), static_cast<int64_t>(ranges.size()) * 8);
      params_.always = reinterpret_cast<const int64_t*>(always_.data());
      params_.always_count = static_cast<int32_t>(ranges.size() / 2);
    }
  }

  // Distinct summaries, some in pinned memory, other layers' pages included; then the tables.
  void make_summaries() {
    const Layout& layout = problem_.layout;
    const int64_t distinct = problem_.distinct > 0 ? problem_.distinct : forward_.header.entries;
    image_.assign(static_cast<size_t>(distinct * summary_bytes()), std::byte{0xFF});
    std::vector<std::byte> tile(static_cast<size_t>(layout.k_tile_bytes()));
    for (int64_t i = 0; i < distinct; ++i) {
      for (int64_t page = 0; page < int64_t{layout.layers} * heads(); ++page) {
        for (int64_t d = 0; d < layout.k_dim; ++d) {
          for (int64_t t = 0; t < layout.chunk_tokens; ++t) {
            const uint64_t u = static_cast<uint64_t>(i * 64 + page);
            const float x = problem_.key != nullptr
                                ? problem_.key(static_cast<uint64_t>(i), page, d, t)
                                : 0.5f * noise(problem_.seed, u, static_cast<uint64_t>(d), 999) +
                                      0.5f * noise(problem_.seed, u, static_cast<uint64_t>(d),
                                                   static_cast<uint64_t>(t));
            round_to(layout.k_dtype, x, tile.data(), d * layout.chunk_tokens + t);
          }
        }
        bits2::summarize(layout, tile.data(),
                         image_.data() + i * summary_bytes() + page * params_.summary_page_bytes);
      }
    }
    resident_ = device_.allocate("summaries", distinct * summary_bytes());
    pinned_ = device_.pin("summaries", distinct * summary_bytes());
    stream_.upload(resident_.data(), image_.data(), distinct * summary_bytes());
    std::copy(image_.begin(), image_.end(), pinned_.data());

    const device::TableLayout tables(bounds_, problem_.group, 0);
    const TableImage image(tables);
    forward_.copy_to(image.arrays());
    std::mt19937 random(problem_.seed);
    for (const gpu::Part& part : forward_.parts) {
      for (int64_t c = 0; c < part.visible; ++c) {
        const int64_t which = problem_.distinct > 0 ? static_cast<int64_t>(random()) % distinct
                                                    : static_cast<int64_t>(which_.size());
        which_.push_back(which);
        const std::byte* at =
            (random() % 4 == 0 ? pinned_ : resident_).data() + which * summary_bytes();
        image.arrays().summaries[which_.size() - 1] =
            c < part.sealed ? reinterpret_cast<uint64_t>(at) : uint64_t{0};
      }
    }
    table_block_ = device_.allocate("tables", tables.bytes());
    stream_.upload(table_block_.data(), image.data(), tables.bytes());
    params_.tables = tables.tables(table_block_.data());
  }

  void make_queries() {
    const int64_t bytes =
        static_cast<int64_t>(forward_.rows.size()) * q_row() * dtype_bytes(problem_.q_dtype);
    std::vector<std::byte> image(static_cast<size_t>(bytes), std::byte{0xFF});
    q_.resize(forward_.rows.size());
    size_t turn = 0;
    for (size_t row = 0; row < forward_.rows.size(); ++row) {
      if (forward_.rows[row].part < 0) continue;
      for (int64_t h = 0; h < int64_t{heads()} * problem_.group; ++h) {
        for (int64_t d = 0; d < problem_.layout.k_dim; ++d) {
          float x = problem_.q_scale * noise(problem_.seed + 17, row, static_cast<uint64_t>(h),
                                             static_cast<uint64_t>(d));
          if (!problem_.q_sprinkled.empty() && (h + d) % 7 == 0) {
            x = problem_.q_sprinkled[turn++ % problem_.q_sprinkled.size()];
          }
          const int64_t at = static_cast<int64_t>(row) * q_row() + h * q_head() + d;
          round_to(problem_.q_dtype, x, image.data(), at);
          q_[row].push_back(widen(problem_.q_dtype, image.data(), at));
        }
      }
    }
    q_memory_ = device_.allocate("q", bytes);
    stream_.upload(q_memory_.data(), image.data(), bytes);
    params_.q = {q_memory_.data(),      problem_.q_dtype, heads() * problem_.group,
                 problem_.layout.k_dim, q_row(),          q_head()};
  }

  double score(int part, int32_t row, int head, CandidateRange range, std::vector<double>* scores) {
    const Layout& layout = problem_.layout;
    const int group = problem_.group;
    std::vector<const std::byte*> pointers;
    const int64_t page = int64_t{problem_.layer} * heads() + head;
    for (int64_t c = range.begin; c < range.end; ++c) {
      const int64_t which =
          which_[static_cast<size_t>(forward_.parts[static_cast<size_t>(part)].first + c)];
      pointers.push_back(image_.data() + which * summary_bytes() +
                         page * params_.summary_page_bytes);
    }
    std::vector<std::byte> query(static_cast<size_t>(bits2::query_bytes(layout, group)));
    bits2::prepare(layout, group,
                   q_[static_cast<size_t>(row)].data() + int64_t{head} * group * layout.k_dim,
                   query.data());
    scores->assign(pointers.size(), 0.0);
    bits2::score(layout, group, query.data(), pointers.data(),
                 static_cast<int64_t>(pointers.size()), scores->data());
    return bits2::query_scale(query.data());
  }

  // As the pager's ledger has them, in binary64.
  void share(const gpu::Part& part, CandidateRange range, const std::vector<double>& scores,
             double scale) {
    if (scores.empty()) return;
    const double top = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    for (const double score : scores) sum += std::exp((score - top) * scale);
    for (size_t i = 0; i < scores.size(); ++i) {
      shares_[static_cast<size_t>(part.first + range.begin) + i] +=
          std::exp((scores[i] - top) * scale) / sum;
    }
  }

  device::Memory guarded(const char* what, int64_t bytes) {
    device::Memory memory = device_.allocate(what, bytes + kGuard);
    stream_.fill(memory.data(), kPoison, bytes + kGuard);
    return memory;
  }
  template <class T>
  std::vector<T> download(const device::Memory& memory, int64_t count) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    std::vector<T> out(static_cast<size_t>(count));
    stream_.download(out.data(), memory.data(), bytes);
    std::vector<uint8_t> guard(static_cast<size_t>(kGuard));
    stream_.download(guard.data(), memory.data() + memory.bytes() - kGuard, kGuard);
    CHECK(guard == std::vector<uint8_t>(static_cast<size_t>(kGuard), kPoison));
    return out;
  }

  device::Device& device_;
  SelectionProblem problem_;
  TestStream stream_;
  gpu::SelectParams params_;
  ForwardTables forward_;
  gpu::Bounds bounds_;
  std::vector<int64_t> which_;  // [entries] distinct summary
  std::vector<std::byte> image_;
  std::vector<std::vector<float>> q_;
  std::vector<double> shares_;
  device::Memory always_, resident_, pinned_, table_block_, q_memory_;
};

}  // namespace kvpager::testing
