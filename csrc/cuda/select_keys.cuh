// The k best of a row's scores, by one block.
//
// Scores become 64-bit integers of the same order. The k-th largest is found digit by digit from
// the first bit in which they differ; of its equals the first ones by id are in.
#pragma once

#include "cuda/score_items.cuh"

namespace kvpager::gpu::scoring {

inline constexpr int kSelectThreads = 256;
inline constexpr int kSelectWarps = kSelectThreads / 32;
inline constexpr int kCachedKeys = 4096;  // of a row, in shared memory; further ones are read again
inline constexpr int kDigits = 256;
inline constexpr int kDigitSets = 3;
inline constexpr int32_t kAllTies = 0x7FFFFFFF;

// A double as an integer of the same order; NaN below everything, both zeros equal.
KVP_DEVICE uint64_t order_of(double score) {
  const uint64_t bits = static_cast<uint64_t>(double_to_bits(score));
  constexpr uint64_t kSign = uint64_t{1} << 63;
  constexpr uint64_t kInfinity = uint64_t{0x7FF} << 52;
  if ((bits & ~kSign) > kInfinity) return 0;
  if (bits == kSign) return kSign;
  return (bits & kSign) != 0 ? ~bits : bits | kSign;
}

// Chunks [begin, end) of the 32 that start at `first`, as bits.
KVP_DEVICE uint32_t bits_of_range(int64_t first, int64_t begin, int64_t end) {
  begin = most(begin - first, 0);
  end = least(end - first, 32);
  if (begin >= end) return 0;
  return (end == 32 ? ~0u : (1u << end) - 1) & ~((1u << begin) - 1);
}

KVP_DEVICE int32_t count_bits(uint32_t x) {
  x -= (x >> 1) & 0x55555555u;
  x = (x & 0x33333333u) + ((x >> 2) & 0x33333333u);
  x = (x + (x >> 4)) & 0x0F0F0F0Fu;
  return static_cast<int32_t>((x * 0x01010101u) >> 24);
}

// The lowest `count` set bits.
KVP_DEVICE uint32_t lowest_bits(uint32_t x, int32_t count) {
  uint32_t out = 0;
  for (; count > 0 && x != 0; --count) {
    out |= x & (0u - x);
    x &= x - 1;
  }
  return out;
}

// Of a block.
struct SelectShared {
  uint64_t* keys;      // [cached]
  uint64_t* extremes;  // [2][kSelectWarps]
  int32_t* counts;     // [kSelectWarps]
  float* sums;         // [kSelectWarps]
  int32_t* digits;     // [kDigitSets][kDigits]
  uint32_t* always;    // [words]: in every row
  uint32_t* above;     // [words]: chosen
  uint32_t* equal;     // [words]: as good as the last one chosen
};

KVP_DEVICE SelectShared select_shared(int32_t cached, int32_t words) {
  SelectShared shared;
  shared.keys = reinterpret_cast<uint64_t*>(shared_memory());
  shared.extremes = shared.keys + cached;
  shared.counts = reinterpret_cast<int32_t*>(shared.extremes + 2 * kSelectWarps);
  shared.sums = reinterpret_cast<float*>(shared.counts + kSelectWarps);
  shared.digits = reinterpret_cast<int32_t*>(shared.sums + kSelectWarps);
  shared.always = reinterpret_cast<uint32_t*>(shared.digits + kDigitSets * kDigits);
  shared.above = shared.always + words;
  shared.equal = shared.above + words;
  return shared;
}

inline int64_t select_shared_bytes(int32_t cached, int32_t words) {
  return 8 * int64_t{cached} + 2 * kSelectWarps * 8 + kSelectWarps * 8 + kDigitSets * kDigits * 4 +
         3 * 4 * int64_t{words};
}

// The chunks in the middle of one row, those that are chosen by score.
struct Middle {
  const double* scores;
  int64_t begin, end;
  int32_t first_word, last_word;  // half-open
  int32_t cached;
  SelectShared shared;

  KVP_DEVICE bool holds(int32_t word, int64_t chunk) const {
    return chunk >= begin && chunk < end && ((shared.always[word] >> (chunk % 32)) & 1u) == 0;
  }
  KVP_DEVICE int64_t place(int64_t chunk) const { return chunk - int64_t{first_word} * 32; }
  KVP_DEVICE uint64_t key(int64_t chunk) const {
    const int64_t at = place(chunk);
    return at < cached ? shared.keys[at] : order_of(scores[chunk]);
  }
};

struct Threshold {
  uint64_t key = 0;
  int32_t ties = kAllTies;  // how many chunks with this very key are in
};

// The digit in which the `need`-th largest key lies, how many keys are above it and how many within.
struct Digit {
  int32_t digit, above, within;
};

// By each warp for itself, so that nobody waits for another; digits: counts of at least `need` keys.
KVP_DEVICE Digit find_digit(const int32_t* digits, int32_t need) {
  constexpr int kPerLane = kDigits / 32;
  const int top = kDigits - 1 - lane_index() * kPerLane;
  int32_t own = 0;
  for (int i = 0; i < kPerLane; ++i) own += digits[top - i];
  int32_t sum = own;
  for (int step = 1; step < 32; step *= 2) {
    const int32_t other = shuffle(sum, lane_index() - step < 0 ? 0 : lane_index() - step);
    if (lane_index() >= step) sum += other;
  }
  int32_t before = sum - own;
  const bool here = before < need && need <= sum;  // in one lane
  Digit found{top, before, 0};
  for (int i = 0; here && i < kPerLane; ++i) {
    found = {top - i, before, digits[top - i]};
    if (before + found.within >= need) break;
    before += found.within;
  }
  const uint32_t lanes = ballot(here);
  const int lane = count_bits((lanes & (0u - lanes)) - 1);
  return {shuffle(found.digit, lane), shuffle(found.above, lane), shuffle(found.within, lane)};
}

KVP_DEVICE void clear_digits(const SelectShared& shared, int round) {
  int32_t* const digits = shared.digits + round % kDigitSets * kDigits;
  for (int i = thread_index(); i < kDigits; i += kSelectThreads) digits[i] = 0;
}

KVP_DEVICE Threshold find_threshold(const Middle& middle, int32_t places) {
  const SelectShared& shared = middle.shared;
  clear_digits(shared, 0);
  uint64_t low = ~uint64_t{0};
  uint64_t high = 0;
  int32_t count = 0;
  for (int32_t word = middle.first_word + warp_index(); word < middle.last_word;
       word += kSelectWarps) {
    const int64_t chunk = int64_t{word} * 32 + lane_index();
    const bool in = middle.holds(word, chunk);
    const uint64_t key = in ? order_of(middle.scores[chunk]) : 0;
    if (middle.place(chunk) < middle.cached) shared.keys[middle.place(chunk)] = key;
    if (!in) continue;
    low = key < low ? key : low;
    high = key > high ? key : high;
    ++count;
  }
  for (int mask = 16; mask > 0; mask /= 2) {
    const uint64_t other_low = shuffle_xor(low, mask);
    const uint64_t other_high = shuffle_xor(high, mask);
    low = other_low < low ? other_low : low;
    high = other_high > high ? other_high : high;
    count += shuffle_xor(count, mask);
  }
  if (lane_index() == 0) {
    shared.extremes[warp_index()] = low;
    shared.extremes[kSelectWarps + warp_index()] = high;
    shared.counts[warp_index()] = count;
  }
  sync_block();
  count = 0;
  for (int i = 0; i < kSelectWarps; ++i) {
    low = shared.extremes[i] < low ? shared.extremes[i] : low;
    high = shared.extremes[kSelectWarps + i] > high ? shared.extremes[kSelectWarps + i] : high;
    count += shared.counts[i];
  }
  Threshold threshold;
  if (count <= places) return threshold;

  int undecided = 64;  // low bits
  while (undecided > 0 && ((low ^ high) >> (undecided - 1)) == 0) --undecided;
  uint64_t prefix = undecided == 64 ? 0 : high >> undecided << undecided;
  int32_t need = places;
  // A round counts in one set of digits and clears that of the next, while slower warps still read that
  // of the one before: so it has one barrier.
  for (int round = 0; undecided > 0; ++round) {
    const int shift = undecided > 8 ? undecided - 8 : 0;
    const uint64_t mask = (uint64_t{1} << (undecided - shift)) - 1;
    const uint64_t decided = undecided == 64 ? 0 : ~uint64_t{0} << undecided;
    int32_t* const digits = shared.digits + round % kDigitSets * kDigits;
    clear_digits(shared, round + 1);
    for (int32_t word = middle.first_word + warp_index(); word < middle.last_word;
         word += kSelectWarps) {
      const int64_t chunk = int64_t{word} * 32 + lane_index();
      if (!middle.holds(word, chunk)) continue;
      const uint64_t key = middle.key(chunk);
      if (((key ^ prefix) & decided) == 0) {
        atomic_add(&digits[static_cast<int>((key >> shift) & mask)], 1);
      }
    }
    sync_block();
    const Digit found = find_digit(digits, need);
    need -= found.above;
    prefix |= static_cast<uint64_t>(found.digit) << shift;
    undecided = shift;
    if (found.within == need) {
      // All of them: everything from this prefix up.
      threshold.key = prefix;
      return threshold;
    }
  }
  threshold.key = prefix;
  threshold.ties = need;
  return threshold;
}

// Writes middle.shared.above.
KVP_DEVICE void choose(const Middle& middle, const Threshold& threshold) {
  const SelectShared& shared = middle.shared;
  for (int32_t word = middle.first_word + warp_index(); word < middle.last_word;
       word += kSelectWarps) {
    const int64_t chunk = int64_t{word} * 32 + lane_index();
    const bool in = middle.holds(word, chunk);
    const uint64_t key = in ? middle.key(chunk) : 0;
    const uint32_t above = ballot(in && key > threshold.key);
    const uint32_t equal = ballot(in && key == threshold.key);
    if (lane_index() == 0) {
      shared.above[word] = threshold.ties == kAllTies ? above | equal : above;
      shared.equal[word] = equal;
    }
  }
  sync_block();
  if (threshold.ties == kAllTies) return;
  if (warp_index() == 0) {
    int32_t before = 0;
    for (int32_t first = middle.first_word; first < middle.last_word; first += 32) {
      const int32_t word = first + lane_index();
      const uint32_t equal = word < middle.last_word ? shared.equal[word] : 0;
      int32_t sum = count_bits(equal);
      const int32_t own = sum;
      for (int step = 1; step < 32; step *= 2) {
        const int32_t other = shuffle(sum, lane_index() - step < 0 ? 0 : lane_index() - step);
        if (lane_index() >= step) sum += other;
      }
      const int32_t left = threshold.ties - before - (sum - own);
      if (left > 0 && equal != 0) shared.above[word] |= lowest_bits(equal, left);
      before += shuffle(sum, 31);
    }
  }
  sync_block();
}

}  // namespace kvpager::gpu::scoring
