// Mutations of fuzz inputs that know what a section is.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "../cpp/snapshot/parts.h"
#include "kvpager/layout.h"
#include "kvpager/snapshot.h"

namespace kvpager::snapshot_test {

// What the first byte of an input says of the rest.
enum Mode : uint8_t {
  kResealed = 1,  // its checksums are recomputed, so that damage reaches the checks behind them
  kAsPack = 2,    // it is the pack of a manifest that is sound; else it is the file that is opened
};

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull + 1) {}
  // In [0, limit).
  uint64_t below(uint64_t limit) {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return (state_ >> 33) % limit;
  }

 private:
  uint64_t state_;
};

inline uint64_t extreme(Random* random) {
  static constexpr uint64_t kExtremes[] = {0,
                                           1,
                                           2,
                                           7,
                                           8,
                                           9,
                                           63,
                                           64,
                                           65,
                                           255,
                                           256,
                                           4095,
                                           4096,
                                           65535,
                                           65536,
                                           1u << 31,
                                           UINT32_MAX - 1,
                                           UINT32_MAX,
                                           uint64_t{1} << 32,
                                           uint64_t{1} << 40,
                                           uint64_t{1} << 62,
                                           uint64_t{1} << 63,
                                           UINT64_MAX - 63,
                                           UINT64_MAX - 1,
                                           UINT64_MAX};
  return kExtremes[random->below(sizeof(kExtremes) / sizeof(kExtremes[0]))];
}

// An integer of the section becomes an extreme one, or a little more or less than it was.
inline void change_integer(std::string* bytes, Random* random) {
  static constexpr size_t kWidths[] = {1, 2, 4, 8};
  const size_t width = kWidths[random->below(4)];
  if (bytes->size() < width) return;
  const size_t at = random->below(bytes->size() / width) * width;
  uint64_t value = 0;
  std::memcpy(&value, bytes->data() + at, width);
  switch (random->below(3)) {
    case 0:
      value = extreme(random);
      break;
    case 1:
      value += 1 + random->below(8);
      break;
    default:
      value -= 1 + random->below(8);
  }
  std::memcpy(bytes->data() + at, &value, width);
}

// Damage of the kinds a length, an offset or a disk suffers, anywhere in an input.
inline void damage(std::string* input, Random* random) {
  if (input->size() < 66) return;
  const size_t front = std::min<size_t>(input->size(), 1 + 64 + 10 * 32);
  const size_t at = random->below(2) == 0 ? 1 + random->below(front - 1)
                                          : input->size() - 1 - random->below(input->size() / 4);
  switch (random->below(6)) {
    case 0:
      (*input)[at] = static_cast<char>((*input)[at] ^ (1 << random->below(8)));
      break;
    case 1:
      if (at + 8 <= input->size()) put(input, at, extreme(random));
      break;
    case 2:
      input->resize(random->below(8) == 0 ? at : input->size() - random->below(64));
      break;
    case 3:
      input->append(random->below(128), '\0');
      break;
    case 4: {
      const size_t bytes = std::min<size_t>(input->size() - at, random->below(512));
      std::fill_n(input->begin() + static_cast<std::ptrdiff_t>(at), bytes, '\0');
      break;
    }
    default:
      (*input)[0] = static_cast<char>(random->below(4));
  }
}

// The layout that a section says, if its sizes can be computed: of ranges that no reader need take.
inline std::optional<Layout> claimed_layout(const Part& section) {
  const std::string& bytes = section.bytes;
  if (bytes.size() < 32) return std::nullopt;
  Layout out;
  int32_t* const fields[] = {&out.layers, &out.kv_heads, &out.chunk_tokens, &out.k_dim, &out.v_dim};
  const int32_t most[] = {4096, 4096, 65536, 65536, 65536};
  for (size_t i = 0; i < 5; ++i) {
    *fields[i] = get<int32_t>(bytes, 4 * i);
    if (*fields[i] < 1 || *fields[i] > most[i]) return std::nullopt;
  }
  out.k_dtype = get<DType>(bytes, 20);
  out.v_dtype = get<DType>(bytes, 21);
  const size_t scorer = get<uint16_t>(bytes, 22);
  if (!(is_coded(out.k_dtype) || is_coded(out.v_dtype)) || bytes.size() < 40) return out;
  out.float_dtype = get<DType>(bytes, 33);
  const size_t floats = get<uint16_t>(bytes, 34);
  for (size_t i = 0; i < floats && 42 + scorer + 2 * i <= bytes.size(); ++i) {
    const auto layer = get<uint16_t>(bytes, 40 + scorer + 2 * i);
    if (layer < kMostLayers) out.float_layers.add(layer);
  }
  return out;
}

// Tokens, chunk records, payload and summaries become what the layout section asks for, by the arithmetic
// of the reader itself, where a file of at most kMostBytes can have it. So a geometry that is wrong is
// refused for itself or not at all.
inline void agree_with_layout(Parts* parts) {
  constexpr int64_t kMostBytes = 16 << 10;
  Part* const section = parts->find(snapshot::kLayout);
  if (section == nullptr || parts->find(snapshot::kPacks) != nullptr) return;
  const std::optional<Layout> layout = claimed_layout(*section);
  Part* const tokens = parts->find(snapshot::kTokens);
  Part* const chunks = parts->find(snapshot::kChunks);
  Part* const payload = parts->find(snapshot::kPayload);
  Part* const summaries = parts->find(snapshot::kSummaries);
  if (!layout || !tokens || !chunks || !payload || !summaries) return;
  const int64_t each = layout->chunk_bytes();
  const auto summary_page = get<int64_t>(section->bytes, 24);
  if (each < 0 || summary_page < 0 || summary_page > kMostBytes) return;
  const int64_t summary_bytes = summary_page * layout->layers * layout->kv_heads;
  int64_t ids = std::min<int64_t>(static_cast<int64_t>(tokens->bytes.size()) / 4, 4096);
  const auto count = [&] { return (ids + layout->chunk_tokens - 1) / layout->chunk_tokens; };
  const int64_t record = 48 + 8 * int64_t{layout->layers};
  while (ids > 0 && count() * std::max({each, summary_bytes, record}) > kMostBytes) ids /= 2;
  const int64_t sealed = ids / layout->chunk_tokens;
  tokens->bytes.resize(static_cast<size_t>(4 * ids));
  payload->bytes.resize(static_cast<size_t>(count() * each));
  summaries->bytes.resize(static_cast<size_t>(sealed * summary_bytes));
  chunks->bytes.assign(static_cast<size_t>(count() * record), '\0');
  const auto* const bytes = reinterpret_cast<const std::byte*>(payload->bytes.data());
  for (int64_t c = 0; c < count(); ++c) {
    const auto at = static_cast<size_t>(c * record);
    put(&chunks->bytes, at,
        static_cast<int32_t>(
            std::min<int64_t>(layout->chunk_tokens, ids - c * layout->chunk_tokens)));
    if (c < sealed) {
      put(&chunks->bytes, at + 8, uint64_t{7});
      put(&chunks->bytes, at + 40,
          xxh3_64(summaries->bytes.data() + c * summary_bytes, static_cast<size_t>(summary_bytes)));
    }
    for (int layer = 0; layer < layout->layers; ++layer) {
      const int64_t from = c * each + layout->slice_offset(layer);
      const int64_t size = layout->slice_bytes(layer);
      if (from < 0 || size < 0 || from + size > static_cast<int64_t>(payload->bytes.size()))
        continue;
      put(&chunks->bytes, at + 48 + 8 * static_cast<size_t>(layer),
          slice_checksum(bytes + from, size));
    }
  }
  const auto hints = [](const Part& part) { return part.type == snapshot::kHints; };
  parts->parts.erase(std::remove_if(parts->parts.begin(), parts->parts.end(), hints),
                     parts->parts.end());
}

// Other numbers in the layout section; the rest of the file becomes that of such a layout.
inline void change_geometry(Parts* parts, Random* random) {
  static constexpr int32_t kNumbers[] = {
      0,   1,   2,    8,    15,   16,   17,   24,    32,    48,    64,    128,       256, 257,
      512, 528, 1023, 1024, 1025, 4096, 4097, 32768, 65535, 65536, 65537, INT32_MAX, -1};
  static constexpr size_t kCount = sizeof(kNumbers) / sizeof(kNumbers[0]);
  Part* const section = parts->find(snapshot::kLayout);
  if (section == nullptr || section->bytes.size() < 32) return;
  std::string* const bytes = &section->bytes;
  for (uint64_t times = 1 + random->below(3); times > 0; --times) {
    switch (random->below(4)) {
      case 0:
        put(bytes, 20 + random->below(2), static_cast<uint8_t>(random->below(7)));
        break;
      case 1:
        if (bytes->size() < 42) break;
        if (random->below(2) == 0) {
          put(bytes, 32 + random->below(2), static_cast<uint8_t>(random->below(6)));
        } else {
          put(bytes, 34, static_cast<uint16_t>(get<uint16_t>(*bytes, 34) + 1));
          bytes->resize(bytes->size() + 2);
          put(bytes, bytes->size() - 2, static_cast<uint16_t>(random->below(4)));
        }
        break;
      default:
        put(bytes, 4 * random->below(5), kNumbers[random->below(kCount)]);
    }
  }
  agree_with_layout(parts);
}

// Takes the file apart, changes one section or the list of them, and puts it together with
// checksums that agree. mutate_bytes(std::string* bytes, size_t most) changes raw bytes.
template <class MutateBytes>
void mutate_sections(std::string* input, Random* random, const MutateBytes& mutate_bytes) {
  auto parts = take_apart(input->substr(1));
  if (!parts || parts->parts.empty()) {
    damage(input, random);
    return;
  }
  std::vector<Part>& all = parts->parts;
  // Mostly what says how the rest is to be read.
  Part& part = all[random->below(4) == 0 ? random->below(all.size())
                                         : std::min(all.size() - 1, 2 + random->below(all.size()))];
  switch (random->below(13)) {
    case 10:
    case 11:
    case 12:
      change_geometry(&*parts, random);
      break;
    case 0:
    case 1:
      mutate_bytes(&part.bytes, part.bytes.size() + 64);
      break;
    case 2:
    case 3:
    case 4:
      change_integer(&part.bytes, random);
      break;
    case 5:
      part.bytes.resize(random->below(part.bytes.size() + 65), '\0');
      break;
    case 6: {
      Part& other = all[random->below(all.size())];
      random->below(2) == 0 ? std::swap(part, other) : std::swap(part.bytes, other.bytes);
      break;
    }
    case 7:
      if (random->below(2) == 0) {
        all.push_back({static_cast<uint16_t>(8 + random->below(6)), 1,
                       static_cast<uint8_t>(random->below(2)),
                       std::string(random->below(64), static_cast<char>(random->below(256)))});
      } else {
        all.erase(all.begin() + static_cast<std::ptrdiff_t>(random->below(all.size())));
      }
      break;
    case 8:
      (random->below(2) == 0 ? part.version : part.flags) = static_cast<uint8_t>(random->below(4));
      break;
    default:
      parts->minor = static_cast<uint16_t>(random->below(2));
  }
  *input = input->substr(0, 1) + put_together(*parts);
}

}  // namespace kvpager::snapshot_test
