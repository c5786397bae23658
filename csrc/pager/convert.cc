#include "kvpager/convert.h"

#include <cstring>
#include <utility>
#include <vector>

#include "core/chunk_namer.h"
#include "kvpager/attention.h"
#include "kvpager/error.h"
#include "kvpager/selection.h"
#include "pager/restore_checks.h"

namespace kvpager {
namespace {

void require_same_shape(const Layout& from, const Layout& to) {
  to.validate();
  const auto shape = [](const Layout& l) {
    return str(l.layers, " layers of ", l.kv_heads, " heads, ", l.k_dim, " and ", l.v_dim,
               " numbers, ", l.chunk_tokens, " tokens a chunk");
  };
  if (shape(from) != shape(to)) {
    throw InvalidArgumentError(str("layout: ", shape(to), "; expected the snapshot's own shape, ",
                                   shape(from), ": only dtypes can be converted"));
  }
}

// Contiguous rows of one tensor of a layer, in its dtype for reading.
class Rows {
 public:
  Rows(const Layout& layout, DType stored, int32_t dim)
      : dtype_(read_dtype(stored)),
        dim_(dim),
        heads_(layout.kv_heads),
        bytes_(static_cast<size_t>(int64_t{layout.chunk_tokens} * heads_ * dim *
                                   dtype_bytes(dtype_))) {}
  std::byte* data() { return bytes_.data(); }
  TensorView view(int64_t rows) {
    return {bytes_.data(), dtype_, rows, heads_, dim_, heads_ * dim_, dim_};
  }

 private:
  DType dtype_;
  int64_t dim_;
  int64_t heads_;
  std::vector<std::byte> bytes_;
};

class ConvertedContent final : public SnapshotContent {
 public:
  ConvertedContent(std::shared_ptr<const SnapshotContent> source, const Layout& layout,
                   const ConvertedNames& names)
      : source_(std::move(source)), meta_(source_->meta()) {
    require_same_shape(meta_.layout, layout);
    meta_.layout = layout;
    if (has_summaries()) {
      meta_.scorer = bits2::kName;
      meta_.summary_page_bytes = bits2::summary_bytes(layout.of_layer(0));
    }
    meta_.packs = {};
    meta_.unknown.clear();
    rename(names);
  }

  const SnapshotMeta& meta() const override { return meta_; }

  const std::byte* borrow_chunk(int64_t chunk, std::byte* scratch) const override {
    convert(chunk, scratch);
    return scratch;
  }
  void give_back_chunk(int64_t) const override {}

  void read_summary(int64_t chunk, std::byte* out) const override {
    if (!has_summaries()) return;
    const Layout& layout = meta_.layout;
    std::vector<std::byte> bytes(static_cast<size_t>(layout.chunk_bytes()));
    convert(chunk, bytes.data());
    for (int layer = 0; layer < layout.layers; ++layer) {
      const Layout one = layout.of_layer(layer);
      for (int head = 0; head < layout.kv_heads; ++head, out += meta_.summary_page_bytes) {
        bits2::summarize(one, bytes.data() + layout.page_offset(layer, head), out);
      }
    }
  }

 private:
  bool has_summaries() const { return meta_.summary_page_bytes > 0; }

  void rename(const ConvertedNames& names) {
    const Layout& layout = meta_.layout;
    const ChunkNamer namer(names.namespace_key, names.salt);
    ChunkName name =
        last_name(namer, names.before.tokens, names.before.provenance, layout.chunk_tokens);
    const int64_t sealed = meta_.sealed_chunks();
    for (int64_t i = 0; i < static_cast<int64_t>(meta_.chunks.size()); ++i) {
      SnapshotChunk& chunk = meta_.chunks[static_cast<size_t>(i)];
      chunk.provenance = Provenance::kApproximate;
      chunk.slice_checksum = {};
      chunk.summary_checksum = 0;
      chunk.chain_hash = {};
      if (i >= sealed) continue;
      const TokenId* ids = meta_.tokens.data() + i * layout.chunk_tokens;
      chunk.chain_hash = name =
          namer.next(name, ids, layout.chunk_tokens, Provenance::kApproximate);
    }
  }

  // The source's bytes, which are given back.
  class Borrowed {
   public:
    Borrowed(const SnapshotContent& source, int64_t chunk)
        : source_(source),
          chunk_(chunk),
          scratch_(static_cast<size_t>(source.meta().layout.chunk_bytes())),
          bytes_(source.borrow_chunk(chunk, scratch_.data())) {}
    ~Borrowed() { source_.give_back_chunk(chunk_); }
    Borrowed(const Borrowed&) = delete;
    Borrowed& operator=(const Borrowed&) = delete;
    const std::byte* bytes() const { return bytes_; }

   private:
    const SnapshotContent& source_;
    int64_t chunk_;
    std::vector<std::byte> scratch_;
    const std::byte* bytes_;
  };

  void convert(int64_t chunk, std::byte* out) const {
    const Layout& from = source_->meta().layout;
    const Layout& to = meta_.layout;
    const int32_t valid = meta_.chunks[static_cast<size_t>(chunk)].valid;
    std::memset(out, 0, static_cast<size_t>(to.chunk_bytes()));
    const Borrowed borrowed(*source_, chunk);
    for (int layer = 0; layer < to.layers; ++layer) {
      const Layout one = from.of_layer(layer);
      Rows k(one, one.k_dtype, one.k_dim);
      Rows v(one, one.v_dtype, one.v_dim);
      read_rows(one, borrowed.bytes() + from.slice_offset(layer), 0, valid, k.data(), v.data());
      write(chunk, layer, valid, k.view(valid), v.view(valid), out + to.slice_offset(layer));
    }
  }

  void write(int64_t chunk, int layer, int32_t valid, const TensorView& k, const TensorView& v,
             std::byte* slice) const {
    const Layout one = meta_.layout.of_layer(layer);
    std::vector<WriteRow> rows(static_cast<size_t>(valid));
    for (int32_t i = 0; i < valid; ++i) rows[static_cast<size_t>(i)] = {slice, i};
    const int64_t unfit = find_non_finite(one, k, v, rows.data(), valid);
    if (unfit >= 0) {
      throw InvalidArgumentError(str("layer ", layer, " of token ",
                                     chunk * meta_.layout.chunk_tokens + unfit,
                                     " has a number that does not fit ", dtype_name(one.k_dtype),
                                     " keys and ", dtype_name(one.v_dtype), " values"));
    }
    write_rows(one, k, v, rows.data(), valid);
  }

  std::shared_ptr<const SnapshotContent> source_;
  SnapshotMeta meta_;
};

}  // namespace

std::shared_ptr<SnapshotContent> converted(std::shared_ptr<const SnapshotContent> source,
                                           const Layout& layout, const ConvertedNames& names) {
  return std::make_shared<ConvertedContent>(std::move(source), layout, names);
}

}  // namespace kvpager
