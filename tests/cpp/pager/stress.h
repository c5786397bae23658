// A life of a pager, drawn from a seed: appended, aborted, forked, trimmed, closed, evicted, pinned,
// saved and restored sequences. The caller's stream is never waited for but by the pager, so that
// kernels are as late as they can be. What comes out does not depend on where the pool is.
#pragma once

#include <deque>
#include <random>

#include "small_pager.h"

namespace kvpager::pager_test {

struct Trace {
  std::deque<std::vector<float>> outputs;  // of every layer of every forward, aborted ones too
  std::vector<uint64_t> bytes;             // hashes of what the host has read
};

inline bool same_trace(const Trace& a, const Trace& b) {
  if (a.bytes != b.bytes || a.outputs.size() != b.outputs.size()) return false;
  for (size_t i = 0; i < a.outputs.size(); ++i) {
    if (!same_bits(a.outputs[i], b.outputs[i])) return false;
  }
  return true;
}

class Life {
 public:
  Life(const PagerOptions& options, uint64_t seed, const std::string& snapshot)
      : pager_(options), random_(seed), gifts_(seed), snapshot_(snapshot) {}

  // The caller may be in the middle of things when an error comes.
  ~Life() {
    if (on_device()) {
      try {
        Caller::current().finish();
      } catch (const PagerError&) {
      }
    }
  }

  Pager& pager() { return pager_; }

  Trace& run(int steps) {
    for (int i = 0; i < 3; ++i) open();
    for (int step = 0; step < steps; ++step) act();
    for (Known& known : known_) look(known);
    if (on_device()) Caller::current().finish();
    return trace_;
  }

 private:
  static constexpr size_t kMostSequences = 5;
  static constexpr size_t kMostTokens = 110;

  uint64_t draw(uint64_t below) { return random_() % below; }
  Known& any() { return known_[static_cast<size_t>(draw(known_.size()))]; }

  void open() { known_.push_back({pager_.create_sequence(""), {}}); }

  void act() {
    switch (draw(16)) {
      case 0:
        return abandon(any());
      case 1:
        if (known_.size() < kMostSequences) {  // and both go on from here
          const size_t parent = static_cast<size_t>(draw(known_.size()));
          known_.push_back({pager_.fork(known_[parent].id), known_[parent].tokens});
          const auto length = static_cast<int64_t>(known_[parent].tokens.size());
          if (draw(2) == 0 && length % 16 > 2) {  // rows the other keeps are written anew
            trim(known_[parent], length - 2);
          }
          append(known_[parent]);
          append(known_.back());
        }
        return;
      case 2: {
        Known& known = any();
        trim(known, static_cast<int64_t>(draw(known.tokens.size() + 1)));
        return append(known);
      }
      case 3: {
        const size_t i = static_cast<size_t>(draw(known_.size()));
        pager_.destroy_sequence(known_[i].id);
        known_[i] = {pager_.create_sequence(""), {}};
        return append(known_[i]);
      }
      case 4:
        pager_.evict_all();
        return append(any());
      case 5: {
        Known& known = any();
        if (known.tokens.empty()) return;
        pager_.evict_all();
        const int64_t start = pager_.released(known.id);
        const auto stop = std::min(static_cast<int64_t>(known.tokens.size()), start + 48);
        const PinId pin = pager_.pin(known.id, start, stop);
        append(known);
        return pager_.unpin(pin);
      }
      case 6:
        if (known_.size() < kMostSequences) {
          const auto reader = SnapshotReader::open(snapshot_);
          const auto& saved = reader->meta().tokens;
          const auto upto = static_cast<int64_t>(draw(saved.size() + 1));
          const SequenceId id =
              pager_.restore(reader, "", Provenance::kExact, pager_.options().namespace_key, upto);
          known_.push_back({id, {saved.begin(), saved.begin() + upto}});
          append(known_.back());
        } else {
          pager_.destroy_sequence(known_.back().id);
          known_.pop_back();
        }
        return;
      case 7:
        return look(any());
      case 8:
        return save(any());
      default:
        return append(any());
    }
  }

  // Layers [0, layers) of a forward; outputs arrive when the stream has come so far.
  void layers(const std::vector<RowDescriptor>& rows, const std::vector<TokenId>& all, int layers) {
    const std::vector<uint64_t> history = histories(all);
    for (int layer = 0; layer < layers; ++layer) {
      Tensors t(kRows);
      for (int64_t i = 0; i < kRows; ++i) {
        const RowDescriptor& row = rows[static_cast<size_t>(i)];
        if (row.kind == RowKind::kPadding) continue;
        const uint64_t h = history[static_cast<size_t>(row.position)];
        t.fill(i, h, layer);
      }
      AttendOptions options;
      options.scaling = 0.25f;
      options.window = pager_.options().window;
      trace_.outputs.push_back(t.out.data);
      TensorView out = t.out.view();
      out.data = trace_.outputs.back().data();
      if (!on_device()) {
        pager_.attend(layer, t.q.view(), t.k.view(), t.v.view(), out, options);
        continue;
      }
      Caller& caller = Caller::current();
      options.stream = caller.stream();
      const TensorView result = caller.upload(out);
      pager_.attend(layer, caller.upload(t.q.view()), caller.upload(t.k.view()),
                    caller.upload(t.v.view()), result, options);
      caller.download(result, out);
    }
  }

  std::vector<RowDescriptor> begin(const Known& known, std::vector<TokenId>* all) {
    const auto more = some_tokens(1 + static_cast<int64_t>(draw(kRows)), draw(1000));
    *all = known.tokens;
    all->insert(all->end(), more.begin(), more.end());
    auto rows = commit_rows(known.id, static_cast<int64_t>(known.tokens.size()), more.data(),
                            static_cast<int64_t>(more.size()));
    const bool change = draw(4) == 0;
    if (on_device() && change) Caller::current().change_stream();
    if (gifts_() % 3 == 0) {
      begin_given(&rows, *all);
    } else {
      pager_.begin(rows, stream());
    }
    return rows;
  }

  static void* stream() { return on_device() ? Caller::current().stream() : nullptr; }

  // About half of the rows are given: to the model they are padding.
  void begin_given(std::vector<RowDescriptor>* rows, const std::vector<TokenId>& all) {
    const std::vector<uint64_t> history = histories(all);
    std::vector<RowSpan> spans;
    std::vector<TokenId> tokens;
    ForwardOptions with{{}, true, stream()};
    std::vector<uint64_t> given;
    for (RowDescriptor& row : *rows) {
      if (row.kind == RowKind::kCommit && gifts_() % 2 == 0) {
        spans.push_back({row.sequence, row.position, 1, RowKind::kGiven});
        with.given.push_back(row.token);
        given.push_back(history[static_cast<size_t>(row.position)]);
        row = RowDescriptor();
      }
      spans.push_back({row.sequence, row.position, 1, row.kind});
      tokens.push_back(row.token);
    }
    pager_.begin(spans, tokens, with);
    if (given.empty()) return;
    std::vector<Rows> k, v;
    std::vector<TensorView> keys, values;
    for (int layer = 0; layer < 2; ++layer) {
      const auto fill = [&](What what, std::vector<Rows>* to, std::vector<TensorView>* views) {
        Rows& all_rows = to->emplace_back(static_cast<int64_t>(given.size()), 2, 16, 0.0f);
        for (size_t i = 0; i < given.size(); ++i) {
          fill_row(given[i], layer, what, 32, all_rows.row(static_cast<int64_t>(i)));
        }
        const TensorView view = all_rows.view();
        views->push_back(on_device() ? Caller::current().upload(view) : view);
      };
      fill(kKey, &k, &keys);
      fill(kValue, &v, &values);
    }
    pager_.give(keys, values, stream());
  }

  void append(Known& known) {
    if (known.tokens.size() > kMostTokens) trim(known, pager_.released(known.id) > 0 ? 0 : 20);
    std::vector<TokenId> all;
    const auto rows = begin(known, &all);
    layers(rows, all, 2);
    // Chunks that are not exact are forgotten with their last sequence, not kept for others.
    pager_.commit_all(draw(2) == 0 ? Provenance::kExact : Provenance::kDecode);
    known.tokens = std::move(all);
  }

  // As far as the window allows.
  void trim(Known& known, int64_t length) {
    if (length > 0) length = std::max(length, pager_.earliest_trim(known.id));
    pager_test::trim(pager_, &known, length);
  }

  // A forward that is aborted, and another one at once.
  void abandon(Known& known) {
    std::vector<TokenId> all;
    const auto rows = begin(known, &all);
    layers(rows, all, 1 + static_cast<int>(draw(2)));
    pager_.abort();
    if (draw(2) == 0) pager_.evict_all();
    append(any());
  }

  void look(const Known& known) {
    const auto length = static_cast<int64_t>(known.tokens.size());
    const int64_t held = pager_.released(known.id);
    std::vector<std::byte> k(static_cast<size_t>((length - held) * 128)), v(k.size());
    for (int layer = 0; layer < 2; ++layer) {
      pager_.read_kv(known.id, layer, held, length, k.data(), v.data());
      trace_.bytes.push_back(slice_checksum(k.data(), static_cast<int64_t>(k.size())));
      trace_.bytes.push_back(slice_checksum(v.data(), static_cast<int64_t>(v.size())));
    }
  }

  // What a save would write, summaries too.
  void save(const Known& known) {
    if (known.tokens.empty()) return;
    const auto frozen = pager_.freeze(known.id);
    const SnapshotMeta& meta = frozen->meta();
    std::vector<std::byte> scratch(static_cast<size_t>(kChunkBytes));
    std::vector<std::byte> summary(static_cast<size_t>(meta.summary_bytes_per_chunk()));
    for (size_t c = 0; c < meta.chunks.size(); ++c) {
      const auto chunk = static_cast<int64_t>(c);
      const std::byte* bytes = frozen->borrow_chunk(chunk, scratch.data());
      trace_.bytes.push_back(slice_checksum(bytes, kChunkBytes));
      frozen->give_back_chunk(chunk);
      for (const uint64_t sum : meta.chunks[c].slice_checksum) trace_.bytes.push_back(sum);
      if (chunk >= meta.sealed_chunks()) continue;
      frozen->read_summary(chunk, summary.data());
      trace_.bytes.push_back(slice_checksum(summary.data(), static_cast<int64_t>(summary.size())));
    }
  }

  Pager pager_;
  std::mt19937_64 random_;
  std::mt19937_64 gifts_;  // what is given, of a life that is otherwise the same
  std::string snapshot_;
  std::deque<Known> known_;
  Trace trace_;
};

}  // namespace kvpager::pager_test
