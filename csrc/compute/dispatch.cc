#include "base/processor.h"
#include "compute/compute_table.h"
#include "kvpager/error.h"

namespace kvpager {
namespace {

const ComputeTable& table_of(int level, Extensions extensions) {
#if defined(__x86_64__)
  if (level == 4) return isa_v4::compute_table(extensions);
  if (level == 3) return isa_v3::compute_table(extensions);
#endif
  (void)level;
  return isa_base::compute_table(extensions);
}

}  // namespace

const ComputeTable& compute_table(const KernelTable& kernels) {
  return table_of(kernels.level, kernels.extensions);
}

const ComputeTable& linear_kernels() {
  const ComputeTable& table = compute_table(kernels());
  if (table.linear_panel != nullptr) return table;
  if (processor().level < 3) {
    throw InvalidArgumentError(
        "kvpager multiplies no linear layers on this processor: its products need AVX2 "
        "(x86-64-v3); "
        "expected torch's, which linear=\"auto\" chooses here");
  }
  return table_of(3, Extensions::kNone);
}

}  // namespace kvpager
