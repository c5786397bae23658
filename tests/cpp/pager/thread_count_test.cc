// The number of threads of a pager is no part of any bit it makes: outputs, selections, stored rows,
// summaries and the digest of what is saved. Nor is what its caller did to the floating-point unit.
#include "../kernels/float_mode.h"
#include "small_pager.h"

namespace kvpager::pager_test {
namespace {

// All that a pager made of a text.
struct Made {
  std::vector<float> outputs;
  std::vector<std::vector<std::vector<int32_t>>> selected;
  std::vector<std::byte> summaries;
  Hash128 digest;
};

Made make(int threads, Selection::Kind kind, DType dtype, const std::string& path,
          unsigned mode = testing::kPlainMode) {
  const testing::FloatMode scope(mode);
  PagerOptions options = small_options(6, 64);
  options.threads = threads;
  options.layout.k_dtype = options.layout.v_dtype = dtype;
  options.selection.kind = kind;
  options.selection.chunks = 3;
  options.selection.sinks = 16;
  Pager pager(options);
  Known sequence = create(pager);
  Made made;
  const std::vector<TokenId> tokens = some_tokens(300, 3);
  size_t first = 0;
  for (const size_t count :
       {1, 16, 7, 16, 16, 3, 16, 16, 16, 16, 16, 11, 16, 16, 16, 16, 16, 16, 16, 16, 16, 5}) {
    const size_t last = std::min(tokens.size(), first + count);
    const std::vector<float> outputs = append(
        pager, &sequence, cut(tokens, static_cast<int64_t>(first), static_cast<int64_t>(last)));
    made.outputs.insert(made.outputs.end(), outputs.begin(), outputs.end());
    first = last;
  }
  REQUIRE(first > 280);
  const std::vector<float> read = probe(pager, sequence, 16);
  made.outputs.insert(made.outputs.end(), read.begin(), read.end());
  Rows q(1, kQueryHeads, 16, 0);
  for (int layer = 0; layer < 2; ++layer) {
    fill_row(histories(sequence.tokens).back(), layer, kQuery, 64, q.row(0));
    made.selected.push_back(
        pager.select(sequence.id, layer, q.view(), static_cast<int64_t>(first) - 1, 0));
  }
  const auto frozen = pager.freeze(sequence.id);
  const size_t summary = static_cast<size_t>(frozen->meta().summary_bytes_per_chunk());
  for (int64_t chunk = 0; chunk < frozen->meta().sealed_chunks(); ++chunk) {
    made.summaries.resize(made.summaries.size() + summary);
    frozen->read_summary(chunk, made.summaries.data() + made.summaries.size() - summary);
  }
  save(*frozen, path, "{\"model\":\"test\"}");
  made.digest = SnapshotReader::open(path)->logical_digest();
  return made;
}

PAGER_TEST("outputs, selections, summaries and saved bytes are the same on 1, 2, 3 and 7 threads") {
  const Folder folder;
  for (const Selection::Kind kind : {Selection::Kind::kDense, Selection::Kind::kTopK}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      CAPTURE(static_cast<int>(kind));
      CAPTURE(std::string(dtype_name(dtype)));
      const Made one = make(1, kind, dtype, folder.file("one.kvsnap"));
      CHECK(one.summaries.size() > 10000);
      if (kind == Selection::Kind::kTopK) CHECK(one.selected[0] != one.selected[1]);
      for (const int threads : {2, 3, 7}) {
        CAPTURE(threads);
        const Made many = make(threads, kind, dtype, folder.file("many.kvsnap"));
        CHECK(same_bits(many.outputs, one.outputs));
        CHECK(many.selected == one.selected);
        CHECK(many.summaries == one.summaries);
        CHECK(many.digest == one.digest);
      }
    }
  }
}

PAGER_TEST("a caller that rounds, flushes or traps as it likes gets the same bits" *
           doctest::test_suite("long")) {
  const Folder folder;
  constexpr unsigned kTraps = 0x1900;  // invalid operations, divisions by zero and overflows
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    CAPTURE(std::string(dtype_name(dtype)));
    const Made plain = make(1, Selection::Kind::kTopK, dtype, folder.file("plain.kvsnap"));
    for (const unsigned mode :
         {0x9FC0u, 0x1F80u | 0x2000u, 0x9FC0u | 0x4000u, 0x1F80u | 0x6000u, kTraps}) {
      CAPTURE(mode);
      for (const int threads : {1, 2}) {
        const Made other =
            make(threads, Selection::Kind::kTopK, dtype, folder.file("other.kvsnap"), mode);
        CHECK(same_bits(other.outputs, plain.outputs));
        CHECK(other.selected == plain.selected);
        CHECK(other.summaries == plain.summaries);
        CHECK(other.digest == plain.digest);
      }
    }
  }
}

}  // namespace
}  // namespace kvpager::pager_test
