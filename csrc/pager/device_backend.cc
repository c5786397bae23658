// Memory on a device, and how it is accounted for.
#include "pager/device_backend.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "kvpager/attention.h"
#include "kvpager/error.h"

namespace kvpager {
namespace {

constexpr int64_t kRing = 4;        // forwards whose tables may be on their way
constexpr int64_t kBounces = 4;     // chunks on their way through pinned memory
constexpr int64_t kEntries = 1024;  // capacity to begin with
constexpr int64_t kStagingBytes = int64_t{256} << 20;
constexpr int64_t kAlignment = 256;
constexpr DType kQueryDtypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

void keep_as(const Layout& layer, gpu::Shape* shape) {
  shape->k_dtype = layer.k_dtype;
  shape->v_dtype = layer.v_dtype;
  shape->k_rotated = layer.k_rotated;
  shape->v_rotated = layer.v_rotated;
  shape->k_tile_bytes = layer.k_tile_bytes();
  shape->page_bytes = layer.page_bytes();
  shape->slice_bytes = layer.page_bytes() * layer.kv_heads;
}

// Of layers that are no floats beside codes.
gpu::Shape shape_of(const PagerOptions& options) {
  const Layout& layout = options.layout;
  if (options.q_heads <= 0 || options.q_heads % layout.kv_heads != 0) {
    throw InvalidArgumentError(str("q_heads: ", options.q_heads,
                                   ", expected the model's query heads, a multiple of kv_heads=",
                                   layout.kv_heads, ", for device ", options.device));
  }
  gpu::Shape shape;
  shape.layers = layout.layers;
  shape.kv_heads = layout.kv_heads;
  shape.q_heads = options.q_heads;
  shape.chunk_tokens = layout.chunk_tokens;
  shape.k_dim = layout.k_dim;
  shape.v_dim = layout.v_dim;
  keep_as(layout, &shape);
  return shape;
}

// Shapes of runs of layers that are kept alike, and where each begins.
std::vector<std::pair<int32_t, gpu::Shape>> runs_of_layers(const Layout& layout,
                                                           const gpu::Shape& shape) {
  std::vector<std::pair<int32_t, gpu::Shape>> runs;
  for (int layer = 0; layer < layout.layers; ++layer) {
    if (layer > 0 && layout.float_layers.has(layer) == layout.float_layers.has(layer - 1)) {
      ++runs.back().second.layers;
      continue;
    }
    gpu::Shape run = shape;
    keep_as(layout.of_layer(layer), &run);
    run.layers = 1;
    run.slice_offset = layout.slice_offset(layer);
    runs.push_back({layer, run});
  }
  return runs;
}

// Tensor cores where there is a kernel and a block of it fits the device, of layers of codes and of float
// layers: one for all.
gpu::Attention attention_for(const device::Device& device, const PagerOptions& options,
                             const std::vector<std::pair<int32_t, gpu::Shape>>& runs,
                             DType q_dtype) {
  if (options.attention != "auto") return gpu::Attention::kReference;
  for (const auto& run : runs) {
    gpu::Shape shape = run.second;
    shape.q_dtype = q_dtype;
    const int64_t shared = device.api().tensor_attention_shared_bytes(&shape);
    const bool fits = shared > 0 && shared <= device.info().shared_block_bytes;
    if (!fits) return gpu::Attention::kReference;
  }
  return gpu::Attention::kTensor;
}

const char* name_of(gpu::Attention attention) {
  return attention == gpu::Attention::kTensor ? "tensor" : "reference";
}

int version_of(gpu::Attention attention) {
  return attention == gpu::Attention::kTensor ? gpu::kTensorKernelVersion : kKernelVersion;
}

// Slices of each half of staging.
int64_t staged_slices(const PagerOptions& options, int64_t host_slots) {
  if (options.missed_chunks == "direct") return 0;
  const int64_t slice = options.layout.largest_slice_bytes();
  if (options.staging_bytes >= 0) return std::min(options.staging_bytes / (2 * slice), host_slots);
  return std::min(kStagingBytes / (2 * slice), host_slots);
}

int64_t sink_sets(const Layout& layout) { return layout.layers + 16; }

}  // namespace

AttentionKind attention_of(const PagerOptions& options, DType q_dtype) {
  if (options.device == "cpu") return {"reference", kKernelVersion};
  if (options.device == "meta") return {"none", 0};
  const auto runs = runs_of_layers(options.layout, shape_of(options));
  const auto device = device::Device::open(options.device);
  const gpu::Attention attention = attention_for(*device, options, runs, q_dtype);
  return {name_of(attention), version_of(attention)};
}

DeviceBackend::DeviceBackend(const BackendParts& parts)
    : BackendParts(parts),
      shape_(shape_of(config_.options)),
      runs_(runs_of_layers(layout_, shape_)),
      device_(device::Device::open(config_.options.device)),
      api_(device_->api()),
      pool_(device_->allocate("pool_tokens", config_.slots.pool * layout_.chunk_bytes()),
            config_.slots.pool, layout_.chunk_bytes()),
      host_(device_->pin("host_bytes", config_.slots.host * layout_.chunk_bytes()),
            config_.slots.host, layout_.chunk_bytes()),
      summaries_(
          device_->allocate("summary_bytes", config_.slots.summaries * config_.summary_slot_bytes),
          config_.slots.summaries, config_.summary_slot_bytes),
      mirror_(device_->pin("summary_bytes", config_.slots.summaries * config_.summary_slot_bytes),
              config_.slots.summaries, config_.summary_slot_bytes),
      bounce_(device_->pin("transfer buffers", kBounces * layout_.chunk_bytes()), kBounces,
              layout_.chunk_bytes()),
      staging_(device_->allocate("staging", 2 * staged_slices(config_.options, host_.slots()) *
                                                layout_.largest_slice_bytes()),
               2, staged_slices(config_.options, host_.slots()) * layout_.largest_slice_bytes()),
      sinks_(device_->allocate("attention sinks", sink_sets(layout_) * aligned(shape_.q_heads * 4)),
             sink_sets(layout_), aligned(shape_.q_heads * 4)),
      sinks_host_(device_->pin("attention sinks", sink_sets(layout_) * sinks_.slot_bytes)),
      always_(device_->allocate(
          "selection", aligned(static_cast<int64_t>(
                           16 * std::max<size_t>(1, config_.options.selection.always.size()))))),
      arrays_(allocate_arrays(
          {static_cast<int32_t>(config_.options.rows), kEntries,
           std::max(kEntries, config_.slots.pool + host_.slots() + config_.slots.disk)})),
      ring_places_(static_cast<size_t>(kRing)),
      windows_(static_cast<size_t>(layout_.layers), 0),
      timeline_(device_) {
  for (int64_t i = 0; i < pool_.slots(); ++i) freed(BlockId(static_cast<int32_t>(i)));
  const auto& always = config_.options.selection.always;
  if (!always.empty()) {
    static_assert(sizeof(always[0]) == 16, "pairs of int64");
    const auto* const ranges = reinterpret_cast<const std::byte*>(always.data());
    const auto bytes = static_cast<int64_t>(16 * always.size());
    // Through a transfer buffer, of which there may be more.
    for (int64_t done = 0; done < bytes; done += bounce_.slot_bytes) {
      const int64_t some = std::min(bounce_.slot_bytes, bytes - done);
      std::memcpy(bounce_.at(0), ranges + done, static_cast<size_t>(some));
      Place constant;
      copy(Lane::kUp, device::Direction::kUp, {always_.data() + done, &constant}, piece(bounce_, 0),
           some);
      timeline_.wait(constant.written, "host starts");
    }
  }
}

DevicePlace DeviceBackend::place() const {
  return {api_.tensor_device, device_->ordinal(), device_->name()};
}

gpu::Shape DeviceBackend::shape(DType q_dtype) const {
  gpu::Shape shape = shape_;
  shape.q_dtype = q_dtype;
  return shape;
}

gpu::Shape DeviceBackend::shape_at(int layer, DType q_dtype) const {
  gpu::Shape shape;
  for (const auto& [first, run] : runs_) {
    if (first <= layer) shape = run;
  }
  shape.layers = layout_.layers;
  shape.slice_offset = layout_.slice_offset(layer);
  shape.q_dtype = q_dtype;
  return shape;
}

gpu::Attention DeviceBackend::attention(DType q_dtype) const {
  return attention_for(*device_, config_.options, runs_, q_dtype);
}

const char* DeviceBackend::attention_name(DType q_dtype) const {
  return name_of(attention(q_dtype));
}

int DeviceBackend::attention_version(DType q_dtype) const { return version_of(attention(q_dtype)); }

bool DeviceBackend::capturing(void* stream) const {
  bool yes = false;
  device_->check(api_.capturing(device_->context(), stream, &yes),
                 "asking whether a stream is capturing");
  return yes;
}

DeviceBackend::Arrays DeviceBackend::allocate_arrays(const gpu::Bounds& bounds) const {
  const int32_t group = shape_.q_heads / shape_.kv_heads;
  Arrays arrays{bounds, device::TableLayout(bounds, group, 2), {}, {}, {}, {}, {}, 0, {}, {}, {}};
  arrays.tables = device_->allocate("forward tables", arrays.layout.bytes());
  for (int64_t i = 0; i < kRing; ++i) {
    arrays.ring.push_back(device_->pin("forward tables", arrays.layout.bytes()));
  }
  const int64_t results =
      aligned(kStatusBytes) + aligned(bounds.entries * 8) + aligned(bounds.entries);
  arrays.results = device_->allocate("forward results", results);
  arrays.results_host = device_->pin("forward results", results);
  int64_t scratch = 1;
  if (config_.options.selection.kind != Selection::Kind::kDense) {
    arrays.selected_stride = (bounds.chunks + 31) / 32 * 4;
    arrays.selected =
        device_->allocate("selections", bounds.rows * shape_.kv_heads * arrays.selected_stride);
  }
  for (const DType dtype : kQueryDtypes) {
    const gpu::Shape with = shape(dtype);
    scratch = std::max({scratch, api_.attend_scratch_bytes(&with, &bounds, attention(dtype)),
                        api_.select_scratch_bytes(&with, &bounds)});
  }
  const int64_t most = config_.options.scratch_bytes;
  if (most >= 0 && scratch > most) {
    throw CapacityError(str("scratch_bytes: ", most, ", but kernels need ", scratch,
                            " bytes for forwards of ", bounds.rows, " rows that see ",
                            bounds.chunks, " chunks. Raise scratch_bytes"));
  }
  arrays.scratch = device_->allocate("partial results", aligned(scratch));
  const int64_t floats = int64_t{bounds.rows} * shape_.q_heads * sizeof(float);
  if (layout_.k_rotated) {
    arrays.queries = device_->allocate("rotated queries", aligned(floats * layout_.k_dim));
  }
  if (layout_.v_rotated) {
    arrays.outputs = device_->allocate("rotated outputs", aligned(floats * layout_.v_dim));
  }
  return arrays;
}

// Arrays for a forward of so many chunks, of all parts and of the one that sees most. What was
// captured before refers to memory that is gone.
void DeviceBackend::grow(int64_t entries, int64_t visible) {
  if (entries <= arrays_.bounds.entries && visible <= arrays_.bounds.chunks) return;
  gpu::Bounds bounds = arrays_.bounds;
  while (bounds.entries < entries) bounds.entries *= 2;
  while (bounds.chunks < visible) bounds.chunks *= 2;
  Arrays next = allocate_arrays(bounds);
  timeline_.finish();
  arrays_ = std::move(next);
  std::fill(ring_places_.begin(), ring_places_.end(), Place());
  ++generation_;
}

void DeviceBackend::grow_given(int64_t rows) {
  static_assert(sizeof(gpu::Header) <= kGivenRowsAt, "rows lie behind the header");
  if (rows <= given_.rows) return;
  GivenTables next;
  for (next.rows = std::max<int64_t>(given_.rows, config_.options.rows); next.rows < rows;) {
    next.rows *= 2;
  }
  const int64_t bytes = aligned(kGivenRowsAt + next.rows * static_cast<int64_t>(sizeof(gpu::Row)));
  next.host = device_->pin("given positions", bytes);
  next.device = device_->allocate("given positions", bytes);
  timeline_.finish();
  given_ = std::move(next);
}

int64_t DeviceBackend::entry_offset(bool read) const {
  return aligned(kStatusBytes) + (read ? aligned(arrays_.bounds.entries * 8) : 0);
}

void DeviceBackend::add_to(PagerStats* stats) const {
  int64_t ring = 0;
  for (const device::Memory& memory : arrays_.ring) ring += memory.bytes();
  stats->pool_bytes = pool_.memory.bytes();
  stats->host_bytes = host_.memory.bytes();
  stats->summary_bytes = summaries_.memory.bytes();
  stats->staging_bytes = staging_.memory.bytes();
  stats->scratch_bytes = arrays_.scratch.bytes();
  stats->table_bytes = arrays_.tables.bytes() + arrays_.results.bytes() + arrays_.selected.bytes() +
                       given_.device.bytes();
  stats->device_bytes = pool_.memory.bytes() + summaries_.memory.bytes() + staging_.memory.bytes() +
                        sinks_.memory.bytes() + always_.bytes() + stats->table_bytes +
                        arrays_.scratch.bytes();
  stats->pinned_bytes = host_.memory.bytes() + mirror_.memory.bytes() + bounce_.memory.bytes() +
                        sinks_host_.bytes() + arrays_.results_host.bytes() + given_.host.bytes() +
                        ring;
}

void DeviceBackend::check_invariants() {
  const auto require = [](bool holds, int number, const std::string& what) {
    if (!holds) throw InvariantError(str("invariant ", number, ": ", what));
  };
  require(pool_.slots() == config_.options.pool_blocks &&
              pool_.memory.bytes() >= pool_.slots() * layout_.chunk_bytes(),
          2, "the pool is not the size it was given");
  require(host_.memory.bytes() >= config_.slots.host * layout_.chunk_bytes(), 2,
          "the host arena is not the size it was given");
  require(config_.options.scratch_bytes < 0 ||
              arrays_.scratch.bytes() <= aligned(config_.options.scratch_bytes),
          2, "partial results take more than scratch_bytes");
  ledger_.each([&](RecordId id, const ChunkRecord& record) {
    const std::string name = str("record ", id.value(), " (chunk ", record.index, ")");
    // A lane can be waited for, but what left the pool must have arrived below.
    require(record.resident() || !record.on_host() ||
                timeline_.complete(host_.place(record.host.value())),
            4, name + " has left the pool before its bytes arrived in host memory");
  });
  require(running_.active || running_.entries.empty(), 5,
          "chunks are known to be read by a forward that is over");
  for (const Entry& entry : running_.entries) {
    const ChunkRecord& record = ledger_[entry.record];
    const std::string name = str("record ", entry.record.value(), " (chunk ", record.index, ")");
    require(record.readers > 0 || record.state == ChunkState::kOpen, 5,
            name + " may be read by the running forward, but nothing holds it");
    require(entry.pinned ? record.on_host() : record.resident(), 5,
            name + " is not where the running forward reads it");
  }
}

}  // namespace kvpager
