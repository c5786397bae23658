// Content for the tests of writing: it makes its chunks when they are borrowed, counts what is
// borrowed, and can be told to fail.
#pragma once

#include <algorithm>
#include <cstring>
#include <mutex>
#include <numeric>
#include <set>
#include <stdexcept>
#include <vector>

#include "kvpager/snapshot.h"
#include "sample.h"
#include "snapshot/checksum.h"
#include "snapshot/metadata.h"

namespace kvpager::snapshot_test {

class TestContent final : public SnapshotContent {
 public:
  // Where a borrowed chunk's bytes are: in memory of the content, or made in the borrower's scratch.
  enum class Where { kInPlace, kInScratch };

  TestContent(Sample sample, Where where) : sample_(std::move(sample)), where_(where) {}
  ~TestContent() override = default;

  const SnapshotMeta& meta() const override { return sample_.meta; }
  const Sample& sample() const { return sample_; }
  Sample& sample() { return sample_; }
  void fail_at(int64_t chunk) { fail_at_ = chunk; }

  const std::byte* borrow_chunk(int64_t chunk, std::byte* scratch) const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (chunk == fail_at_) throw std::runtime_error("this chunk cannot be borrowed");
    borrowed_.insert(chunk);
    most_ = std::max(most_, borrowed_.size());
    const auto& payload = sample_.payload[static_cast<size_t>(chunk)];
    if (where_ == Where::kInPlace) return payload.data();
    std::memcpy(scratch, payload.data(), payload.size());
    return scratch;
  }
  void give_back_chunk(int64_t chunk) const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto at = borrowed_.find(chunk);
    if (at == borrowed_.end()) {
      ++errors_;
    } else {
      borrowed_.erase(at);
    }
  }
  void read_summary(int64_t chunk, std::byte* out) const override {
    const auto& summary = sample_.summaries[static_cast<size_t>(chunk)];
    std::memcpy(out, summary.data(), summary.size());
  }

  // Everything borrowed was given back, once.
  bool all_given_back() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return borrowed_.empty() && errors_ == 0;
  }
  size_t most_borrowed() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return most_;
  }

 private:
  Sample sample_;
  const Where where_;
  int64_t fail_at_ = -1;
  mutable std::mutex mutex_;
  mutable std::multiset<int64_t> borrowed_;
  mutable size_t most_ = 0;
  mutable int errors_ = 0;
};

// As a pager or a reader gives it: nothing that only a file has.
inline Sample content_sample(const Layout& layout, int64_t tokens) {
  Sample sample = make_sample(layout, tokens);
  for (size_t c = 0; c < sample.meta.chunks.size(); ++c) {
    sample.meta.hints.qk_score.push_back(0.25 * static_cast<double>(c));
    sample.meta.hints.last_use.push_back(c);
  }
  return sample;
}

inline std::vector<int64_t> all_chunks(const SnapshotContent& content) {
  std::vector<int64_t> which(content.meta().chunks.size());
  std::iota(which.begin(), which.end(), 0);
  return which;
}

inline int64_t save_content(const std::string& path, const SnapshotContent& content,
                            const SnapshotProgress& progress = nullptr) {
  SnapshotWriter writer(path, content.meta().layout);
  const int64_t bytes = writer.write_content(
      content, all_chunks(content), content.meta().fingerprint, content.meta().session, progress);
  writer.publish();
  return bytes;
}

// The places of a manifest whose sealed chunks all lie in one pack, in order.
inline SnapshotPacks one_pack(const Hash128& id, int64_t sealed) {
  SnapshotPacks packs;
  packs.packs.push_back({id, static_cast<uint32_t>(sealed)});
  for (int64_t c = 0; c < sealed; ++c) packs.places.push_back({0, static_cast<uint32_t>(c)});
  return packs;
}

inline std::vector<uint64_t> summary_checksums(const Sample& sample) {
  std::vector<uint64_t> out;
  for (const auto& summary : sample.summaries) {
    out.push_back(xxh3_64(summary.data(), summary.size()));
  }
  return out;
}

}  // namespace kvpager::snapshot_test
