#include "pager/running_forward.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "kvpager/error.h"
#include "pager/load_lease.h"
#include "pager/scoped_timer.h"

namespace kvpager {
namespace {

// InvalidArgumentError naming the tensor unless it is [rows, heads, dim] of a supported dtype.
void require_shape(const char* name, const TensorView& tensor, int64_t rows, int64_t heads,
                   int64_t dim) {
  if (tensor.rows != rows || tensor.heads != heads || tensor.dim != dim) {
    throw InvalidArgumentError(str(name, ": shape [", tensor.rows, ", ", tensor.heads, ", ",
                                   tensor.dim, "], expected [", rows, ", ", heads, ", ", dim, "]"));
  }
  if (!is_float(tensor.dtype)) {
    throw InvalidArgumentError(
        str(name, ": dtype ", dtype_name(tensor.dtype), " is not supported"));
  }
}

// InvalidArgumentError unless each element has memory of its own: rows and heads are written by any
// thread that comes to them.
void require_no_overlap(const char* name, const TensorView& tensor) {
  const auto reach = [](int64_t count, int64_t stride) { return (count - 1) * std::abs(stride); };
  const int64_t row = std::abs(tensor.row_stride);
  const int64_t head = std::abs(tensor.head_stride);
  const bool heads_within_rows =
      (tensor.heads == 1 || head >= tensor.dim) &&
      (tensor.rows == 1 || row >= reach(tensor.heads, head) + tensor.dim);
  const bool rows_within_heads =
      (tensor.rows == 1 || row >= tensor.dim) &&
      (tensor.heads == 1 || head >= reach(tensor.rows, row) + tensor.dim);
  if (!heads_within_rows && !rows_within_heads) {
    throw InvalidArgumentError(str(name, ": strides ", tensor.row_stride, " and ",
                                   tensor.head_stride, " of rows and heads let them overlap, ",
                                   "expected a tensor with memory for each of its elements"));
  }
}

}  // namespace

RunningForward::RunningForward(const PagerParts& parts, Residency& residency, Sequences& sequences,
                               std::atomic<uint64_t>& number)
    : PagerParts(parts),
      residency_(residency),
      sequences_(sequences),
      number_(number),
      held_(ledger_) {}

void RunningForward::require_running(uint64_t number) const {
  if (number == 0 || (forward_ && forward_->number == number)) return;
  throw InvalidArgumentError(kForwardEnded);
}

void RunningForward::give(const std::vector<TensorView>& k, const std::vector<TensorView>& v,
                          void* stream) {
  if (!forward_) throw InvalidArgumentError("give: no forward is running; call begin first");
  if (forward_->given_count == 0) {
    throw InvalidArgumentError("give: this forward has no given positions; name them in its spans");
  }
  if (forward_->given_written) {
    throw InvalidArgumentError("give: this forward has been given its keys and values already");
  }
  const auto layers = static_cast<size_t>(layout_.layers);
  if (k.size() != layers || v.size() != layers) {
    throw InvalidArgumentError(str("give: keys of ", k.size(), " layers and values of ", v.size(),
                                   ", expected ", layers, " of each"));
  }
  for (size_t layer = 0; layer < layers; ++layer) {
    require_shape(str("k[", layer, "]").c_str(), k[layer], forward_->given_count, layout_.kv_heads,
                  layout_.k_dim);
    require_shape(str("v[", layer, "]").c_str(), v[layer], forward_->given_count, layout_.kv_heads,
                  layout_.v_dim);
  }
  if (backend_.capturing(stream)) {
    throw InvalidArgumentError("give: stream is being captured; give before a capture");
  }
  try {
    backend_.give(k, v, stream);
  } catch (...) {
    abort();
    throw;
  }
  forward_->given_written = true;
}

// Whether rows of the running forward attend to more than the configured selection.
bool RunningForward::denser_than_selection() const { return forward_->dense && !config_.dense(); }

void RunningForward::require_rows() const {
  if (!forward_) throw InvalidArgumentError("attend: no forward is running; call begin first");
  if (forward_->row_count() == 0) {
    throw InvalidArgumentError(
        "attend: this forward has given positions and no rows; call give, then commit");
  }
}

void RunningForward::require_layer(int layer, const TensorView& k, const TensorView& v) const {
  require_rows();
  if (layer < 0 || layer >= layout_.layers) {
    throw InvalidArgumentError(str("layer: ", layer, " is not in [0, ", layout_.layers, ")"));
  }
  const int64_t rows = forward_->row_count();
  require_shape("k", k, rows, layout_.kv_heads, layout_.k_dim);
  require_shape("v", v, rows, layout_.kv_heads, layout_.v_dim);
}

void RunningForward::require_attention(int layer, const TensorView& q, const TensorView& out,
                                       const AttendOptions& attend_options) const {
  const int64_t rows = forward_->row_count();
  if (q.heads <= 0 || q.heads % layout_.kv_heads != 0) {
    throw InvalidArgumentError(
        str("q: ", q.heads, " heads, expected a multiple of kv_heads=", layout_.kv_heads));
  }
  if (options_.q_heads > 0 && q.heads != options_.q_heads) {
    throw InvalidArgumentError(str("q: ", q.heads, " heads, expected ", options_.q_heads));
  }
  require_shape("q", q, rows, q.heads, layout_.k_dim);
  require_shape("out", out, rows, q.heads, layout_.v_dim);
  require_no_overlap("out", out);
  if (!(attend_options.scaling > 0) || !std::isfinite(attend_options.scaling)) {
    throw InvalidArgumentError(
        str("scaling: ", attend_options.scaling, ", expected a positive number"));
  }
  if (attend_options.window < 0 || !(attend_options.softcap >= 0) ||
      !std::isfinite(attend_options.softcap)) {
    throw InvalidArgumentError(str("window: ", attend_options.window, ", softcap: ",
                                   attend_options.softcap, "; expected 0 (none) or positive"));
  }
  if (attend_options.sinks != nullptr && !attend_options.sinks_on_device) {
    for (int head = 0; head < q.heads; ++head) {
      const float sink = attend_options.sinks[head];
      if (!(sink < std::numeric_limits<float>::infinity())) {
        throw InvalidArgumentError(
            str("sinks[", head, "]: ", sink, ", expected a number, or -inf for none"));
      }
    }
  }
  if (options_.window > 0 &&
      (attend_options.window == 0 || attend_options.window > options_.window)) {
    throw InvalidArgumentError(str("window: ", attend_options.window, " of layer ", layer,
                                   ", expected 1 to ", options_.window,
                                   ": this pager lets go of what is behind its own window"));
  }
}

void RunningForward::write_rows_of(int layer, const TensorView* q, const TensorView& k,
                                   const TensorView& v, void* stream) {
  if (backend_.write(layer, q, k, v, stream)) {
    forward_->layer_written[static_cast<size_t>(layer)] = 1;
  }
}

void RunningForward::write(int layer, const TensorView& k, const TensorView& v, void* stream) {
  require_layer(layer, k, v);
  try {
    write_rows_of(layer, nullptr, k, v, stream);
  } catch (...) {
    abort();
    throw;
  }
}

void RunningForward::attend(int layer, const TensorView& q, const TensorView& k,
                            const TensorView& v, const TensorView& out,
                            const AttendOptions& attend_options) {
  require_rows();
  if (forward_->given_count > 0 && !forward_->given_written) {
    throw InvalidArgumentError(str("attend: the keys and values of ", forward_->given_count,
                                   " given positions, which rows may see, are missing; hand them "
                                   "in with give first"));
  }
  require_attention(layer, q, out, attend_options);
  require_layer(layer, k, v);
  if (denser_than_selection() && backend_.capturing(attend_options.stream)) {
    throw InvalidArgumentError(
        "attend: this forward is dense, and a graph runs the configured selection; attend outside "
        "of a capture");
  }
  try {
    write_rows_of(layer, &q, k, v, attend_options.stream);
    if (!backend_.select(layer, q, attend_options)) load_missing();
    backend_.attend(layer, q, out, attend_options);
  } catch (...) {
    abort();
    throw;
  }
}

std::vector<std::vector<int32_t>> RunningForward::selected() const {
  require_rows();
  if (forward_->dense) return {};
  return backend_.chosen();
}

// Loads what the layer reads and is not in memory: chunks of snapshots into free host slots; else, if the
// pool can hold all that are left beside what is being read, into blocks. What the layer reads stays where
// it is meanwhile.
void RunningForward::load_missing() {
  const ScopedTimer timer(&counters_.seconds_load);
  Readers readers(ledger_);
  std::vector<RecordId> missing;
  for (size_t p = 0; p < forward_->parts.size(); ++p) {
    const ForwardPart& part = forward_->parts[p];
    const std::vector<uint8_t>& reads = backend_.reads(p);
    for (int64_t c = part.sequence->released; c < part.visible; ++c) {
      if (!reads[static_cast<size_t>(c)]) continue;
      const RecordId id = part.sequence->use(c).record;
      if (readers.add(id) && !ledger_[id].in_memory()) missing.push_back(id);
    }
  }
  LoadLease(residency_, missing, HostRoom::kIdle, NoRoom::kSkip, "attend").load(Reading::kTogether);
}

void RunningForward::mark_replayed(uint64_t generation, void* stream) {
  if (!forward_) {
    throw InvalidArgumentError("mark_replayed: no forward is running; call begin first");
  }
  if (generation != backend_.generation()) {
    throw InvalidArgumentError(
        str("mark_replayed: the graph was captured at generation ", generation,
            " of the pager's memory, which is now at ", backend_.generation(),
            "; what it has computed is void: abort this forward and capture the graph again"));
  }
  if (denser_than_selection() && backend_.computes()) {
    throw InvalidArgumentError(
        "mark_replayed: this forward is dense, and a graph runs the configured selection; attend "
        "outside of a graph");
  }
  backend_.replayed(stream);
  if (!backend_.computes()) forward_->given_written = true;
  std::fill(forward_->layer_written.begin(), forward_->layer_written.end(), 1);
}

void RunningForward::abort() {
  if (!forward_) return;
  backend_.end();
  held_.release();
  end_parts(forward_.get());
  end();
  ++counters_.aborted_forwards;
}

// The parts end, as far as they had begun; blocks and homes that they did not use go back.
void RunningForward::end_parts(Forward* ended) {
  for (ForwardPart& part : ended->parts) {
    give_back_unused(part);
    part.sequence->part = -1;
  }
  residency_.invalidate_eviction();  // nothing is read any more
}

void RunningForward::give_back_unused(ForwardPart& part) {
  Sequence& sequence = *part.sequence;
  const int64_t kept = sequence.length % layout_.chunk_tokens == 0 ? 0 : 1;
  while (static_cast<int64_t>(sequence.frontier.size()) > kept) {
    sequences_.drop_use_pins(sequence.frontier.back());
    residency_.drop(sequence.frontier.back().record);
    sequence.frontier.pop_back();
  }
  const int64_t unused = std::min(sequence.reserved_by_forward, sequence.reserved);
  sequences_.set_reserved(sequence, sequence.reserved - unused);
  sequence.reserved_by_forward = 0;
}

// Sequences that their owners dropped meanwhile go with the forward.
void RunningForward::end() {
  for (const ForwardPart& part : forward_->parts) {
    if (part.sequence->dropped) sequences_.erase(*part.sequence);
  }
  forward_.reset();
  number_ = 0;
}

}  // namespace kvpager
