// What each *_isa.cc file of this room gives to its tier's table.
#pragma once

#include "compute/compute_table.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {

#if KVPAGER_ISA_LEVEL >= 3
LinearPacking linear_packing(const LinearParams& params);
int64_t linear_compressed_rows(DType dtype);
void linear_pack(const LinearParams& params, int64_t group, float* out);
void linear_panel(const LinearParams& params, const void* next_w, const float* input,
                  float* scratch);
#endif
#if KVPAGER_ISA_LEVEL == 4
void linear_panel_dots(const LinearParams& params, const void* next_w, const float* input,
                       float* scratch);
#endif

void combine(Operation operation, const float* a, const float* b, bool b_is_one, int64_t count,
             float* out);
float mean(const float* x, int64_t count);

}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
