#include "kvpager/snapshot.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <tuple>

#include "bindings/bind.h"
#include "bindings/integer_array.h"
#include "bindings/python_files.h"
#include "bindings/raw_rows.h"
#include "bindings/shared.h"
#include "kvpager/attention.h"
#include "kvpager/convert.h"
#include "kvpager/error.h"
#include "snapshot/loose_content.h"

namespace kvpager {

namespace py = pybind11;

namespace {

using Release = py::gil_scoped_release;
template <class T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;
using Callback = std::optional<py::typing::Callable<void(int64_t, int64_t)>>;

constexpr int64_t kSignalBytes = int64_t{64} << 20;

// The Python callback, called with the GIL; without one, Ctrl-C still ends a long call.
// REQUIRES: used within a call that released the GIL, while `callback` lives.
SnapshotProgress progress_of(const Callback& callback) {
  if (callback) {
    return [&callback](int64_t done, int64_t total) {
      const py::gil_scoped_acquire gil;
      (*callback)(done, total);
    };
  }
  return [asked = int64_t{0}](int64_t done, int64_t) mutable {
    if (done - asked < kSignalBytes) return;
    asked = done;
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  };
}

template <class T>
py::array_t<T> array_of(const std::vector<T>& values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

// The elements where they are; the array keeps their owner.
template <class T>
py::array_t<T> view_of(const SharedArray<T>& values, const py::object& owner) {
  py::array_t<T> out(static_cast<py::ssize_t>(values.size()), values.data(), owner);
  out.attr("flags").attr("writeable") = false;
  return out;
}

py::bytes bytes_of(const ChunkName& name) {
  return py::bytes(reinterpret_cast<const char*>(name.words.data()), sizeof name.words);
}

std::string hex_of(const Hash128& hash) {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(hash.high),
                static_cast<unsigned long long>(hash.low));
  return text;
}

Hash128 hash_from_hex(const std::string& text) {
  const auto wrong = [&] {
    return InvalidArgumentError(str("pack id: '", text, "', expected 32 lower-case hex digits"));
  };
  if (text.size() != 32) throw wrong();
  Hash128 hash;
  for (size_t i = 0; i < text.size(); ++i) {
    static const std::string kDigits = "0123456789abcdef";
    const size_t digit = kDigits.find(text[i]);
    if (digit == std::string::npos) throw wrong();
    uint64_t& half = i < 16 ? hash.high : hash.low;
    half = half << 4 | digit;
  }
  return hash;
}

py::typing::List<py::bytes> chain_hashes(const SnapshotContent& content) {
  const SnapshotMeta& meta = content.meta();
  py::typing::List<py::bytes> out;
  for (int64_t c = 0; c < meta.sealed_chunks(); ++c) {
    out.append(bytes_of(meta.chunks[static_cast<size_t>(c)].chain_hash));
  }
  return out;
}

py::bytes hashes(const SnapshotContent& content) {
  const SnapshotMeta& meta = content.meta();
  std::string out;
  {
    const py::gil_scoped_release unlocked;
    out.reserve(static_cast<size_t>(meta.sealed_chunks()) * (sizeof(ChunkName) + sizeof(Hash128)));
    for (int64_t c = 0; c < meta.sealed_chunks(); ++c) {
      const SnapshotChunk& chunk = meta.chunks[static_cast<size_t>(c)];
      const Hash128 content_id = chunk.content_id();
      out.append(reinterpret_cast<const char*>(&chunk.chain_hash), sizeof(ChunkName));
      out.append(reinterpret_cast<const char*>(&content_id), sizeof(Hash128));
    }
  }
  return {out};
}

py::array_t<uint64_t> slice_checksums(const SnapshotContent& content) {
  const SnapshotMeta& meta = content.meta();
  const auto layers = static_cast<size_t>(meta.layout.layers);
  py::array_t<uint64_t> out({meta.chunks.size(), layers});
  for (size_t c = 0; c < meta.chunks.size(); ++c) {
    std::memcpy(out.mutable_data(static_cast<py::ssize_t>(c)), meta.chunks[c].slice_checksum.data(),
                layers * sizeof(uint64_t));
  }
  return out;
}

py::array_t<uint64_t> summary_checksums(const std::vector<SnapshotChunk>& chunks, int64_t sealed) {
  py::array_t<uint64_t> out(static_cast<py::ssize_t>(sealed));
  for (int64_t c = 0; c < sealed; ++c) {
    out.mutable_at(c) = chunks[static_cast<size_t>(c)].summary_checksum;
  }
  return out;
}

py::array_t<uint32_t> places(const SnapshotReader& reader) {
  const auto& from = reader.meta().packs.places;
  py::array_t<uint32_t> out({static_cast<py::ssize_t>(from.size()), py::ssize_t{2}});
  for (size_t c = 0; c < from.size(); ++c) {
    out.mutable_at(c, 0) = from[c].pack;
    out.mutable_at(c, 1) = from[c].chunk;
  }
  return out;
}

bool has_chunk(const SnapshotReader& reader, int64_t chunk) {
  return chunk >= 0 && chunk < static_cast<int64_t>(reader.meta().chunks.size());
}

// An array for what the reader is about to read; none for a chunk it will refuse.
py::array_t<uint8_t> room(const SnapshotReader& reader, int64_t chunk, int64_t bytes) {
  return py::array_t<uint8_t>(has_chunk(reader, chunk) ? bytes : 0);
}

py::array_t<uint8_t> read_chunk(const SnapshotReader& reader, int64_t chunk) {
  py::array_t<uint8_t> out = room(reader, chunk, reader.meta().layout.chunk_bytes());
  auto* to = reinterpret_cast<std::byte*>(out.mutable_data());
  const Release release;
  reader.read_chunk(chunk, to);
  return out;
}

py::array_t<uint8_t> read_slice(const SnapshotReader& reader, int64_t chunk, int layer) {
  py::array_t<uint8_t> out = room(reader, chunk, reader.meta().layout.slice_bytes(layer));
  auto* to = reinterpret_cast<std::byte*>(out.mutable_data());
  const Release release;
  reader.read_slice(chunk, layer, to);
  return out;
}

py::typing::Tuple<py::array, py::array> read_rows_of(const SnapshotReader& reader, int64_t chunk,
                                                     int layer) {
  const Layout& layout = reader.meta().layout;
  const Layout of_layer = layout.of_layer(layer);
  const bool there = has_chunk(reader, chunk);
  std::vector<std::byte> slice(there ? static_cast<size_t>(layout.slice_bytes(layer)) : 0);
  RawRows rows(of_layer, there ? layout.chunk_tokens : 0);
  {
    const Release release;
    reader.read_slice(chunk, layer, slice.data());
    read_rows(of_layer, slice.data(), 0, layout.chunk_tokens, rows.k(), rows.v());
  }
  return rows.tuple();
}

using Damage = py::typing::Tuple<py::int_, py::int_, py::str>;

py::typing::List<Damage> verify(const SnapshotReader& reader, int threads,
                                const Callback& progress) {
  std::vector<SnapshotDamage> found;
  {
    const SnapshotProgress report = progress_of(progress);
    const Release release;
    found = reader.verify(threads, report);
  }
  py::typing::List<Damage> out;
  for (const SnapshotDamage& damage : found) {
    out.append(py::make_tuple(damage.chunk, damage.layer, damage.message));
  }
  return out;
}

int64_t write_content(SnapshotWriter& writer, const SnapshotContent& content,
                      const IntegerArray<int64_t>& which, const std::string& fingerprint,
                      const std::string& session, const Callback& progress) {
  const std::vector<int64_t> chunks = which.to_vector("which");
  const SnapshotProgress report = progress_of(progress);
  const Release release;
  return writer.write_content(content, chunks, fingerprint, session, report);
}

int64_t write_manifest(SnapshotWriter& writer, const SnapshotContent& content,
                       const std::vector<std::pair<std::string, uint32_t>>& packs,
                       const IntegerArray<uint32_t>& given_places,
                       const IntegerArray<uint64_t>& summary_checksum,
                       const std::string& fingerprint, const std::string& session) {
  const auto chunk_places = given_places.checked("places");
  SnapshotPacks where;
  for (const auto& [id, chunks] : packs) where.packs.push_back({hash_from_hex(id), chunks});
  if (chunk_places.ndim() != 2 || chunk_places.shape(1) != 2) {
    throw InvalidArgumentError("places: expected an array [sealed chunks, 2] of (pack, chunk)");
  }
  for (py::ssize_t c = 0; c < chunk_places.shape(0); ++c) {
    where.places.push_back({chunk_places.at(c, 0), chunk_places.at(c, 1)});
  }
  const std::vector<uint64_t> checksums = summary_checksum.to_vector("summary_checksums");
  const Release release;
  return writer.write_manifest(content, where, checksums, fingerprint, session);
}

// The writer of Python: gone once published or discarded, so that files and locks are let go at a
// known moment. One call at a time: a thread, or a progress callback, that comes while another call
// has given the GIL away is refused and changes nothing.
class Writer {
 public:
  Writer(const std::string& path, const Layout& layout, int64_t reserve_bytes, uint32_t mode,
         std::shared_ptr<FileCipher> cipher)
      : writer_(std::make_unique<SnapshotWriter>(path, layout, reserve_bytes, mode,
                                                 std::move(cipher))) {}

  // fn(SnapshotWriter&).
  template <class Fn>
  auto use(const Fn& fn) const {
    const Turn turn(*this);
    if (writer_ == nullptr) {
      throw InvalidArgumentError("snapshot: this writer was discarded; start a new one");
    }
    return fn(*writer_);
  }
  void discard() {
    const Turn turn(*this);
    writer_.reset();
  }
  // Removing a large file takes the disk a while.
  ~Writer() {
    const Release release;
    writer_.reset();
  }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

 private:
  class Turn {
   public:
    explicit Turn(const Writer& writer) : busy_(writer.busy_) {
      if (busy_.test_and_set()) {
        throw InvalidArgumentError(
            "snapshot: this writer is in use by another call; wait until that has returned, or "
            "raise in its progress callback to end it");
      }
    }
    ~Turn() { busy_.clear(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    std::atomic_flag& busy_;
  };

  std::unique_ptr<SnapshotWriter> writer_;
  mutable std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
};

// A chunk's bytes where an array has them; the array lives until nobody needs them, on any thread.
std::shared_ptr<const std::byte> kept(const py::array_t<uint8_t>& array) {
  const auto drop = [](py::object* owner) {
    const py::gil_scoped_acquire gil;
    delete owner;
  };
  const std::shared_ptr<py::object> owner(new py::object(array), drop);
  return {owner, reinterpret_cast<const std::byte*>(array.data())};
}

std::shared_ptr<SnapshotContent> loose_content(const Layout& layout,
                                               const IntegerArray<TokenId>& tokens,
                                               const std::vector<py::bytes>& chain_hashes,
                                               const std::vector<bool>& exact,
                                               const std::vector<Array<uint8_t>>& payload) {
  if (chain_hashes.size() != payload.size() || exact.size() != payload.size()) {
    throw InvalidArgumentError(str("chain_hashes, exact, payload: ", chain_hashes.size(), ", ",
                                   exact.size(), " and ", payload.size(),
                                   " chunks, expected as many of each"));
  }
  std::vector<snapshot::LooseContent::Chunk> chunks;
  for (size_t c = 0; c < payload.size(); ++c) {
    const std::string hash = chain_hashes[c];
    if (hash.size() != sizeof(ChunkName)) {
      throw InvalidArgumentError(
          str("chain_hashes[", c, "]: ", hash.size(), " bytes, expected ", sizeof(ChunkName)));
    }
    if (payload[c].size() != layout.chunk_bytes()) {
      throw InvalidArgumentError(
          str("payload[", c, "]: ", payload[c].size(), " bytes, expected ", layout.chunk_bytes()));
    }
    snapshot::LooseContent::Chunk chunk;
    std::memcpy(chunk.chain_hash.words.data(), hash.data(), sizeof(ChunkName));
    chunk.provenance = exact[c] ? Provenance::kExact : Provenance::kApproximate;
    chunk.payload = kept(payload[c]);
    chunks.push_back(std::move(chunk));
  }
  std::vector<TokenId> ids = tokens.to_vector("tokens");
  const Layout copied = layout;  // of options, it may be set while the GIL is free
  const Release release;
  return dropped_without_gil<SnapshotContent>(
      std::make_shared<snapshot::LooseContent>(copied, std::move(ids), std::move(chunks)));
}

using Counts = std::array<int64_t, 3>;

std::shared_ptr<SnapshotContent> converted_content(
    const std::shared_ptr<SnapshotContent>& source, const Layout& layout,
    const std::string& namespace_key, const std::string& salt,
    const std::optional<std::tuple<IntegerArray<TokenId>, Counts, int64_t>>& before) {
  ConvertedNames names{namespace_key, salt, {}};
  if (before) {
    names.before = {std::get<0>(*before).to_vector("before"), std::get<1>(*before),
                    std::get<2>(*before)};
  }
  const Layout copied = layout;  // of options, it may be set while the GIL is free
  const Release release;
  return dropped_without_gil(converted(source, copied, names));
}

void bind_content(py::module_& m) {
  py::class_<SnapshotContent, std::shared_ptr<SnapshotContent>>(
      m, "SnapshotContent",
      "Something whose chunks can be written to a snapshot: a frozen sequence or an opened file.")
      .def_property_readonly("layout", [](const SnapshotContent& c) { return c.meta().layout; })
      .def_property_readonly("scorer", [](const SnapshotContent& c) { return c.meta().scorer; })
      .def_property_readonly("summary_page_bytes",
                             [](const SnapshotContent& c) { return c.meta().summary_page_bytes; })
      .def_property_readonly(
          "tokens",
          [](const py::object& self) {
            const auto& c = self.cast<const SnapshotContent&>();
            return view_of(c.meta().tokens, self);
          },
          "Read-only, not copied.")
      .def_property_readonly("chunks",
                             [](const SnapshotContent& c) { return c.meta().chunks.size(); })
      .def_property_readonly("sealed_chunks",
                             [](const SnapshotContent& c) { return c.meta().sealed_chunks(); })
      .def_property_readonly("tail_tokens",
                             [](const SnapshotContent& c) {
                               const SnapshotMeta& meta = c.meta();
                               return static_cast<int64_t>(meta.tokens.size()) -
                                      meta.sealed_chunks() * meta.layout.chunk_tokens;
                             })
      .def_property_readonly("chain_hashes", &chain_hashes,
                             "Names of the sealed chunks, 32 bytes each.")
      .def_property_readonly(
          "hashes", &hashes,
          "Of the sealed chunks, one behind the other: the name, 32 bytes, and the content id, 16, "
          "which is equal for equal payload, name and provenance.")
      .def_property_readonly("provenance",
                             [](const SnapshotContent& c) {
                               py::typing::List<py::str> out;
                               for (const SnapshotChunk& chunk : c.meta().chunks) {
                                 out.append(provenance_name(chunk.provenance));
                               }
                               return out;
                             })
      .def_property_readonly("slice_checksums", &slice_checksums, "[chunks, layers]")
      .def_property_readonly(
          "qk_score", [](const SnapshotContent& c) { return array_of(c.meta().hints.qk_score); },
          "[chunks], or empty")
      .def_property_readonly(
          "last_use", [](const SnapshotContent& c) { return array_of(c.meta().hints.last_use); },
          "[chunks], or empty");
}

std::shared_ptr<SnapshotReader> gather(
    const std::vector<std::pair<std::shared_ptr<SnapshotReader>, int64_t>>& chunks,
    const std::string& name) {
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (chunks[i].first == nullptr) {
      throw InvalidArgumentError(
          str("chunks[", i, "]: None, expected a pair of an opened snapshot and a chunk of it"));
    }
  }
  return dropped_without_gil(SnapshotReader::gather(chunks, name));
}

void bind_reader(py::module_& m) {
  py::class_<SnapshotReader, SnapshotContent, std::shared_ptr<SnapshotReader>>(
      m, "SnapshotReader", "An opened snapshot: metadata verified, payload read on demand.")
      .def_static(
          "open",
          [](const std::string& path, const std::string& packs_folder, const PythonOpener& opener) {
            const RangesOpener open = opener_of(opener);
            const Release release;
            return dropped_without_gil(SnapshotReader::open(path, packs_folder, open));
          },
          py::arg("path"), py::arg("packs_folder") = "", py::arg("opener") = py::none(),
          "opener: called with the path of the snapshot and of each pack; returns their bytes, as "
          "kvpager.stores.ByteRanges does.")
      .def_static("gather", &gather, py::arg("chunks"), py::arg("name"), py::call_guard<Release>(),
                  "A snapshot put together from sealed chunks of opened ones: (reader, chunk).")
      .def_property_readonly("path", [](const SnapshotReader& r) { return r.path(); })
      .def_property_readonly("fingerprint",
                             [](const SnapshotReader& r) { return r.meta().fingerprint; })
      .def_property_readonly("session", [](const SnapshotReader& r) { return r.meta().session; })
      .def_property_readonly("logical_digest",
                             [](const SnapshotReader& r) { return hex_of(r.logical_digest()); })
      .def_property_readonly("file_bytes", &SnapshotReader::file_bytes,
                             "Of the file itself, without packs; 0 of a gathered snapshot.")
      .def_property_readonly("packs",
                             [](const SnapshotReader& r) {
                               py::typing::List<py::typing::Tuple<py::str, py::int_>> out;
                               for (const SnapshotPacks::Pack& pack : r.meta().packs.packs) {
                                 out.append(py::make_tuple(hex_of(pack.id), pack.chunks));
                               }
                               return out;
                             })
      .def_property_readonly("places", &places,
                             "[sealed chunks, 2]: pack, chunk; empty without packs")
      .def_property_readonly("summary_checksums",
                             [](const SnapshotReader& r) {
                               return summary_checksums(r.meta().chunks, r.meta().sealed_chunks());
                             })
      .def("read_chunk", &read_chunk, py::arg("chunk"))
      .def("read_slice", &read_slice, py::arg("chunk"), py::arg("layer"))
      .def("read_rows", &read_rows_of, py::arg("chunk"), py::arg("layer"),
           "k [chunk_tokens, kv_heads, k_dim] and v of a slice, verified, as words of their size; "
           "of codes the numbers that they stand for.")
      .def("verify", &verify, py::arg("threads"), py::arg("progress") = py::none(),
           "Reads everything; (chunk, layer, message) of all damage. Layer -1: the summary.")
      .def_property_readonly("payload_bytes_read", &SnapshotReader::payload_bytes_read);
}

void bind_writer(py::module_& m) {
  py::class_<Writer>(m, "SnapshotWriter",
                     "Writes a snapshot under a temporary name; publish gives it its own.")
      .def(
          py::init([](const std::string& path, const Layout& layout, int64_t reserve_bytes,
                      uint32_t mode, const py::object& cipher) {
            const Layout copied = layout;  // of options, it may be set while the GIL is free
            std::shared_ptr<FileCipher> by = cipher_of(cipher);
            // No call guard: pybind11 notes a new object in a table that the GIL guards.
            const Release release;
            return std::make_unique<Writer>(path, copied, reserve_bytes, mode, std::move(by));
          }),
          py::arg("path"), py::arg("layout"), py::arg("reserve_bytes") = 0, py::arg("mode") = 0600,
          py::arg("cipher") = py::none(),
          "mode: permissions; a file that has the name keeps those that it lacks. cipher: encrypts "
          "all that is written, as kvpager.stores.encryption does.")
      .def(
          "write_content",
          [](Writer& w, const SnapshotContent& content, const IntegerArray<int64_t>& which,
             const std::string& fingerprint, const std::string& session, const Callback& progress) {
            return w.use([&](SnapshotWriter& writer) {
              return write_content(writer, content, which, fingerprint, session, progress);
            });
          },
          py::arg("content"), py::arg("which"), py::arg("fingerprint"), py::arg("session"),
          py::arg("progress") = py::none())
      .def(
          "write_manifest",
          [](Writer& w, const SnapshotContent& content,
             const std::vector<std::pair<std::string, uint32_t>>& packs,
             const IntegerArray<uint32_t>& chunk_places, const IntegerArray<uint64_t>& checksums,
             const std::string& fingerprint, const std::string& session) {
            return w.use([&](SnapshotWriter& writer) {
              return write_manifest(writer, content, packs, chunk_places, checksums, fingerprint,
                                    session);
            });
          },
          py::arg("content"), py::arg("packs"), py::arg("places"), py::arg("summary_checksums"),
          py::arg("fingerprint"), py::arg("session"))
      .def(
          "publish", [](Writer& w) { w.use([](SnapshotWriter& writer) { writer.publish(); }); },
          py::call_guard<Release>())
      .def("discard", &Writer::discard, py::call_guard<Release>(),
           "Lets go of the file and its lock; removes it unless it was published. Like every call, "
           "InvalidArgumentError while another one runs.")
      .def_property_readonly(
          "logical_digest",
          [](const Writer& w) {
            return w.use([](SnapshotWriter& writer) { return hex_of(writer.logical_digest()); });
          },
          "Of what was written, as the reader of the file will say.")
      .def_property_readonly(
          "temporary",
          [](const Writer& w) {
            return w.use([](SnapshotWriter& writer) { return writer.temporary(); });
          },
          "Name of the temporary file, in the folder of the path; empty once there is none.")
      .def_property_readonly("summary_checksums", [](const Writer& w) {
        return w.use([](SnapshotWriter& writer) {
          const std::vector<SnapshotChunk>& written = writer.written();
          int64_t sealed = static_cast<int64_t>(written.size());
          if (sealed > 0 && written.back().chain_hash.empty()) --sealed;  // the tail
          return summary_checksums(written, sealed);
        });
      });
}

py::bytes read_piece(const SnapshotImage& image, int64_t piece) {
  const int64_t bytes = image.piece_bytes(piece);
  PyObject* out = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes));
  if (out == nullptr) throw py::error_already_set();
  auto owned = py::reinterpret_steal<py::bytes>(out);
  const Release release;
  image.read_piece(piece, reinterpret_cast<std::byte*>(PyBytes_AS_STRING(out)));
  return owned;
}

void bind_image(py::module_& m) {
  py::class_<SnapshotImage>(m, "SnapshotImage",
                            "The file that a content would be, in pieces made when they are read.")
      .def(py::init([](const std::shared_ptr<SnapshotContent>& content,
                       const std::string& fingerprint, const std::string& session) {
             const Release release;
             return std::make_unique<SnapshotImage>(content, fingerprint, session);
           }),
           py::arg("content").none(false), py::arg("fingerprint"), py::arg("session"))
      .def_property_readonly("file_bytes", &SnapshotImage::file_bytes)
      .def_property_readonly(
          "logical_digest", [](const SnapshotImage& i) { return hex_of(i.logical_digest()); },
          "As the reader of the file will say.")
      .def_property_readonly("pieces", &SnapshotImage::pieces)
      .def("read_piece", &read_piece, py::arg("piece"),
           "One behind the other, the pieces are the file. None is larger than a chunk, a summary, "
           "the front or the metadata.");
}

}  // namespace

void bind_snapshot(py::module_& m) {
  bind_content(m);
  m.def("loose_content", &loose_content, py::arg("layout"), py::arg("tokens"),
        py::arg("chain_hashes"), py::arg("exact"), py::arg("payload"),
        "Sealed chunks to be written, from arrays [chunk_bytes] that must not change: 32 bytes of "
        "hash and chunk_tokens ids each. exact: of provenance exact, or approximate.");
  m.def("converted_content", &converted_content, py::arg("source").none(false), py::arg("layout"),
        py::arg("namespace_key"), py::arg("salt"), py::arg("before") = std::nullopt,
        "A content with its K/V in the dtypes of `layout`, to be written to a self-contained file; "
        "all chunks are approximate. namespace_key: the fingerprint that is saved with it. before: "
        "released_text() of what was saved.");
  bind_reader(m);
  bind_writer(m);
  bind_image(m);
  m.def(
      "snapshot_file_bytes",
      [](const SnapshotContent& content, int64_t sealed, bool tail, const std::string& fingerprint,
         const std::string& session, int64_t packs) {
        return snapshot_file_bytes(content.meta(), sealed, tail, fingerprint, session, packs);
      },
      py::arg("content"), py::arg("sealed"), py::arg("tail"), py::arg("fingerprint"),
      py::arg("session"), py::arg("packs"),
      "No file of so many chunks, or manifest with so many packs, is larger.");
}

}  // namespace kvpager
