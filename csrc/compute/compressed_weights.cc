#include "kvpager/compressed_weights.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <iterator>
#include <utility>

#include "compute/compute_table.h"
#include "kvpager/linear.h"
#include "kvpager/thread_pool.h"

namespace kvpager {
namespace {

constexpr int64_t kLeastCopied = 7;  // of 8 groups: else marks are no exception, and cost time
constexpr int64_t kOutputsOfItem = 16;
constexpr int64_t kBlockBytes = int64_t{32} << 20;
constexpr uint8_t kNone = 0xFF;

// Bits 31 to 16 of each float32, and whether the others are 0; bfloat16 has no others.
struct Float32 {
  using Element = uint32_t;
  static constexpr DType kDType = DType::kFloat32;
  static uint16_t upper(Element a) { return static_cast<uint16_t>(a >> 16); }
  static uint32_t lost(Element a) { return a & 0xFFFFu; }
};
struct BFloat16 {
  using Element = uint16_t;
  static constexpr DType kDType = DType::kBFloat16;
  static uint16_t upper(Element a) { return a; }
  static uint32_t lost(Element) { return 0; }
};

using Places = std::array<uint8_t, 256>;  // in an output's table, of each high byte

// The high bytes of an output's table: all that there are, or the sixteen that most weights have. The
// place of the others is kNone.
template <class Type>
Places choose_table(const typename Type::Element* w, int64_t count, uint8_t* table) {
  const auto high = [&](int64_t i) { return static_cast<size_t>(Type::upper(w[i]) >> 8); };
  std::array<uint8_t, 256> there{};  // which is sooner known than how many there are of each
  for (int64_t i = 0; i < count; ++i) there[high(i)] = 1;
  std::array<std::pair<uint32_t, uint8_t>, 256> bytes;
  auto end = bytes.begin();
  for (size_t byte = 0; byte < there.size(); ++byte) {
    if (there[byte] != 0) *end++ = {0, static_cast<uint8_t>(byte)};
  }
  const auto kept = std::min(bytes.begin() + kCompressedTable, end);
  if (kept != end) {
    std::array<uint32_t, 256> times{};
    for (int64_t i = 0; i < count; ++i) ++times[high(i)];
    for (auto one = bytes.begin(); one != end; ++one) one->first = times[one->second];
    std::partial_sort(bytes.begin(), kept, end, std::greater<>());
  }
  Places places;
  places.fill(kNone);
  for (auto one = bytes.begin(); one != kept; ++one) {
    const auto place = static_cast<uint8_t>(one - bytes.begin());
    table[place] = one->second;
    places[one->second] = place;
  }
  return places;
}

// Writes one group; false: a weight of it cannot be written.
template <class Type>
bool write_group(const typename Type::Element* w, const Places& places, uint8_t* out) {
  constexpr int kRun = 4;  // elements whose bytes are next to one another in either dtype
  uint32_t lost = 0, all_places = 0;
  for (int i = 0; i < 32; i += kRun) {
    uint32_t both = 0, low = 0, other_low = 0;
    for (int j = 0; j < kRun; ++j) {
      const auto one = w[i + j], other = w[i + j + 32];
      const uint32_t place = places[Type::upper(one) >> 8], next = places[Type::upper(other) >> 8];
      lost |= Type::lost(one) | Type::lost(other);
      all_places |= place | next;
      both |= ((place & 15) | (next & 15) << 4) << 8 * j;
      low |= (Type::upper(one) & 0xFFu) << 8 * j;
      other_low |= (Type::upper(other) & 0xFFu) << 8 * j;
    }
    const int to = compressed_place(Type::kDType, i);
    std::memcpy(out + to, &both, kRun);
    std::memcpy(out + 32 + to, &low, kRun);
    std::memcpy(out + 64 + to, &other_low, kRun);
  }
  return lost == 0 && all_places < kCompressedTable;
}

// One output. REQUIRES: marks that are 0.
template <class Type>
void write_output(const void* from, int64_t groups, uint8_t* out, uint8_t* table,
                  uint64_t* marked) {
  const auto* w = static_cast<const typename Type::Element*>(from);
  const Places places = choose_table<Type>(w, groups * kCompressedGroup, table);
  for (int64_t group = 0; group < groups; ++group) {
    if (!write_group<Type>(w, places, out)) marked[group / 64] |= uint64_t{1} << (group % 64);
    w += kCompressedGroup;
    out += kCompressedBytes;
  }
}

}  // namespace

bool CompressedWeights::add(const void* w, DType dtype, int64_t outputs, int64_t depth,
                            int64_t w_stride, ThreadPool& pool) {
  const int64_t of_row = depth / kCompressedGroup;
  if (linear_kernels().linear_compressed_rows(dtype) == 0 || of_row == 0 || outputs == 0)
    return false;
  if (outputs > 1 && w_stride < depth) return false;
  Matrix made{dtype, outputs, depth, w_stride, nullptr, {}, {}};
  const int64_t words = mark_words(of_row);
  made.groups = reserve(made.all_groups() * kCompressedBytes);
  made.tables.resize(static_cast<size_t>(outputs * kCompressedTable));
  made.marked.resize(static_cast<size_t>(outputs * words));
  const auto write = dtype == DType::kFloat32 ? write_output<Float32> : write_output<BFloat16>;
  pool.run((outputs + kOutputsOfItem - 1) / kOutputsOfItem, [&](int64_t item, int) {
    const int64_t last = std::min(outputs, (item + 1) * kOutputsOfItem);
    for (int64_t output = item * kOutputsOfItem; output < last; ++output) {
      const auto at = static_cast<size_t>(output);
      const auto groups = static_cast<size_t>(of_row), marks = static_cast<size_t>(words);
      write(static_cast<const char*>(w) + output * w_stride * dtype_bytes(dtype), of_row,
            &made.groups[at * groups * kCompressedBytes], &made.tables[at * kCompressedTable],
            &made.marked[at * marks]);
    }
  });
  if (made.copied_groups() < made.all_groups() * kLeastCopied / 8) return false;
  blocks_.back().used += made.all_groups() * kCompressedBytes;
  matrices_.insert_or_assign(static_cast<const char*>(w), std::move(made));
  return true;
}

// Of the last block, which is another one if that has too few left. They are not taken yet.
uint8_t* CompressedWeights::reserve(int64_t bytes) {
  if (blocks_.empty() || blocks_.back().bytes - blocks_.back().used < bytes) {
    const int64_t all = std::max(bytes, kBlockBytes);
    blocks_.push_back({aligned_bytes(kHugePage, static_cast<uint64_t>(all)), all, 0});
  }
  return reinterpret_cast<uint8_t*>(blocks_.back().memory.get()) + blocks_.back().used;
}

int64_t CompressedWeights::Matrix::copied_groups() const {
  int64_t copied = all_groups();
  for (const uint64_t word : marked) copied -= __builtin_popcountll(word);
  return copied;
}

CompressedRows CompressedWeights::find(const LinearParams& params) const {
  const char* const w = static_cast<const char*>(params.w);
  auto next = matrices_.upper_bound(w);
  if (next == matrices_.begin()) return {};
  const auto& [begin, matrix] = *std::prev(next);
  const int64_t row = matrix.stride * dtype_bytes(matrix.dtype);
  const int64_t output = (w - begin) / row;
  if (params.dtype != matrix.dtype || params.depth != matrix.depth ||
      (params.w_stride != matrix.stride && params.outputs > 1) || (w - begin) % row != 0 ||
      output + params.outputs > matrix.outputs) {
    return {};
  }
  return matrix.rows().from(output);
}

int64_t CompressedWeights::bytes() const {
  int64_t bytes = 0;
  for (const auto& [begin, matrix] : matrices_) {
    bytes += matrix.all_groups() * kCompressedBytes +
             static_cast<int64_t>(matrix.tables.size() + matrix.marked.size() * sizeof(uint64_t));
  }
  return bytes;
}

int64_t CompressedWeights::weight_bytes() const {
  int64_t bytes = 0;
  for (const auto& [begin, matrix] : matrices_) {
    bytes += matrix.outputs * matrix.depth * dtype_bytes(matrix.dtype);
  }
  return bytes;
}

}  // namespace kvpager
