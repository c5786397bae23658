// Forwards in device memory for tests of the kernels: the sequences, rows and shapes of the CPU
// tests, with their chunks at shuffled addresses in device and pinned memory, the tables of
// cuda/params.h, and everything nobody wrote poisoned. Works for every plug-in there is.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "../device/devices.h"
#include "../kernels/attend_problem.h"
#include "cuda/tables.cuh"
#include "device/device.h"
#include "device/tables.h"
#include "forward_tables.h"

namespace kvpager::testing {

// Calls fn(device::Device&) for each of test_devices().
template <class Function>
void for_each_device(Function fn) {
  for (const std::string& kind : test_devices()) {
    CAPTURE(kind);
    const device::Report report = device::probe(kind);
    if (!report.why_not.empty()) FAIL(report.why_not);
    fn(*device::Device::open(kind));
  }
}

// Whether what only the shim can show is to be shown.
inline bool tests_shim() {
  const std::vector<std::string> kinds = test_devices();
  return std::find(kinds.begin(), kinds.end(), "shim") != kinds.end();
}

// A stream of a device, and copies on it that the host waits for.
class TestStream {
 public:
  explicit TestStream(device::Device& device) : device_(device), stream_(device), event_(device) {}

  device::Stream get() const { return stream_; }
  void synchronize() {
    event_.record(stream_);
    event_.synchronize();
  }
  // The same, and never throws: memory must not be freed under unfinished work.
  void finish() noexcept {
    api().record(device_.context(), event_, stream_);
    api().synchronize(device_.context(), event_);
  }
  void upload(void* to, const void* from, int64_t bytes) {
    copy(to, from, bytes, device::Direction::kUp);
  }
  void download(void* to, const void* from, int64_t bytes) {
    copy(to, from, bytes, device::Direction::kDown);
  }
  void fill(void* to, int byte, int64_t bytes) {
    if (bytes == 0) return;
    device_.check(api().fill(device_.context(), to, byte, bytes, stream_), "fill");
    synchronize();
  }

 private:
  const device::Api& api() const { return device_.api(); }
  void copy(void* to, const void* from, int64_t bytes, device::Direction direction) {
    if (bytes == 0) return;
    device_.check(api().copy(device_.context(), to, from, bytes, direction, stream_), "copy");
    synchronize();
  }

  device::Device& device_;
  OwnStream stream_;
  OwnEvent event_;
};

struct ForwardOptions {
  int layers = 1;
  int layer = 0;
  int pinned_percent = 30;  // of chunks that lie in pinned memory; of chunks that are staged, whose
  int staged_percent = 0;   // pages elsewhere are poison then
  uint32_t seed = 1;        // of addresses
  int max_rows = 0;         // 0: those of the first forward
  int stride_padding = 0;   // elements between heads of q and out
  int32_t small_queries = device::kSmallQueries;
  bool capture_counts = false;          // HostCounts as while a graph is captured
  bool stray_selection = false;         // bits of chunks after the row's own are set at random
  int64_t summary_page_bytes = 0;       // of one layer and kv head; 0: no summaries
  DType write_dtype = DType::kFloat32;  // of the k and v that write_rows is given
  int64_t scratch_bytes = -1;           // -1: what attend asks for
  int poison = 0xFF;                    // of scratch and out before each forward
};

// All memory is allocated when it is made; load() puts a forward into it, at the same addresses.
class DeviceForward {
 public:
  DeviceForward(device::Device& device, const Shape& shape, std::vector<Sequence*> sequences,
                const std::vector<Row>& rows, const ForwardOptions& options = {})
      : device_(device),
        shape_(shape),
        sequences_(std::move(sequences)),
        options_(options),
        layout_(layout_of(shape)),
        stream_(device),
        bounds_(bounds_of(rows)),
        tables_(bounds_, shape.group, 1, options.small_queries) {
    layout_.layers = options.layers;
    const int64_t max_rows = bounds_.rows;
    chunk_count_ = bounds_.entries + 3;
    blocks_ = device.allocate("blocks", chunk_count_ * layout_.chunk_bytes());
    slots_ = device.pin("slots", chunk_count_ * layout_.chunk_bytes());
    staging_ = device.allocate("staging", chunk_count_ * layout_.slice_bytes(0));
    table_block_ = device.allocate("tables", tables_.bytes());
    q_ = device.allocate("q", max_rows * q_row() * dtype_bytes(shape.io()));
    out_ = device.allocate("out", max_rows * out_row() * dtype_bytes(shape.io()));
    k_ = device.allocate("k", max_rows * shape.kv_heads * shape.k_dim * write_bytes());
    v_ = device.allocate("v", max_rows * shape.kv_heads * shape.v_dim * write_bytes());
    sinks_ = device.allocate("sinks", q_heads() * int64_t{sizeof(float)});
    selected_ = device.allocate("selected", max_rows * shape.kv_heads * selected_stride());
    status_ = device.allocate("status", int64_t{sizeof(uint64_t)});
    if (options.summary_page_bytes > 0) {
      summaries_ = device.allocate("summaries", chunk_count_ * summary_bytes());
    }
    const gpu::Shape kernel_shape = this->kernel_shape();
    int64_t scratch = options.scratch_bytes;
    if (scratch < 0) {
      for (const gpu::Attention attention : {gpu::Attention::kReference, gpu::Attention::kTensor}) {
        scratch = std::max(scratch,
                           device.api().attend_scratch_bytes(&kernel_shape, &bounds_, attention));
      }
    }
    scratch_ = device.allocate("scratch", std::max<int64_t>(scratch, 256));
    scratch_bytes_ = scratch;
    load(rows);
  }

  ~DeviceForward() { stream_.finish(); }
  DeviceForward(const DeviceForward&) = delete;
  DeviceForward& operator=(const DeviceForward&) = delete;

  // Puts a forward of these rows into memory, with chunks at addresses of `placement`. The keys and
  // values of rows with commit[i] are left to write_rows; each is a row at its sequence's position.
  void load(const std::vector<Row>& rows, const std::vector<char>& commit = {},
            uint32_t placement = 0) {
    REQUIRE(static_cast<int64_t>(rows.size()) <= bounds_.rows);
    rows_ = rows;
    random_.seed(options_.seed * 1000003 + placement);
    fill_tables(commit);
    place_chunks(commit);
    finish_tables(commit);
    load_tensors(commit);
    fill(out_, options_.poison);
    fill(scratch_, options_.poison);
    const uint64_t none = gpu::kNoFailure;
    stream_.upload(status_.data(), &none, sizeof none);
  }

  // Launches attend and reads the output back, as float32 [rows][q_heads * v_dim].
  std::vector<std::vector<float>> attend(gpu::Attention attention = gpu::Attention::kReference) {
    const gpu::AttendParams params = attend_params(attention);
    device_.check(device_.api().attend(device_.context(), &params, stream_.get()), "attend");
    return read_out();
  }

  // The same by one call for each wave, while the chunks of the others are poison.
  std::vector<std::vector<float>> attend_in_waves(gpu::Attention attention,
                                                  const std::vector<gpu::Wave>& waves) {
    gpu::AttendParams params = attend_params(attention);
    for (const gpu::Wave& wave : waves) {
      show_only(wave);
      params.wave = wave;
      device_.check(device_.api().attend(device_.context(), &params, stream_.get()), "attend");
      stream_.synchronize();
    }
    return read_out();
  }
  // The forward's chunks in waves that end at random.
  std::vector<gpu::Wave> random_waves(uint32_t seed) const {
    std::mt19937 random(seed);
    device::WaveCutter cutter;
    for (int32_t p = 0; p < forward_.header.parts; ++p) {
      const int64_t visible = forward_.parts[static_cast<size_t>(p)].visible;
      for (int64_t end = 0; end < visible;) {
        end = std::min(end + gpu::kWaveChunks, visible);
        cutter.add(p, end);
        if (random() % 2 == 0) cutter.cut();
      }
    }
    return cutter.take();
  }

  std::vector<std::vector<float>> read_out() {
    const int64_t element = dtype_bytes(shape_.io());
    std::vector<std::byte> bytes(static_cast<size_t>(out_.bytes()));
    stream_.download(bytes.data(), out_.data(), out_.bytes());
    const auto poison = static_cast<std::byte>(options_.poison);
    int64_t strays = 0;
    std::vector<std::vector<float>> result(rows_.size());
    for (int64_t row = 0; row < count(); ++row) {
      for (int h = 0; h < q_heads(); ++h) {
        for (int d = 0; d < shape_.v_dim; ++d) {
          const int64_t at = row * out_row() + h * out_head() + d;
          result[static_cast<size_t>(row)].push_back(widen(shape_.io(), bytes.data(), at));
        }
      }
    }
    // What lies between heads and after the last row is nobody's to write.
    for (int64_t at = 0; at < out_.bytes(); ++at) {
      const bool within = at < count() * out_row() * element &&
                          at / element % out_row() % out_head() < shape_.v_dim;
      if (!within) strays += bytes[static_cast<size_t>(at)] != poison;
    }
    CHECK(strays == 0);
    return result;
  }

  // Makes the summaries of sealed chunks. Staged chunks have none: their pages are elsewhere.
  void summarize(int64_t summary_page_bytes) {
    gpu::SummarizeParams p;
    p.shape = kernel_shape();
    p.summary_page_bytes = summary_page_bytes;
    for (size_t i = 0; i < chunks_.size(); ++i) {
      if (summary_addresses_[i] != 0) {
        p.chunks[p.count] = reinterpret_cast<const void*>(chunks_[i]);
        p.summaries[p.count++] = reinterpret_cast<void*>(summary_addresses_[i]);
      }
      if (p.count == gpu::kMaxSummarized || (p.count > 0 && i + 1 == chunks_.size())) {
        device_.check(device_.api().summarize(device_.context(), &p, stream_.get()), "summarize");
        p.count = 0;
      }
    }
    stream_.synchronize();
  }

  // The chunks the rows attend to by the bitmap that is in memory now.
  std::vector<Row> rows_as_selected() {
    std::vector<uint8_t> bits(static_cast<size_t>(selected_.bytes()));
    stream_.download(bits.data(), selected_.data(), selected_.bytes());
    std::vector<Row> rows = rows_;
    for (int64_t i = 0; i < count(); ++i) {
      Row& row = rows[static_cast<size_t>(i)];
      row.selected.assign(static_cast<size_t>(shape_.kv_heads), {});
      for (int head = 0; row.sequence >= 0 && head < shape_.kv_heads; ++head) {
        const uint8_t* line = bits.data() + (i * shape_.kv_heads + head) * selected_stride();
        for (int32_t c = 0; c <= row.position / shape_.tokens; ++c) {
          if ((line[c / 8] >> c % 8 & 1) != 0) row.selected[static_cast<size_t>(head)].push_back(c);
        }
      }
    }
    return rows;
  }

  // The bits the CPU's kernels give the rows.
  std::vector<std::vector<float>> on_cpu() const {
    return testing::attend(shape_, sequences_, rows_);
  }

  gpu::Shape kernel_shape() const { return kernel_shape_of(layout_, shape_.group, shape_.io()); }
  gpu::Tables tables() const {
    return tables_.tables(table_block_.data(), options_.staged_percent > 0 ? 0 : -1);
  }
  gpu::HostCounts counts() const {
    if (options_.capture_counts) {
      return device::most_counts(bounds_, shape_.group, options_.small_queries);
    }
    return {forward_.header.rows, forward_.header.parts, forward_.header.small_tiles,
            forward_.header.large_tiles, forward_.header.max_visible};
  }
  gpu::AttendParams attend_params(gpu::Attention attention = gpu::Attention::kReference) const {
    gpu::AttendParams p;
    p.shape = kernel_shape();
    p.tables = tables();
    p.counts = counts();
    p.attention = attention;
    p.layer = options_.layer;
    p.shape.slice_offset = layout_.slice_offset(options_.layer);
    p.q = {q_.data(), shape_.io(), q_heads(), shape_.k_dim, q_row(), q_head()};
    p.out = {out_.data(), shape_.io(), q_heads(), shape_.v_dim, out_row(), out_head()};
    p.scaling = scaling_of(shape_);
    p.softcap = shape_.softcap;
    p.window = shape_.window;
    p.sinks = shape_.sinks ? reinterpret_cast<const float*>(sinks_.data()) : nullptr;
    p.selected = selecting_ ? reinterpret_cast<const uint8_t*>(selected_.data()) : nullptr;
    p.selected_stride = selected_stride();
    p.scratch = scratch_.data();
    p.scratch_bytes = scratch_bytes_;
    return p;
  }
  gpu::WriteParams write_params() const {
    gpu::WriteParams p;
    p.shape = kernel_shape();
    p.tables = tables();
    p.counts = counts();
    p.layer = options_.layer;
    p.shape.slice_offset = layout_.slice_offset(options_.layer);
    const int32_t heads = shape_.kv_heads;
    p.k = {k_.data(),    options_.write_dtype,          heads,
           shape_.k_dim, int64_t{heads} * shape_.k_dim, shape_.k_dim};
    p.v = {v_.data(),    options_.write_dtype,          heads,
           shape_.v_dim, int64_t{heads} * shape_.v_dim, shape_.v_dim};
    p.status = reinterpret_cast<uint64_t*>(status_.data());
    return p;
  }

  device::Device& device() { return device_; }
  TestStream& stream() { return stream_; }
  const Shape& shape() const { return shape_; }
  const Layout& layout() const { return layout_; }
  const gpu::Bounds& bounds() const { return bounds_; }
  const gpu::Header& header() const { return forward_.header; }
  const std::vector<gpu::Row>& kernel_rows() const { return forward_.rows; }
  const std::vector<gpu::Part>& parts() const { return forward_.parts; }
  // [entries] addresses in the tables: of chunks, and of summaries (0: none).
  const std::vector<uint64_t>& chunks() const { return chunks_; }
  const std::vector<uint64_t>& summaries() const { return summary_addresses_; }
  // The sequence of a part.
  int sequence_of(int part) const { return forward_.sequences[static_cast<size_t>(part)]; }
  uint8_t* selected() const { return reinterpret_cast<uint8_t*>(selected_.data()); }
  int64_t selected_stride() const { return ((bounds_.chunks + 7) / 8 + 3) / 4 * 4; }
  int64_t summary_bytes() const {
    return options_.summary_page_bytes * layout_.layers * layout_.kv_heads;
  }
  int q_heads() const { return shape_.kv_heads * shape_.group; }
  int64_t count() const { return static_cast<int64_t>(rows_.size()); }
  // A chunk's bytes as they are now, wherever they lie.
  std::vector<std::byte> read_chunk(int64_t entry) {
    std::vector<std::byte> bytes(static_cast<size_t>(layout_.chunk_bytes()));
    const auto* at = reinterpret_cast<const std::byte*>(chunks_[static_cast<size_t>(entry)]);
    if (at >= slots_.data() && at < slots_.data() + slots_.bytes()) {
      std::memcpy(bytes.data(), at, bytes.size());
    } else {
      stream_.download(bytes.data(), at, layout_.chunk_bytes());
    }
    return bytes;
  }
  uint64_t read_status() {
    uint64_t status = 0;
    stream_.download(&status, status_.data(), sizeof status);
    return status;
  }

 private:
  int64_t q_head() const { return shape_.k_dim + options_.stride_padding; }
  int64_t q_row() const { return q_heads() * q_head() + options_.stride_padding; }
  int64_t out_head() const { return shape_.v_dim + options_.stride_padding; }
  int64_t out_row() const { return q_heads() * out_head(); }
  int64_t write_bytes() const { return dtype_bytes(options_.write_dtype); }
  int64_t chunks_of(int64_t tokens) const { return (tokens + shape_.tokens - 1) / shape_.tokens; }
  bool percent(int share) { return static_cast<int>(random_() % 100) < share; }
  void fill(const device::Memory& memory, int byte) {
    stream_.fill(memory.data(), byte, memory.bytes());
  }

  gpu::Bounds bounds_of(const std::vector<Row>& rows) const {
    gpu::Bounds bounds;
    bounds.rows = std::max<int32_t>(options_.max_rows, static_cast<int32_t>(rows.size()));
    for (const Sequence* sequence : sequences_) {
      bounds.chunks = std::max(bounds.chunks, chunks_of(sequence->length()));
      bounds.entries += chunks_of(sequence->length());
    }
    return bounds;
  }

  void fill_tables(const std::vector<char>& commit) {
    forward_ = ForwardTables(rows_, shape_.tokens);
    for (gpu::Part& p : forward_.parts) p.sealed = p.written / shape_.tokens;
    // What this forward writes to has no summary yet.
    for (size_t i = 0; i < commit.size(); ++i) {
      const gpu::Row& row = forward_.rows[i];
      if (commit[i] == 0 || row.part < 0) continue;
      gpu::Part& p = forward_.parts[static_cast<size_t>(row.part)];
      p.sealed = std::min(p.sealed, row.position / shape_.tokens);
    }
    forward_.arrange(shape_.group, options_.small_queries);
  }

  void poison_token(std::byte* slice, int64_t t) const {
    const int64_t tokens = layout_.chunk_tokens;
    const auto spoil = [](std::byte* at, int64_t bytes) {
      std::memset(at, 0xFF, static_cast<size_t>(bytes));
    };
    for (int head = 0; head < shape_.kv_heads; ++head) {
      std::byte* keys = slice + layout_.page_bytes() * head;
      std::byte* values = keys + layout_.k_tile_bytes();
      const auto spoil_scales = [&](std::byte* tile, DType dtype, int64_t dim) {
        std::byte* scales = tile + tokens * row_code_bytes(dtype, dim);
        for (int64_t g = 0; g < code_scales(dtype, dim); ++g) {
          spoil(scales + 2 * (g * tokens + t), 2);
        }
      };
      if (is_coded(layout_.k_dtype)) {
        const int64_t pair = layout_.k_dtype == DType::kQ8 ? 2 : 1;  // bytes of two dimensions
        for (int64_t r = 0; r < shape_.k_dim / 2; ++r) spoil(keys + (r * tokens + t) * pair, pair);
        spoil_scales(keys, layout_.k_dtype, shape_.k_dim);
      } else {
        const int64_t element = dtype_bytes(layout_.k_dtype);
        for (int64_t d = 0; d < shape_.k_dim; ++d) {
          spoil(keys + (d * tokens + t) * element, element);
        }
      }
      if (layout_.v_dtype == DType::kQ8) {
        std::byte* pair = values + t / 2 * 2 * shape_.v_dim + t % 2;
        for (int64_t j = 0; j < shape_.v_dim; ++j) spoil(pair + 2 * j, 1);
      } else {
        const int64_t row = row_code_bytes(layout_.v_dtype, shape_.v_dim);
        spoil(values + t * row, row);
      }
      if (is_coded(layout_.v_dtype)) spoil_scales(values, layout_.v_dtype, shape_.v_dim);
    }
  }

  // Each part's chunks in blocks or slots drawn at random; the rest of the memory is poison.
  void place_chunks(const std::vector<char>& commit) {
    fill(blocks_, 0xFF);
    fill(staging_, 0xFF);
    fill(summaries_, 0xFF);
    std::memset(slots_.data(), 0xFF, static_cast<size_t>(slots_.bytes()));
    std::vector<int64_t> homes(static_cast<size_t>(chunk_count_));
    std::iota(homes.begin(), homes.end(), 0);
    for (size_t i = homes.size(); i > 1; --i) std::swap(homes[i - 1], homes[random_() % i]);
    chunks_.clear();
    staged_.clear();
    summary_addresses_.clear();
    std::vector<std::byte> slice(static_cast<size_t>(layout_.slice_bytes(0)));
    for (int part = 0; part < forward_.header.parts; ++part) {
      const gpu::Part& p = forward_.parts[static_cast<size_t>(part)];
      const Sequence& sequence = *sequences_[static_cast<size_t>(sequence_of(part))];
      std::vector<char> unwritten(static_cast<size_t>(p.visible * shape_.tokens));
      for (int64_t t = p.written; t < p.visible * shape_.tokens; ++t) {
        unwritten[static_cast<size_t>(t)] = 1;
      }
      for (size_t i = 0; i < commit.size(); ++i) {
        if (commit[i] == 0 || forward_.rows[i].part != part) continue;
        unwritten[static_cast<size_t>(forward_.rows[i].position)] = 1;
      }
      for (int64_t c = 0; c < p.visible; ++c) {
        std::memcpy(slice.data(), sequence.table().slices[c], slice.size());
        for (int t = 0; t < shape_.tokens; ++t) {
          if (unwritten[static_cast<size_t>(c * shape_.tokens + t)] != 0) {
            poison_token(slice.data(), t);
          }
        }
        bool written_to = false;
        for (size_t i = 0; i < commit.size(); ++i) {
          written_to = written_to || (commit[i] != 0 && forward_.rows[i].part == part &&
                                      forward_.rows[i].position / shape_.tokens == c);
        }
        const int64_t home = homes[chunks_.size()];
        // Chunks that rows are written to are in device memory, and not staged.
        const bool pinned = percent(options_.pinned_percent) && !written_to;
        const bool staged = percent(options_.staged_percent) && !written_to;
        std::byte* chunk = (pinned ? slots_ : blocks_).data() + home * layout_.chunk_bytes();
        std::byte* at = chunk + layout_.slice_offset(options_.layer);
        std::byte* staging = staging_.data() + home * layout_.slice_bytes(0);
        if (staged) {
          stream_.upload(staging, slice.data(), layout_.slice_bytes(0));
        } else if (pinned) {
          std::memcpy(at, slice.data(), slice.size());
        } else {
          stream_.upload(at, slice.data(), layout_.slice_bytes(0));
        }
        chunks_.push_back(reinterpret_cast<uint64_t>(chunk));
        staged_.push_back(staged ? reinterpret_cast<uint64_t>(staging) : 0);
        const bool summary = c < p.sealed && summaries_.data() != nullptr;
        summary_addresses_.push_back(
            summary ? reinterpret_cast<uint64_t>(summaries_.data() + home * summary_bytes()) : 0);
      }
    }
    poison_chunk_ =
        reinterpret_cast<uint64_t>(blocks_.data() + homes[chunks_.size()] * layout_.chunk_bytes());
  }

  void finish_tables(const std::vector<char>& commit) {
    for (size_t i = 0; i < commit.size(); ++i) {
      gpu::Row& row = forward_.rows[i];
      if (commit[i] == 0 || row.part < 0) continue;
      const gpu::Part& part = forward_.parts[static_cast<size_t>(row.part)];
      row.write_offset = static_cast<int32_t>(row.position % shape_.tokens);
      row.write_chunk = chunks_[static_cast<size_t>(part.first + row.position / shape_.tokens)];
    }
    const TableImage image(tables_);
    forward_.copy_to(image.arrays());
    std::copy(chunks_.begin(), chunks_.end(), image.arrays().chunks);
    std::copy(summary_addresses_.begin(), summary_addresses_.end(), image.arrays().summaries);
    std::copy(staged_.begin(), staged_.end(), image.arrays().staged[0]);
    stream_.upload(table_block_.data(), image.data(), tables_.bytes());
  }

  void show_only(const gpu::Wave& wave) {
    std::vector<uint64_t> chunks = chunks_, staged = staged_;
    for (int32_t p = 0; p < forward_.header.parts; ++p) {
      const gpu::Part& part = forward_.parts[static_cast<size_t>(p)];
      const gpu::Span span = gpu::span_of(wave, p, part);
      for (int64_t c = 0; c < part.visible; ++c) {
        if (c >= span.begin && c < span.end) continue;
        const auto entry = static_cast<size_t>(part.first + c);
        chunks[entry] = poison_chunk_;
        staged[entry] = 0;
      }
    }
    const auto count = static_cast<int64_t>(chunks.size());
    const auto send = [&](device::TableLayout::Range range, const std::vector<uint64_t>& from) {
      stream_.upload(table_block_.data() + range.begin, from.data(), range.end - range.begin);
    };
    send(tables_.chunks(count), chunks);
    send(tables_.staged(0, count), staged);
  }

  void load_tensors(const std::vector<char>& commit) {
    std::vector<std::byte> q(static_cast<size_t>(q_.bytes()), std::byte{0xFF});
    std::vector<std::byte> k(static_cast<size_t>(k_.bytes()), std::byte{0xFF});
    std::vector<std::byte> v(static_cast<size_t>(v_.bytes()), std::byte{0xFF});
    selecting_ = std::any_of(rows_.begin(), rows_.end(),
                             [](const Row& row) { return !row.selected.empty(); });
    std::vector<uint8_t> bits(static_cast<size_t>(selected_.bytes()),
                              options_.stray_selection ? 0xFF : 0);
    for (int64_t i = 0; i < count(); ++i) {
      const Row& row = rows_[static_cast<size_t>(i)];
      if (row.sequence < 0) continue;  // padding: poison throughout
      const std::vector<float> query = query_of(shape_, row);
      for (int h = 0; h < q_heads(); ++h) {
        for (int d = 0; d < shape_.k_dim; ++d) {
          round_to(shape_.io(), query[static_cast<size_t>(h * shape_.k_dim + d)], q.data(),
                   i * q_row() + h * q_head() + d);
        }
      }
      for (int head = 0; selecting_ && head < shape_.kv_heads; ++head) {
        uint8_t* line = bits.data() + (i * shape_.kv_heads + head) * selected_stride();
        for (int64_t c = 0; c <= row.position / shape_.tokens; ++c) {
          line[c / 8] = static_cast<uint8_t>(line[c / 8] & ~(1 << c % 8));
        }
        for (const int32_t c : row.selected[static_cast<size_t>(head)]) {
          line[c / 8] = static_cast<uint8_t>(line[c / 8] | 1 << c % 8);
        }
      }
      if (static_cast<size_t>(i) >= commit.size() || commit[static_cast<size_t>(i)] == 0) continue;
      const Sequence& sequence = *sequences_[static_cast<size_t>(row.sequence)];
      const auto write = [&](const float* from, int dim, int head, std::vector<std::byte>* to) {
        for (int d = 0; d < dim; ++d) {
          round_to(options_.write_dtype, from[d], to->data(),
                   (i * shape_.kv_heads + head) * dim + d);
        }
      };
      for (int head = 0; head < shape_.kv_heads; ++head) {
        write(sequence.k(row.position, head), shape_.k_dim, head, &k);
        write(sequence.v(row.position, head), shape_.v_dim, head, &v);
      }
    }
    std::vector<float> sinks;
    for (int h = 0; h < q_heads(); ++h) sinks.push_back(sink_of(shape_, h));
    stream_.upload(q_.data(), q.data(), q_.bytes());
    stream_.upload(k_.data(), k.data(), k_.bytes());
    stream_.upload(v_.data(), v.data(), v_.bytes());
    stream_.upload(selected_.data(), bits.data(), selected_.bytes());
    stream_.upload(sinks_.data(), sinks.data(), sinks_.bytes());
  }

  device::Device& device_;
  Shape shape_;
  std::vector<Sequence*> sequences_;
  ForwardOptions options_;
  Layout layout_;
  TestStream stream_;
  gpu::Bounds bounds_;
  device::TableLayout tables_;
  int64_t chunk_count_ = 0;
  int64_t scratch_bytes_ = 0;
  device::Memory blocks_, slots_, staging_, table_block_, q_, out_, k_, v_, sinks_, selected_,
      status_, summaries_, scratch_;

  std::mt19937 random_;
  std::vector<Row> rows_;
  bool selecting_ = false;
  ForwardTables forward_;
  std::vector<uint64_t> chunks_, staged_, summary_addresses_;
  uint64_t poison_chunk_ = 0;  // that no row sees
};

}  // namespace kvpager::testing
