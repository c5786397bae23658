// Snapshots whose checksums are right and whose numbers are an attack: each is one that a reader has to
// refuse by name. tests/fuzz/crafted has them as files (snapshot_fuzz --crafted FOLDER writes those).
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "../cpp/snapshot/sample.h"
#include "../cpp/snapshot/store_fixture.h"
#include "mutate.h"

namespace kvpager::snapshot_test {

struct Crafted {
  std::string name;
  std::string field;  // that the error names
  std::string bytes;
};

inline Layout codes_and_floats() {
  Layout layout = mixed_layout();
  layout.layers = 3;
  layout.kv_heads = 1;
  layout.float_layers = {};
  layout.float_layers.add(1);
  return layout;
}

// What the file at `path` is made of.
inline Parts parts_of(const std::string& path) { return *take_apart(read_bytes(path)); }

// Offsets within the layout section.
inline constexpr size_t kLayers = 0, kHeads = 4, kChunkTokens = 8, kKDim = 12, kVDim = 16,
                        kKDtype = 20, kVDtype = 21, kScorerBytes = 22, kSummaryPage = 24,
                        kFlags = 32, kFloatDtype = 33, kFloatCount = 34;

inline std::vector<Crafted> crafted_snapshots() {
  const StoreFixture store;
  Sample sample = make_sample(small_layout(), 5);  // small files: one chunk
  sample.meta.hints.qk_score = {0.5};
  sample.meta.hints.last_use = {1};
  write_sample(store.victim(), sample);
  const Parts plain = parts_of(store.victim());
  write_sample(store.victim(), make_sample(codes_and_floats(), 5, 8));
  const Parts coded = parts_of(store.victim());
  const Parts manifest = parts_of(store.manifest());
  std::vector<Crafted> out;
  const auto add = [&out](const std::string& name, const std::string& field, Parts parts,
                          const std::function<void(Parts*)>& change) {
    change(&parts);
    out.push_back({name, field, put_together(parts)});
  };
  const auto in_layout = [](size_t at, auto value) {
    return [=](Parts* parts) {
      put(&parts->find(snapshot::kLayout)->bytes, at, value);
      agree_with_layout(parts);
    };
  };
  const auto in_section = [](uint16_t type, size_t at, auto value) {
    return [=](Parts* parts) { put(&parts->find(type)->bytes, at, value); };
  };

  // One layer of floats beside none of codes, whose tile of 65536 by 65536 was 0 bytes in 32 bits.
  const auto tile_beyond_32_bits = [](int32_t v_dim, size_t tokens, size_t payload) {
    return [=](Parts* parts) {
      std::string* const layout = &parts->find(snapshot::kLayout)->bytes;
      const auto scorer = get<uint16_t>(*layout, kScorerBytes);
      const int32_t fields[] = {1, 1, 65536, 65536, v_dim};
      for (size_t i = 0; i < 5; ++i) put(layout, 4 * i, fields[i]);
      put(layout, kVDtype, v_dim % 16 == 0 ? DType::kQ8 : DType::kBFloat16);
      put(layout, kFlags, uint8_t{0});
      put(layout, kFloatCount, uint16_t{1});
      layout->resize(40u + scorer);
      layout->append(2, '\0');
      parts->find(snapshot::kTokens)->bytes.assign(4 * tokens, '\1');
      parts->find(snapshot::kPayload)->bytes.assign(payload, '\0');
      parts->find(snapshot::kSummaries)->bytes.clear();
      std::string record(tokens == 0 ? 0 : 56, '\0');
      if (tokens > 0) {
        put(&record, 0, static_cast<int32_t>(tokens));
        put(&record, 48, xxh3_64(std::string(payload, '\0').data(), payload));
      }
      parts->find(snapshot::kChunks)->bytes = record;
    };
  };
  add("tile_of_no_bytes", "layout.chunk_tokens", coded, tile_beyond_32_bits(65536, 0, 0));
  add("tile_smaller_than_its_rows", "layout.chunk_tokens", coded,
      tile_beyond_32_bits(1, 1, size_t{65536} * 2));

  const std::pair<size_t, const char*> dims[] = {{kKDim, "k_dim"}, {kVDim, "v_dim"}};
  for (const int32_t layers : {0, -1, 1025, 4096, INT32_MAX}) {
    add("layers_" + std::to_string(layers), "layout.layers", plain, in_layout(kLayers, layers));
  }
  for (const int32_t heads : {0, 1025, INT32_MIN}) {
    add("kv_heads_" + std::to_string(heads), "layout.kv_heads", plain, in_layout(kHeads, heads));
  }
  for (const int32_t tokens : {0, 1, 8, 48, 65536, INT32_MAX}) {
    add("chunk_tokens_" + std::to_string(tokens), "layout.chunk_tokens", plain,
        in_layout(kChunkTokens, tokens));
  }
  for (const auto& [at, name] : dims) {
    for (const int32_t dim : {0, 1, 24, 528, 65536, INT32_MAX}) {
      add(name + ("_" + std::to_string(dim)), std::string("layout.") + name, plain,
          in_layout(at, dim));
    }
  }
  add("q8_of_24", "layout.k_dim", coded, in_layout(kKDim, 24));
  add("q4_of_48", "layout.v_dtype", coded, in_layout(kVDim, 48));
  add("k_dtype_3", "layout.k_dtype", coded, in_layout(kKDtype, uint8_t{3}));
  add("v_dtype_255", "layout.v_dtype", plain, in_layout(kVDtype, uint8_t{255}));
  add("float_dtype_of_codes", "layout.float_dtype", coded, in_layout(kFloatDtype, uint8_t{5}));
  add("codes_without_codes", "layout.size", coded, [](Parts* parts) {
    std::string* const layout = &parts->find(snapshot::kLayout)->bytes;
    put(layout, kKDtype, DType::kFloat16);
    put(layout, kVDtype, DType::kFloat16);
    agree_with_layout(parts);
  });
  add("rotated_floats", "layout.k_rotated", coded, [](Parts* parts) {
    std::string* const layout = &parts->find(snapshot::kLayout)->bytes;
    put(layout, kKDtype, DType::kFloat16);
    put(layout, kFlags, uint8_t{1});
    agree_with_layout(parts);
  });
  add("float_layer_count_65535", "layout.size", coded, in_layout(kFloatCount, uint16_t{65535}));
  add("scorer_bytes_65535", "layout.scorer_bytes", plain, in_layout(kScorerBytes, uint16_t{65535}));
  for (const int64_t bytes : {int64_t{-1}, int64_t{1} << 31, int64_t{1} << 62, INT64_MIN}) {
    add("summary_page_bytes_" + std::to_string(bytes), "layout.summary_page_bytes", plain,
        in_layout(kSummaryPage, bytes));
  }

  for (const int32_t valid : {INT32_MIN, -1, 0, 17}) {
    add("valid_" + std::to_string(valid), "chunks[0].valid", plain,
        in_section(snapshot::kChunks, 0, valid));
  }
  add("provenance_255", "chunks[0].provenance", plain,
      in_section(snapshot::kChunks, 4, uint8_t{255}));
  for (const size_t at : {size_t{0}, size_t{4}}) {
    add(at == 0 ? "hints_scores_of_2_32" : "hints_uses_of_2_32", "hints.size", plain,
        in_section(snapshot::kHints, at, UINT32_MAX));
  }
  add("tokens_of_half_an_id", "tokens.size", plain,
      [](Parts* parts) { parts->find(snapshot::kTokens)->bytes.pop_back(); });

  // One pack of seven chunks and where each sealed one is.
  const size_t places = 8 + 24;
  add("packs_2_32", "packs.size", manifest, in_section(snapshot::kPacks, 0, UINT32_MAX));
  add("packs_none", "packs", manifest, in_section(snapshot::kPacks, 0, uint32_t{0}));
  add("pack_of_2_32_chunks", "packs[0].chunks", manifest,
      in_section(snapshot::kPacks, 8 + 16, UINT32_MAX));
  add("pack_of_too_many_chunks", "tokens.size", manifest,
      in_section(snapshot::kPacks, 8 + 16, uint32_t{INT32_MAX}));
  add("place_in_pack_2_32", "packs.places[0].pack", manifest,
      in_section(snapshot::kPacks, places, UINT32_MAX));
  add("place_of_chunk_2_32", "packs.places[2].chunk", manifest,
      in_section(snapshot::kPacks, places + 2 * 8 + 4, UINT32_MAX));

  const auto header = [&](const std::string& name, const std::string& field, auto change) {
    std::string bytes = put_together(plain);
    change(&bytes);
    reseal_header(&bytes);
    out.push_back({name, field, bytes});
  };
  header("sections_2_32", "header.section_count",
         [](std::string* bytes) { put(bytes, snapshot::kSectionCountAt, UINT32_MAX); });
  header("offset_before_the_end_of_64_bits", "tokens.offset",
         [](std::string* bytes) { put(bytes, entry_at(5) + 8, UINT64_MAX - 63); });
  header("size_of_64_bits", "tokens.size",
         [](std::string* bytes) { put(bytes, entry_at(5) + 16, UINT64_MAX); });
  return out;
}

}  // namespace kvpager::snapshot_test
