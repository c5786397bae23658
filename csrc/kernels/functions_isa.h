// What each *_isa.cc file gives to its tier's table.
#pragma once

#include "kernels/kernel_table.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {

void attend_tile(const TileParams& params);
float round_query(const float* q, int64_t count, int16_t* out);
void merge_state(float* total, const float* part, int32_t v_dim);
void finish_state(const float* state, int32_t v_dim, float* out);
void exp_lanes(const float* x, float* y, int64_t count);

void to_float(const void* source, DType dtype, int64_t count, float* out);
void from_float(const float* source, DType dtype, int64_t count, void* out);
void rotate(float* x, int64_t dim);
void read_tile(const Tile& tile, float* out);
void encode(const float* source, DType dtype, int64_t dim, uint8_t* codes, uint16_t* scales);
bool all_fit(const void* source, DType dtype, DType stored, int64_t count);

void score_sketches(const SketchParams& params, const std::byte* const* summaries, int64_t count,
                    double* const* scores);
#if KVPAGER_ISA_LEVEL == 4
void attend_tile_vnni(const TileParams& params);
void score_sketches_vnni(const SketchParams& params, const std::byte* const* summaries,
                         int64_t count, double* const* scores);
#endif

}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
