// Mutations of fuzz inputs that know what a section is.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "../cpp/snapshot/parts.h"

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
  switch (random->below(10)) {
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
      parts->minor = static_cast<uint16_t>(random->below(4));
  }
  *input = input->substr(0, 1) + put_together(*parts);
}

}  // namespace kvpager::snapshot_test
