#include "compute/functions_isa.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {
namespace {

constexpr ComputeTable kPlain = {
    combine,        mean,
#if KVPAGER_ISA_LEVEL >= 3
    linear_packing, linear_compressed_rows,
    linear_pack,    linear_panel,
#endif
};

#if KVPAGER_ISA_LEVEL == 4
constexpr ComputeTable with_bf16() {
  ComputeTable table = kPlain;
  table.linear_panel = linear_panel_dots;
  return table;
}
constexpr ComputeTable kBf16 = with_bf16();
#endif

}  // namespace

const ComputeTable& compute_table(Extensions extensions) {
#if KVPAGER_ISA_LEVEL == 4
  if (extensions == Extensions::kVnniBf16) return kBf16;
#endif
  (void)extensions;
  return kPlain;
}

}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
