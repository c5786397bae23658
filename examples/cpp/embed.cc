// A pager in a C++ program: attends, saves, restores into another pager, goes on in both, compares bits.
#include <kvpager/pager.h>

#include <cmath>
#include <cstdio>
#include <cstring>

using namespace kvpager;

// Tokens [start, start + count): keys, values and queries that a model would compute. What attention gives.
std::vector<float> forward(Pager& pager, SequenceId text, int64_t start, int64_t count) {
  const Layout& layout = pager.options().layout;
  pager.begin({RowSpan{text, start, count, RowKind::kCommit}}, std::vector<TokenId>(count, 7));
  std::vector<float> kv(count * layout.kv_heads * layout.k_dim), out(kv.size());
  for (size_t i = 0; i < kv.size(); ++i) kv[i] = std::sin(float(start * 1000 + int64_t(i)));
  const int64_t dim = layout.k_dim, row = layout.kv_heads * dim;
  const auto view = [&](std::vector<float>& x) {
    return TensorView{x.data(), DType::kFloat32, count, layout.kv_heads, dim, row, dim};
  };
  for (int layer = 0; layer < layout.layers; ++layer)
    pager.attend(layer, view(kv), view(kv), view(kv), view(out), AttendOptions());
  pager.commit_all();
  return out;
}

int main(int, char** arguments) {
  PagerOptions options;
  options.layout.layers = options.layout.kv_heads = 2;
  options.layout.k_dim = options.layout.v_dim = 64;
  options.rows = 200;       // most rows of a forward
  options.pool_blocks = 6;  // chunks of 64 tokens in the pool; the rest is in host memory
  options.host_bytes = 8 * options.layout.chunk_bytes();
  options.namespace_key = "{\"model\": \"example\"}";
  Pager pager(options), other(options);
  const SequenceId text = pager.create_sequence("salt");
  forward(pager, text, 0, 200);

  const std::string path = std::string(arguments[0]) + ".kvp";
  SnapshotWriter writer(path, options.layout);
  writer.write_content(*pager.freeze(text), {0, 1, 2, 3}, options.namespace_key, "{}", {});
  writer.publish();
  const SequenceId restored =
      other.restore(SnapshotReader::open(path), "salt", Provenance::kExact, options.namespace_key);

  const std::vector<float> here = forward(pager, text, 200, 16);
  const std::vector<float> there = forward(other, restored, 200, 16);
  const bool same = std::memcmp(here.data(), there.data(), here.size() * sizeof(float)) == 0;
  std::printf("%zu numbers after 200 restored tokens: %s\n", here.size(),
              same ? "the same bits" : "OTHER BITS");
  return same ? 0 : 1;
}
