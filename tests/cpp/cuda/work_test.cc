// The launches of a forward replayed on the host, by the functions that kernels and launches use: how
// many blocks have work on an H100, and how long the longest chain of work is.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "cuda/attend_tensor_launch.cuh"
#include "cuda/kernels.h"
#include "cuda/linear_launch.h"
#include "cuda/select_launch.h"
#include "cuda/write_launch.h"
#include "forward_tables.h"

namespace kvpager::testing {
namespace {

constexpr int64_t kProcessors = 132;
constexpr int kDim = 128;
constexpr int kGroup = 4;
constexpr int64_t kTokens = 64;
constexpr int kRowCounts[] = {1, 8, 256};
constexpr int64_t kContexts[] = {2 << 10, 8 << 10, 32 << 10, 128 << 10, 256 << 10};

// Of one kernel. A block's warps work side by side where each has items of its own; what one worker
// does is done one after another.
struct Work {
  int64_t blocks = 0;
  int64_t busy = 0;     // blocks with work
  int64_t items = 0;    // with work
  int64_t longest = 0;  // of one worker: chunks, or rows and queries where there are none
  int64_t most = 0;     // items of one block
};

struct Place {
  int sequence = 0;
  int64_t position = 0;
};

// Up to 8 rows decode, each a sequence of its own; more are the end of one prompt.
std::vector<Place> places_of(int rows, int64_t context) {
  std::vector<Place> places;
  for (int i = 0; i < rows; ++i) {
    const bool decoding = rows <= 8;
    places.push_back({decoding ? i : 0, decoding ? context - 1 : context - rows + i});
  }
  return places;
}

// A forward of the 8B shape.
class ModelForward {
 public:
  ModelForward(int rows, int64_t context) : tables_(places_of(rows, context), kTokens) {
    shape_.layers = 36;
    shape_.kv_heads = 8;
    shape_.q_heads = shape_.kv_heads * kGroup;
    shape_.chunk_tokens = kTokens;
    shape_.k_dim = shape_.v_dim = kDim;
    shape_.k_dtype = shape_.v_dtype = shape_.q_dtype = DType::kBFloat16;
    for (size_t i = 0; i < tables_.parts.size(); ++i) {
      tables_.parts[i].sealed = (context - rows) / kTokens;
      tables_.parts[i].score_row = static_cast<int32_t>(i);
    }
    tables_.arrange(kGroup);
    counts_ = {tables_.header.rows, tables_.header.parts, tables_.header.small_tiles,
               tables_.header.large_tiles, tables_.header.max_visible};
    const gpu::Bounds bounds{256, context / kTokens, context / kTokens * 8};
    attend_.attend.shape = shape_;
    attend_.attend.tables = tables();
    attend_.attend.counts = counts_;
    attend_.attend.scratch_bytes = gpu::tensor_scratch_bytes(shape_, bounds);
    grids_ = gpu::tensor::grids_of<kDim>(attend_.attend, kProcessors);
    gpu::tensor::set_workers(grids_, &attend_);
    plan_ = gpu::tensor::make_plan(attend_);
  }

  Work write() const {
    gpu::WriteParams params;
    params.shape = shape_;
    params.counts = counts_;
    Work work;
    work.blocks = work.busy = work.items = gpu::writing_blocks(params);
    work.longest = std::min(counts_.rows, gpu::kWriteTileRows);
    work.most = 1;
    return work;
  }

  // The kernel of small tiles, and that of large ones.
  Work small() const {
    const gpu::AttendParams& p = attend_.attend;
    Work work;
    work.blocks = grids_.small;
    for (int64_t block = 0; block < work.blocks; ++block) {
      int64_t items = 0;
      for (int warp = 0; warp < gpu::tensor::kSmallWarps; ++warp) {
        int64_t chunks = 0;
        for (uint32_t i = gpu::tensor::small_worker(block, warp, grids_.small);
             i < gpu::tensor::small_items(p, plan_);
             i += static_cast<uint32_t>(attend_.small_workers)) {
          const int64_t walked = chunks_of(gpu::tensor::small_item(p, i), plan_.small);
          chunks += walked;
          items += walked > 0;
        }
        work.longest = std::max(work.longest, chunks);
      }
      count(items, &work);
    }
    return work;
  }
  Work large() const {
    const gpu::AttendParams& p = attend_.attend;
    Work work;
    work.blocks = grids_.large;
    for (int64_t block = 0; block < work.blocks; ++block) {
      int64_t items = 0, chunks = 0;
      for (uint32_t i = static_cast<uint32_t>(block); i < gpu::tensor::large_items(p, plan_);
           i += static_cast<uint32_t>(attend_.large_workers)) {
        const int64_t walked = chunks_of(gpu::tensor::large_item(p, i), plan_.large);
        chunks += walked;
        items += walked > 0;
      }
      work.longest = std::max(work.longest, chunks);
      count(items, &work);
    }
    return work;
  }

  Work merge() const {
    const gpu::AttendParams& p = attend_.attend;
    Work work;
    work.blocks = grids_.merge;
    for (int64_t block = 0; block < work.blocks; ++block) {
      int64_t items = 0;
      for (int64_t i = block; i < gpu::tensor::merge_items(p, plan_); i += work.blocks) {
        const gpu::tensor::MergeItem item = gpu::tensor::merge_item(p, plan_, i);
        items += item.index >= 0 && item.level != gpu::tensor::Level::kWalk;
      }
      work.longest = std::max(work.longest, items);
      count(items, &work);
    }
    return work;
  }

  Work score() const {
    namespace scoring = gpu::scoring;
    scoring::ScoreJob job;
    job.p = select_params();
    job.slots = counts_.rows;
    scoring::lay_out(&job);
    Work work;
    work.blocks = scoring::score_blocks(job, kProcessors);
    int32_t run = scoring::kMostRun;
    std::vector<int32_t> ends = ends_of(job, run);
    while (scoring::too_few(int64_t{ends.back()} * shape_.kv_heads, work.blocks, run)) {
      ends = ends_of(job, run /= 2);
    }
    for (int64_t block = 0; block < work.blocks; ++block) {
      int64_t items = 0, chunks = 0;
      for (int64_t i = block; i < int64_t{ends.back()} * shape_.kv_heads; i += work.blocks) {
        const scoring::ItemPlace place = scoring::place_of(job, i, run, ends.data());
        const gpu::Part& part = tables_.parts[static_cast<size_t>(place.part)];
        chunks += std::min<int64_t>(run, part.sealed - place.run_begin);
        ++items;
      }
      work.longest = std::max(work.longest, chunks);
      count(items, &work);
    }
    return work;
  }

  Work select() const {
    Work work;
    work.blocks = work.busy = work.items = gpu::scoring::select_blocks(shape_, counts_.rows);
    work.longest = counts_.max_visible;
    work.most = 1;
    return work;
  }

 private:
  gpu::Tables tables() const {
    gpu::Tables tables;
    tables.header = &tables_.header;
    tables.rows = tables_.rows.data();
    tables.parts = tables_.parts.data();
    tables.order = tables_.arrangement.order.data();
    tables.tiles = tables_.arrangement.tiles.data();
    return tables;
  }

  gpu::SelectParams select_params() const {
    gpu::SelectParams p;
    p.shape = shape_;
    p.tables = tables();
    p.counts = counts_;
    p.k = 32;
    p.sinks = kTokens;
    p.recent = 256;
    return p;
  }

  static std::vector<int32_t> ends_of(const gpu::scoring::ScoreJob& job, int32_t run) {
    std::vector<int32_t> ends;
    for (int32_t i = 0; i < job.p.counts.parts; ++i) {
      const gpu::scoring::PartWork part = gpu::scoring::part_work(job, i, run);
      ends.push_back((ends.empty() ? 0 : ends.back()) + part.tiles * part.runs);
    }
    return ends;
  }

  // All that an item walks, where every row attends to everything.
  int64_t chunks_of(const gpu::tensor::WalkItem& item, gpu::tensor::Level level) const {
    const gpu::Part& part = tables_.parts[static_cast<size_t>(item.tile.part)];
    const gpu::Span span = gpu::span_of(attend_.attend.wave, item.tile.part, part);
    if (!gpu::tensor::has_chunks(plan_, level, span, item.unit)) return 0;
    const auto splits = gpu::tensor::splits_of(plan_, level, span, item.unit);
    const int64_t end = int64_t{splits.end} * gpu::tensor::kSplitChunks;
    return std::min(end, span.end) - int64_t{splits.begin} * gpu::tensor::kSplitChunks;
  }

  static void count(int64_t items, Work* work) {
    work->busy += items > 0;
    work->items += items;
    work->most = std::max(work->most, items);
  }

  ForwardTables tables_;
  gpu::Shape shape_;
  gpu::HostCounts counts_;
  gpu::tensor::Launch attend_;
  gpu::tensor::Grids grids_;
  gpu::tensor::Plan plan_;
};

template <class Check>
void for_each_forward(Check check) {
  for (const int rows : kRowCounts) {
    for (const int64_t context : kContexts) {
      CAPTURE(rows);
      CAPTURE(context);
      check(rows, context, ModelForward(rows, context));
    }
  }
}

TEST_CASE("no block is idle while another has several items") {
  for_each_forward([](int, int64_t, const ModelForward& forward) {
    for (const Work& work :
         {forward.write(), forward.small(), forward.large(), forward.merge(), forward.score()}) {
      CAPTURE(work.blocks);
      CAPTURE(work.items);
      CHECK((work.most <= 1 || work.busy == work.blocks));
    }
  });
}

TEST_CASE("a query that is to be merged has a block, and a block no more than its share") {
  for_each_forward([](int rows, int64_t, const ModelForward& forward) {
    const Work merge = forward.merge();
    CHECK((merge.items == 0 || merge.items == int64_t{rows} * 32));
    CHECK(merge.busy == std::min(merge.items, merge.blocks));
    CHECK(merge.most <= (merge.items + merge.blocks - 1) / merge.blocks);
  });
}

TEST_CASE("one row that decodes keeps a block on every multiprocessor from 8K tokens on") {
  for (const int64_t context : kContexts) {
    CAPTURE(context);
    const ModelForward forward(1, context);
    const int64_t splits = context / kTokens / gpu::tensor::kSplitChunks;
    CHECK(forward.small().busy >= std::min<int64_t>(splits * 8, kProcessors));
    CHECK(forward.merge().busy == 32);
    if (context >= 8 << 10) CHECK(forward.small().busy >= kProcessors);
    if (context >= 32 << 10) CHECK(forward.score().busy >= kProcessors);
  }
  // One wave of splits at 32K: nobody walks a second one.
  CHECK(ModelForward(1, 32 << 10).small().longest == gpu::tensor::kSplitChunks);
}

TEST_CASE("the chains of attention are within a half of an even share") {
  for_each_forward([](int rows, int64_t context, const ModelForward& forward) {
    const Work work = rows == 256 ? forward.large() : forward.small();
    const int64_t tiles = rows == 256 ? 8 : rows;
    const int64_t workers = work.blocks * (rows == 256 ? 1 : gpu::tensor::kSmallWarps);
    const int64_t share = tiles * 8 * (context / kTokens) / workers;
    CHECK(work.longest <= std::max<int64_t>(gpu::tensor::kSplitChunks, share * 3 / 2));
  });
}

// Linear layers of the 8B shape.
struct Product {
  const char* name;
  int64_t depth, outputs;
};
constexpr Product kProducts[] = {
    {"q", 4096, 4096}, {"k or v", 4096, 1024}, {"gate or up", 4096, 12288}, {"down", 12288, 4096}};

struct ProductWork {
  int64_t blocks = 0;
  int64_t at_once = 0;    // blocks that a device has room for
  int64_t under_way = 0;  // bytes of weights that those blocks ask for before they multiply
};

ProductWork product_work(const Product& product, int64_t rows) {
  namespace linear = gpu::linear;
  LinearParams p;
  p.dtype = DType::kBFloat16;
  p.rows = rows;
  p.outputs = product.outputs;
  p.depth = product.depth;
  ProductWork work;
  const auto few = [&](auto shape, int64_t blocks, int64_t in_a_multiprocessor) {
    using Shape = decltype(shape);
    work.blocks = blocks;
    work.at_once = kProcessors * in_a_multiprocessor;
    const int64_t warps = std::min<int64_t>(linear::kWarps, product.depth / linear::kSplit);
    work.under_way = std::min(work.blocks, work.at_once) * warps * Shape::kAtOnce *
                     Shape::kOutputs * linear::kStep * 2;
  };
  if (rows <= linear::kRowTile) {
    few(linear::FewShape<1, 2>{}, linear::few_blocks<1, 2>(p), 2);
  } else if (rows <= linear::kFewRows) {
    few(linear::FewShape<4, 4>{}, linear::few_blocks<4, 4>(p), 1);
  } else {
    work.blocks = linear::many_blocks(p);
    work.at_once = kProcessors * 2;
    work.under_way = std::min(work.blocks, work.at_once) * (linear::ManyShape::kStages - 1) *
                     linear::ManyShape::kStageDepth * linear::ManyShape::kOutputs * 2;
  }
  return work;
}

TEST_CASE("linear layers of a decoding row ask for as many bytes as the memory has under way") {
  constexpr int64_t kUnderWay = 3'000'000 * 7 / 10;  // 3.0 TB/s for 700 ns
  for (const Product& product : kProducts) {
    CAPTURE(std::string(product.name));
    for (const int64_t rows : {1, 8, 16}) {
      CHECK(product_work(product, rows).under_way >= kUnderWay * 9 / 10);
    }
    CHECK(product_work(product, 64).under_way >= kUnderWay / 3);
    CHECK(product_work(product, 256).blocks >= kProcessors / 5);
  }
}

TEST_CASE("the work of linear layers, as a table" * doctest::skip()) {
  std::printf("| rows | layer | blocks | room for | bytes under way |\n");
  for (const int64_t rows : {1, 16, 64, 256}) {
    for (const Product& product : kProducts) {
      const ProductWork work = product_work(product, rows);
      std::printf("| %lld | %s | %lld | %lld | %lld |\n", static_cast<long long>(rows),
                  product.name, static_cast<long long>(work.blocks),
                  static_cast<long long>(work.at_once), static_cast<long long>(work.under_way));
    }
  }
}

TEST_CASE("the work of each kernel, as a table" * doctest::skip()) {
  std::printf("| rows | context | kernel | blocks | busy | items | most items | longest chain |\n");
  for_each_forward([](int rows, int64_t context, const ModelForward& forward) {
    const auto print = [&](const char* kernel, const Work& work) {
      std::printf("| %d | %lldK | %s | %lld | %lld | %lld | %lld | %lld |\n", rows,
                  static_cast<long long>(context >> 10), kernel,
                  static_cast<long long>(work.blocks), static_cast<long long>(work.busy),
                  static_cast<long long>(work.items), static_cast<long long>(work.most),
                  static_cast<long long>(work.longest));
    };
    print("write", forward.write());
    print("attend, small tiles", forward.small());
    print("attend, large tiles", forward.large());
    print("merge", forward.merge());
    print("score", forward.score());
    print("select", forward.select());
  });
}

}  // namespace
}  // namespace kvpager::testing
