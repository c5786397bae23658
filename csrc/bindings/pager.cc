#include "kvpager/pager.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <array>
#include <deque>
#include <optional>
#include <tuple>

#include "base/read_once.h"
#include "bindings/bind.h"
#include "bindings/handles.h"
#include "bindings/integer_array.h"
#include "bindings/names.h"
#include "bindings/raw_rows.h"
#include "bindings/shared.h"
#include "bindings/tensor.h"
#include "kvpager/error.h"

namespace kvpager {

namespace py = pybind11;

namespace {

using Release = py::gil_scoped_release;
using NewForward = std::unique_ptr<ForwardHandle>;

Provenance provenance_from_name(const std::string& name) {
  for (const Provenance p : {Provenance::kExact, Provenance::kDecode, Provenance::kApproximate}) {
    if (name == provenance_name(p)) return p;
  }
  throw InvalidArgumentError(
      str("provenance: '", name, "', expected 'exact', 'decode' or 'approximate'"));
}

// The caller's stream: a handle as torch.cuda.Stream.cuda_stream has it, 0 for the default one.
void* stream_of(uintptr_t handle) { return reinterpret_cast<void*>(handle); }

// Owned from the moment it runs.
template <class Begin>
NewForward new_forward(const PagerPointer& pager, py::object owner, const Begin& begin) {
  auto forward = std::make_unique<ForwardHandle>(pager, std::move(owner));
  const Release release;
  forward->began(begin());
  return forward;
}

// Of a Sequence or None (no sequence). InvalidArgumentError that names `name`.
template <class Name>
SequenceId sequence_id(const Pager& pager, py::handle sequence, const Name& name) {
  if (sequence.is_none()) return SequenceId(-1);
  if (!py::isinstance<SequenceHandle>(sequence)) {
    throw InvalidArgumentError(str(name(), ": ",
                                   py::cast<std::string>(py::str(py::type::of(sequence))),
                                   ", expected a Sequence of this pager, or None"));
  }
  return py::cast<const SequenceHandle&>(sequence).id_in(pager);
}

// Numbers of sequences, or the sequences.
std::vector<SequenceId> row_sequences(const Pager& pager, const py::object& sequences) {
  std::vector<SequenceId> ids;
  if (py::isinstance<py::array>(sequences)) {
    const auto numbers = IntegerArray<int64_t>::from(sequences);
    if (!numbers) {
      throw InvalidArgumentError(str("sequences: an array of ",
                                     py::cast<std::string>(py::str(sequences.attr("dtype"))),
                                     ", expected one of integers, or sequences"));
    }
    for (const int64_t number : numbers->to_vector("sequences")) ids.emplace_back(number);
    return ids;
  }
  for (const py::handle item : sequences) {
    ids.push_back(sequence_id(pager, item, [&] { return str("sequences[", ids.size(), "]"); }));
  }
  return ids;
}

NewForward begin(const PagerPointer& pager, py::object owner, const py::object& sequences,
                 const IntegerArray<int64_t>& given_positions,
                 const IntegerArray<TokenId>& given_tokens,
                 const IntegerArray<uint8_t>& given_kinds, uintptr_t stream) {
  const std::vector<SequenceId> ids = row_sequences(*pager, sequences);
  const auto positions = given_positions.checked("positions");
  const auto tokens = given_tokens.checked("tokens");
  const auto kinds = given_kinds.checked("kinds");
  const auto rows = static_cast<py::ssize_t>(ids.size());
  if (positions.size() != rows || tokens.size() != rows || kinds.size() != rows) {
    throw InvalidArgumentError(str("rows: ", rows, " sequences, ", positions.size(), " positions, ",
                                   tokens.size(), " tokens and ", kinds.size(),
                                   " kinds; expected the same number of each"));
  }
  std::vector<RowDescriptor> descriptors(static_cast<size_t>(rows));
  const std::vector<uint8_t> kind = read_once(kinds.data(), descriptors.size());
  for (size_t i = 0; i < descriptors.size(); ++i) {
    if (kind[i] > static_cast<uint8_t>(RowKind::kPadding)) {
      throw InvalidArgumentError(str("kinds[", i, "]: ", static_cast<int>(kind[i]),
                                     ", expected 0 (commit), 1 (read) or 2 (padding)"));
    }
    descriptors[i] = {ids[i], positions.data()[i], tokens.data()[i], static_cast<RowKind>(kind[i])};
  }
  return new_forward(pager, std::move(owner),
                     [&] { return pager->begin(descriptors, stream_of(stream)); });
}

using Span = py::typing::Tuple<py::object, py::int_, py::int_, py::int_>;

NewForward begin_spans(const PagerPointer& pager, py::object owner,
                       const py::typing::List<Span>& spans, const IntegerArray<TokenId>& tokens,
                       uintptr_t stream, const IntegerArray<TokenId>& given, bool dense) {
  std::vector<RowSpan> rows;
  // Owned: what is asked of an element may change the list.
  const py::tuple owned(spans);
  rows.reserve(owned.size());
  for (const py::handle item : owned) {
    if (!PyTuple_Check(item.ptr()) || PyTuple_GET_SIZE(item.ptr()) != 4) {
      throw InvalidArgumentError(
          str("spans[", rows.size(), "]: expected a tuple of (sequence, position, count, kind)"));
    }
    const py::handle sequence = PyTuple_GET_ITEM(item.ptr(), 0);
    const SequenceId id =
        sequence_id(*pager, sequence, [&] { return str("spans[", rows.size(), "]"); });
    int64_t numbers[4];
    for (py::ssize_t i = 1; i < 4; ++i) {
      numbers[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(item.ptr(), i));
      if (numbers[i] != -1 || PyErr_Occurred() == nullptr) continue;
      if (!PyErr_ExceptionMatches(PyExc_TypeError) &&
          !PyErr_ExceptionMatches(PyExc_OverflowError)) {
        throw py::error_already_set();
      }
      PyErr_Clear();
      throw InvalidArgumentError(str("spans[", rows.size(),
                                     "]: ", py::cast<std::string>(py::repr(item)),
                                     ", expected integers of 64 bits as position, count and kind"));
    }
    if (numbers[3] < 0 || numbers[3] > static_cast<int64_t>(RowKind::kGiven)) {
      throw InvalidArgumentError(str("spans[", rows.size(), "]: kind ", numbers[3],
                                     ", expected 0 (commit), 1 (read), 2 (padding) or 3 (given)"));
    }
    rows.push_back({id, numbers[1], numbers[2], static_cast<RowKind>(numbers[3])});
  }
  std::vector<TokenId> ids = tokens.to_vector("tokens");
  ForwardOptions options{given.to_vector("given"), dense, stream_of(stream)};
  return new_forward(pager, std::move(owner),
                     [&] { return pager->begin(rows, std::move(ids), std::move(options)); });
}

// One tensor per layer of either.
void give(Pager& pager, const py::typing::List<py::object>& k,
          const py::typing::List<py::object>& v, uintptr_t stream, uint64_t of) {
  const DevicePlace place = pager.device_place();
  // Owned until the call has returned: another thread may empty the lists meanwhile.
  const py::tuple k_owned(k);
  const py::tuple v_owned(v);
  std::deque<BorrowedTensor> borrowed;
  const auto views = [&](const char* name, const py::tuple& layers) {
    std::vector<TensorView> all;
    for (const py::handle layer : layers) {
      const std::string which = str(name, "[", all.size(), "]");
      all.push_back(borrowed.emplace_back(which.c_str(), layer, place).view());
    }
    return all;
  };
  const std::vector<TensorView> keys = views("k", k_owned);
  const std::vector<TensorView> values = views("v", v_owned);
  const Release release;
  pager.give(keys, values, stream_of(stream), of);
}

void attend(ForwardHandle& forward, int layer, py::handle q, py::handle k, py::handle v,
            py::handle out, float scaling, float softcap, int64_t window, const py::object& sinks,
            uintptr_t stream) {
  const DevicePlace place = forward.pager()->device_place();
  const BorrowedTensor q_view("q", q, place);
  const BorrowedTensor k_view("k", k, place);
  const BorrowedTensor v_view("v", v, place);
  const BorrowedTensor out_view("out", out, place, true);
  AttendOptions options;
  options.scaling = scaling;
  options.softcap = softcap;
  options.window = window;
  options.stream = stream_of(stream);
  std::optional<BorrowedTensor> sink_values;
  if (!sinks.is_none()) {
    const TensorView& view = sink_values.emplace("sinks", sinks, place).view();
    if (view.rows != 1 || view.heads != q_view.view().heads || view.dim != 1 ||
        view.head_stride != 1 || view.dtype != DType::kFloat32) {
      throw InvalidArgumentError(str("sinks: ", view.heads, " values of ", dtype_name(view.dtype),
                                     ", expected one float32 per query head (", q_view.view().heads,
                                     ")"));
    }
    options.sinks = static_cast<const float*>(view.data);
    options.sinks_on_device = place.name != "cpu";
  }
  const Release release;
  forward.attend(layer, q_view.view(), k_view.view(), v_view.view(), out_view.view(), options);
}

std::optional<std::pair<py::array, py::array>> selected(ForwardHandle& forward) {
  const PagerPointer pager = forward.pager();
  std::vector<std::vector<int32_t>> chosen;
  {
    const Release release;
    chosen = pager->selected(forward.number());
  }
  if (chosen.empty()) return std::nullopt;
  py::array_t<int64_t> offsets(static_cast<py::ssize_t>(chosen.size()) + 1);
  int64_t* offset = offsets.mutable_data();
  *offset = 0;
  for (const auto& of_row : chosen) {
    offset[1] = offset[0] + static_cast<int64_t>(of_row.size());
    ++offset;
  }
  py::array_t<int32_t> chunks(static_cast<py::ssize_t>(*offset));
  int32_t* next = chunks.mutable_data();
  for (const auto& of_row : chosen) next = std::copy(of_row.begin(), of_row.end(), next);
  return std::pair<py::array, py::array>(offsets, chunks);
}

void write(Pager& pager, int layer, py::handle k, py::handle v, uintptr_t stream, uint64_t of) {
  const DevicePlace place = pager.device_place();
  const BorrowedTensor k_view("k", k, place);
  const BorrowedTensor v_view("v", v, place);
  const Release release;
  pager.write(layer, k_view.view(), v_view.view(), stream_of(stream), of);
}

py::typing::Tuple<py::array, py::array> read_kv(Pager& pager, int64_t sequence, int layer,
                                                int64_t start, int64_t stop) {
  const Layout layout = pager.options().layout.of_layer(layer);
  int64_t length = 0;
  {
    const Release release;
    length = pager.length(SequenceId(sequence));
  }
  // Refused here, before anything is allocated: the pager looks again once it has its lock, and by
  // then the sequence may have grown into the range.
  if (start < 0 || stop < start || stop > length) {
    throw InvalidArgumentError(str("range [", start, ", ", stop,
                                   "): expected 0 <= start <= stop <= ", length,
                                   ", the positions this sequence holds"));
  }
  RawRows rows(layout, stop - start);
  {
    const Release release;
    pager.read_kv(SequenceId(sequence), layer, start, stop, rows.k(), rows.v());
  }
  return rows.tuple();
}

using Counts = std::array<int64_t, 3>;
using Released = py::typing::Tuple<py::array_t<TokenId>, Counts, py::int_>;

std::optional<Released> released_text(const SnapshotContent& content) {
  const ReleasedText& text = content.meta().before;
  if (text.tokens.empty()) return std::nullopt;
  const py::array_t<TokenId> ids(static_cast<py::ssize_t>(text.tokens.size()), text.tokens.data());
  return py::make_tuple(ids, text.provenance, text.window);
}

std::unique_ptr<SequenceHandle> restore(
    const PagerPointer& pager, py::object owner, std::shared_ptr<SnapshotReader> reader,
    const std::string& salt, const std::string& provenance, const std::string& file_namespace,
    int64_t upto, const std::optional<std::tuple<IntegerArray<TokenId>, Counts, int64_t>>& before) {
  const Provenance worth = provenance_from_name(provenance);
  ReleasedText text;
  if (before) {
    text = {std::get<0>(*before).to_vector("before"), std::get<1>(*before), std::get<2>(*before)};
  }
  auto sequence = std::make_unique<SequenceHandle>(pager, std::move(owner), SequenceId(), salt);
  const Release release;
  sequence->holds(pager->restore(std::move(reader), salt, worth, file_namespace, upto, text));
  return sequence;
}

// Arrays rather than objects: cheap enough to call after every forward.
py::typing::Dict<py::str, py::array> residency(const Pager& pager, int64_t sequence) {
  std::vector<ChunkInfo> infos;
  {
    const Release release;
    infos = pager.ledger(SequenceId(sequence));
  }
  const auto n = static_cast<py::ssize_t>(infos.size());
  py::array_t<uint8_t> tiers(n);
  py::array_t<uint64_t> selected(n);
  py::array_t<uint64_t> recalled(n);
  py::array_t<double> score(n);
  for (py::ssize_t i = 0; i < n; ++i) {
    const ChunkInfo& info = infos[static_cast<size_t>(i)];
    tiers.mutable_data()[i] = info.tiers;
    selected.mutable_data()[i] = info.selected;
    recalled.mutable_data()[i] = info.recalled;
    score.mutable_data()[i] = info.qk_score;
  }
  py::typing::Dict<py::str, py::array> result;
  result["tiers"] = tiers;
  result["selected"] = selected;
  result["recalled"] = recalled;
  result["qk_score"] = score;
  return result;
}

py::typing::Dict<py::str, py::object> stats(const Pager& pager) {
  PagerStats s;
  {
    const Release release;
    s = pager.stats();
  }
  py::typing::Dict<py::str, py::object> d;
#define KVPAGER_STAT(name) d[#name] = s.name
  KVPAGER_STAT(pool_blocks);
  KVPAGER_STAT(free_blocks);
  KVPAGER_STAT(open_blocks);
  KVPAGER_STAT(pinned_blocks);
  KVPAGER_STAT(pool_bytes);
  KVPAGER_STAT(resident_bytes);
  KVPAGER_STAT(staging_bytes);
  KVPAGER_STAT(host_bytes);
  KVPAGER_STAT(host_bytes_used);
  KVPAGER_STAT(disk_bytes);
  KVPAGER_STAT(disk_bytes_used);
  KVPAGER_STAT(summary_bytes);
  KVPAGER_STAT(summary_bytes_used);
  KVPAGER_STAT(chunk_bytes);
  KVPAGER_STAT(summary_bytes_per_chunk);
  KVPAGER_STAT(sequences);
  KVPAGER_STAT(records);
  KVPAGER_STAT(cached_records);
  KVPAGER_STAT(reserved_chunks);
  KVPAGER_STAT(home_chunks);
  KVPAGER_STAT(home_chunks_used);
  KVPAGER_STAT(forwards);
  KVPAGER_STAT(aborted_forwards);
  KVPAGER_STAT(rows_committed);
  KVPAGER_STAT(chunks_sealed);
  KVPAGER_STAT(chunks_shared);
  KVPAGER_STAT(chunks_evicted);
  KVPAGER_STAT(chunks_released);
  KVPAGER_STAT(eviction_orders_made);
  KVPAGER_STAT(chunks_forgotten);
  KVPAGER_STAT(chunks_recalled);
  KVPAGER_STAT(chunks_healed);
  KVPAGER_STAT(summaries_rebuilt);
  KVPAGER_STAT(tails_paged_out);
  KVPAGER_STAT(chunks_spilled);
  KVPAGER_STAT(slices_streamed);
  KVPAGER_STAT(prefix_tokens_reused);
  KVPAGER_STAT(bytes_paged_in);
  KVPAGER_STAT(bytes_paged_out);
  KVPAGER_STAT(bytes_written_through);
  KVPAGER_STAT(snapshot_bytes_read);
  KVPAGER_STAT(seconds_write);
  KVPAGER_STAT(seconds_scan);
  KVPAGER_STAT(seconds_load);
  KVPAGER_STAT(seconds_attend);
  KVPAGER_STAT(seconds_seal);
  KVPAGER_STAT(seconds_recall);
  KVPAGER_STAT(device_bytes);
  KVPAGER_STAT(pinned_bytes);
  KVPAGER_STAT(scratch_bytes);
  KVPAGER_STAT(table_bytes);
  KVPAGER_STAT(workspace_bytes);
  KVPAGER_STAT(bytes_copied_up);
  KVPAGER_STAT(bytes_copied_down);
  KVPAGER_STAT(bytes_staged);
  KVPAGER_STAT(slices_staged);
  KVPAGER_STAT(host_waits);
  KVPAGER_STAT(seconds_wait);
#undef KVPAGER_STAT
  return d;
}

void bind_handles(py::module_& m) {
  py::class_<SequenceHandle>(m, "OwnedSequence",
                             "Owns a sequence of a pager; kvpager.Sequence adds what it can do.")
      .def(py::init<const PagerPointer&, py::object, std::string>(), py::arg("core").none(false),
           py::arg("owner"), py::arg("salt"))
      .def(py::init<const PagerPointer&, py::object, const SequenceHandle&>(),
           py::arg("core").none(false), py::arg("owner"), py::arg("fork_of"))
      .def(py::init(&restore), py::arg("core").none(false), py::arg("owner"),
           py::arg("reader").none(false), py::arg("salt"), py::arg("provenance"),
           py::arg("file_namespace"), py::arg("upto") = -1, py::arg("before") = std::nullopt,
           "before: released_text() of what was saved.")
      .def_property_readonly("core", &SequenceHandle::pager, "InvalidArgumentError once closed.")
      .def_property_readonly("pager", &SequenceHandle::owner)
      .def_property_readonly("uid", &SequenceHandle::uid, "Of no other sequence of the process.")
      .def_property_readonly("salt", &SequenceHandle::salt)
      .def_property_readonly("closed", &SequenceHandle::closed)
      .def_property_readonly(
          "length",  // native as a whole: asked for several times per token
          [](const SequenceHandle& sequence) {
            const PagerPointer pager = sequence.pager();
            const SequenceId id(sequence.uid());
            const Release release;
            return pager->length(id);
          },
          "Committed positions.")
      .def("close", &SequenceHandle::close, py::arg("forget") = false,
           "Ends the sequence. Its exact chunks stay cached for prefix reuse while there is "
           "room.\n\n"
           "forget: they do not, nor do those that were computed after them, unless another\n"
           "sequence uses them; their memory below the pool goes back to the system.");
  py::class_<PinHandle>(
      m, "OwnedPin",
      "Keeps a range of positions resident until released; changes no result. A context manager.")
      .def(py::init<const SequenceHandle&, int64_t, int64_t>(), py::arg("sequence"),
           py::arg("start"), py::arg("stop"))
      .def("release", &PinHandle::release, "Lets the chunks go again. Releasing twice is allowed.")
      .def("__enter__", [](py::object pin) { return pin; })
      .def("__exit__", exit_by(&PinHandle::release));
  py::class_<ForwardHandle>(
      m, "OwnedForward",
      "Owns the running forward of a pager; kvpager.Forward adds what it can do.")
      .def(py::init(&begin), py::arg("core").none(false), py::arg("owner"), py::kw_only(),
           py::arg("sequences"), py::arg("positions"), py::arg("tokens"), py::arg("kinds"),
           py::arg("stream") = 0,
           "sequences: of each row, or None; or an array of their uids and -1.")
      .def(py::init(&begin_spans), py::arg("core").none(false), py::arg("owner"), py::arg("spans"),
           py::arg("tokens"), py::arg("stream") = 0, py::arg("given") = IntegerArray<TokenId>(),
           py::arg("dense") = false,
           "A span is (sequence, position, count, kind); given: ids of the positions of kind 3.")
      .def_property_readonly("core", &ForwardHandle::running_pager,
                             "InvalidArgumentError once it ended.")
      .def_property_readonly("pager", &ForwardHandle::owner)
      .def_property_readonly("attend_seconds", &ForwardHandle::attend_seconds,
                             "In attention so far.")
      .def("attend_rows", &attend, py::arg("layer"), py::arg("q"), py::arg("k"), py::arg("v"),
           py::arg("out"), py::arg("scaling"), py::arg("softcap") = 0.0f, py::arg("window") = 0,
           py::arg("sinks") = py::none(), py::arg("stream") = 0,
           "Tensors of the pager's device; sinks: float32 [1, q_heads, 1].")
      .def(
          "selected", &selected,
          "The chunks that each (row, kv head) attended to in the last attend, ascending: offsets\n"
          "int64 [rows * kv_heads + 1] into chunks int32. None: each attends to all of them.\n"
          "\n"
          "Raises InvalidArgumentError on a device.")
      .def(
          "give_rows",
          [](ForwardHandle& forward, const py::typing::List<py::object>& k,
             const py::typing::List<py::object>& v,
             uintptr_t stream) { give(*forward.pager(), k, v, stream, forward.number()); },
          py::arg("k"), py::arg("v"), py::arg("stream") = 0,
          "Of each layer: [given, kv_heads, head_dim] of the pager's device.")
      .def(
          "write_rows",
          [](ForwardHandle& forward, int layer, py::handle k, py::handle v, uintptr_t stream) {
            write(*forward.pager(), layer, k, v, stream, forward.number());
          },
          py::arg("layer"), py::arg("k"), py::arg("v"), py::arg("stream") = 0)
      .def(
          "mark_replayed",
          [](ForwardHandle& forward, uint64_t generation, uintptr_t stream) {
            const PagerPointer pager = forward.pager();
            const Release release;
            pager->mark_replayed(generation, stream_of(stream), forward.number());
          },
          py::arg("generation"), py::arg("stream") = 0)
      .def(
          "commit_rows",
          [](ForwardHandle& forward, const py::object& sequences,
             const std::vector<int64_t>& accepted, const std::string& provenance) {
            forward.commit(sequences, accepted, provenance_from_name(provenance));
          },
          py::arg("sequences"), py::arg("accepted"), py::arg("provenance"))
      .def("abort", &ForwardHandle::abort, "Ends the forward as if it had not begun.")
      .def("__enter__", [](py::object forward) { return forward; })
      .def("__exit__", exit_by(&ForwardHandle::abort));
}

py::typing::List<py::bytes> bytes_of_each(const std::vector<ChunkName>& names) {
  py::typing::List<py::bytes> out;
  for (const ChunkName& name : names) {
    out.append(py::bytes(reinterpret_cast<const char*>(name.words.data()), sizeof name.words));
  }
  return out;
}

}  // namespace

void bind_pager(py::module_& m) {
  py::class_<ChunkInfo>(m, "ChunkInfo",
                        "What the ledger says of one chunk of one sequence; a copy.")
      .def_readonly("chunk", &ChunkInfo::chunk,
                    "Logical index, from 0; its positions are [start, stop).")
      .def_readonly("start", &ChunkInfo::start, "Its first position.")
      .def_readonly("stop", &ChunkInfo::stop, "The position after its last one.")
      .def_readonly("sealed", &ChunkInfo::sealed,
                    "Whether all its positions are written, so that it never changes again.")
      .def_property_readonly(
          "resident", [](const ChunkInfo& c) { return (c.tiers & kTierResident) != 0; },
          "Whether it is in the pool.")
      .def_property_readonly(
          "on_host", [](const ChunkInfo& c) { return (c.tiers & kTierHost) != 0; },
          "Whether host memory has it.")
      .def_property_readonly(
          "on_disk", [](const ChunkInfo& c) { return (c.tiers & kTierDisk) != 0; },
          "Whether the disk tier has it.")
      .def_property_readonly(
          "in_snapshot", [](const ChunkInfo& c) { return (c.tiers & kTierSnapshot) != 0; },
          "Whether an open snapshot has it.")
      .def_readonly("released", &ChunkInfo::released,
                    "Whether it is behind a window, and has no bytes any more.")
      .def_readonly(
          "damaged", &ChunkInfo::damaged,
          "Whether its bytes on disk, or in the snapshot, are not those that were put there.")
      .def_readwrite("checkpoint", &ChunkInfo::checkpoint,
                     "Whether recurrent states are kept for its end.")
      .def_property_readonly(
          "block",
          [](const ChunkInfo& c) -> std::optional<int32_t> {
            if (c.block.value() < 0) return std::nullopt;
            return c.block.value();
          },
          "Its block of the pool; None while it is not resident.")
      .def_property_readonly(
          "k_dtype", [](const ChunkInfo& c) { return dtype_name(c.k_dtype); }, "Dtype of its keys.")
      .def_property_readonly(
          "v_dtype", [](const ChunkInfo& c) { return dtype_name(c.v_dtype); },
          "Dtype of its values.")
      .def_property_readonly(
          "provenance", [](const ChunkInfo& c) { return provenance_name(c.provenance); },
          "\"exact\", \"decode\" or \"approximate\".")
      .def_property_readonly(
          "chain_hash",
          [](const ChunkInfo& c) {
            std::string text;
            const auto& words = c.chain_hash.words;
            const auto* bytes = reinterpret_cast<const unsigned char*>(words.data());
            for (size_t i = 0; i < sizeof words; ++i) {
              for (const int digit : {bytes[i] >> 4, bytes[i] & 15}) {
                text += "0123456789abcdef"[digit];
              }
            }
            return text;
          },
          "Its name in hex, by which stores find it; zeros while it is unsealed.")
      .def_readonly("references", &ChunkInfo::references, "Sequences that use this record.")
      .def_readonly("pins", &ChunkInfo::pins, "Pins of this sequence that hold it.")
      .def_readonly("qk_score", &ChunkInfo::qk_score,
                    "Moving average of its share of attention mass, 0 to 1; with dense attention "
                    "that of one layer.")
      .def_readonly("last_use", &ChunkInfo::last_use, "Number of the last forward that read it.")
      .def_readonly("selected", &ChunkInfo::selected, "Forwards of this sequence that read it.")
      .def_readonly("recalled", &ChunkInfo::recalled, "Times it was loaded back into the pool.")
      .def("__repr__", [](const ChunkInfo& c) {
        return str("ChunkInfo(chunk=", c.chunk, ", positions=[", c.start, ", ", c.stop, "), ",
                   c.released ? "released"
                   : c.sealed ? "sealed"
                              : "open",
                   (c.tiers & kTierResident) ? ", resident" : "",
                   (c.tiers & kTierHost) ? ", host" : "", (c.tiers & kTierDisk) ? ", disk" : "",
                   (c.tiers & kTierSnapshot) ? ", snapshot" : "",
                   c.checkpoint ? ", checkpoint" : "", ", ", provenance_name(c.provenance), ")");
      });

  py::class_<Pager, PagerPointer>(m, "Pager", "The native pager; kvpager.Pager wraps it.")
      .def(py::init([](const PagerOptions& options) {
             const PagerOptions copied = options;  // Python may set them while the GIL is free
             PagerPointer made;
             {  // no call guard: pybind11 notes a new object in a table that the GIL guards
               const Release release;
               made = std::make_shared<Pager>(copied);
             }
             return dropped_without_gil(std::move(made));
           }),
           py::arg("options"))
      .def(
          "trim", [](Pager& p, int64_t s, int64_t position) { p.trim(SequenceId(s), position); },
          py::arg("sequence"), py::arg("position"), py::call_guard<Release>())
      .def(
          "tokens",
          [](const Pager& p, int64_t s) {
            std::vector<TokenId> tokens;
            {
              const Release release;
              tokens = p.tokens(SequenceId(s));
            }
            return py::array_t<TokenId>(static_cast<py::ssize_t>(tokens.size()), tokens.data());
          },
          py::arg("sequence"))
      .def(
          "released", [](const Pager& p, int64_t s) { return p.released(SequenceId(s)); },
          py::arg("sequence"), py::call_guard<Release>())
      .def(
          "earliest_trim", [](const Pager& p, int64_t s) { return p.earliest_trim(SequenceId(s)); },
          py::arg("sequence"), py::call_guard<Release>())
      .def(
          "reserve", [](Pager& p, int64_t s, int64_t total) { p.reserve(SequenceId(s), total); },
          py::arg("sequence"), py::arg("total_tokens"), py::call_guard<Release>())
      .def(
          "adopt_prefix",
          [](Pager& p, int64_t s, const IntegerArray<TokenId>& tokens) {
            const std::vector<TokenId> ids = tokens.to_vector("tokens");
            const Release release;
            return p.adopt_prefix(SequenceId(s), ids);
          },
          py::arg("sequence"), py::arg("tokens"))
      .def(
          "give",
          [](Pager& p, const py::typing::List<py::object>& k, const py::typing::List<py::object>& v,
             uintptr_t stream) { give(p, k, v, stream, 0); },
          py::arg("k"), py::arg("v"), py::arg("stream") = 0,
          "OwnedForward.give_rows of whichever forward runs; likewise `write` and `mark_replayed`.")
      .def(
          "write",
          [](Pager& p, int layer, py::handle k, py::handle v, uintptr_t stream) {
            write(p, layer, k, v, stream, 0);
          },
          py::arg("layer"), py::arg("k"), py::arg("v"), py::arg("stream") = 0)
      .def(
          "mark_replayed",
          [](Pager& p, uint64_t generation, uintptr_t stream) {
            p.mark_replayed(generation, stream_of(stream));
          },
          py::arg("generation"), py::arg("stream") = 0, py::call_guard<Release>())
      .def("generation", &Pager::generation, py::call_guard<Release>())
      .def_property_readonly(
          "device", [](const Pager& p) { return p.device_place().name; },
          "\"cpu\", or the opened device with its number, such as \"cuda:0\".")
      .def(
          "attention",
          [](const Pager& p, const std::string& q_dtype) {
            const DType dtype = dtype_from_name("q_dtype", q_dtype);
            return std::make_pair(std::string(p.attention_name(dtype)), p.attention_version(dtype));
          },
          py::arg("q_dtype"), py::call_guard<Release>(),
          "What attend runs for queries of a dtype, \"reference\" or \"tensor\", and its version.")
      .def("forward_running", &Pager::forward_running, py::call_guard<Release>())
      .def(
          "select",
          [](Pager& p, int64_t s, int layer, py::handle q, int64_t position, int64_t window) {
            const BorrowedTensor view("q", q, DevicePlace{});  // on the host, also for a device
            const Release release;
            return p.select(SequenceId(s), layer, view.view(), position, window);
          },
          py::arg("sequence"), py::arg("layer"), py::arg("q"), py::arg("position"),
          py::arg("window") = 0)
      .def("read_kv", &read_kv, py::arg("sequence"), py::arg("layer"), py::arg("start"),
           py::arg("stop"))
      .def("evict_all", &Pager::evict_all, py::call_guard<Release>())
      .def(
          "freeze",
          [](Pager& p, int64_t s, int64_t upto) {
            return dropped_without_gil(p.freeze(SequenceId(s), upto));
          },
          py::arg("sequence"), py::arg("upto") = -1, py::call_guard<Release>())
      .def(
          "chain_hashes",
          [](const Pager& p, const IntegerArray<TokenId>& tokens, const std::string& salt) {
            return bytes_of_each(p.chain_hashes(tokens.to_vector("tokens"), salt));
          },
          py::arg("tokens"), py::arg("salt"), "Names of the full chunks, 32 bytes each.")
      .def(
          "ledger", [](const Pager& p, int64_t s) { return p.ledger(SequenceId(s)); },
          py::arg("sequence"), py::call_guard<Release>())
      .def("residency", &residency, py::arg("sequence"))
      .def("stats", &stats)
      .def("check_invariants", &Pager::check_invariants, py::call_guard<Release>());
  bind_handles(m);
  m.def("released_text", &released_text, py::arg("content"),
        "Of a frozen sequence, what came before its first chunk: token ids, chunks by provenance "
        "(exact, decode, approximate), window; or None.");
}

}  // namespace kvpager
