#include <atomic>
#include <cstdlib>
#include <string>

#include "base/processor.h"
#include "kernels/kernel_table.h"
#include "kvpager/attention.h"
#include "kvpager/error.h"

namespace kvpager {
namespace {

const KernelTable& table_of(int level, Extensions extensions) {
#if defined(__x86_64__)
  if (level == 4) return isa_v4::table(extensions);
  if (level == 3) return isa_v3::table(extensions);
#endif
  (void)level;
  return isa_base::table(extensions);
}

Extensions extensions() {
  if (processor().bf16) return Extensions::kVnniBf16;
  return processor().vnni ? Extensions::kVnni : Extensions::kNone;
}

const KernelTable& chosen() {
  static const KernelTable& table =
      table_of(choose_level(std::getenv("KVPAGER_ISA"), processor().level), extensions());
  return table;
}

std::atomic<const KernelTable*> overriding{nullptr};

}  // namespace

int choose_level(const char* requested, int machine) {
  if (requested == nullptr || *requested == '\0') return machine;
  const std::string name = requested;
  for (const int level : {1, 3, 4}) {
    if (name != level_name(level)) continue;
    if (level <= machine) return level;
    throw InvalidArgumentError(str("KVPAGER_ISA is ", name, ", which this machine cannot run; its ",
                                   "highest tier is ", level_name(machine)));
  }
  throw InvalidArgumentError(str("KVPAGER_ISA is \"", name, "\"; expected base, v3 or v4"));
}

const KernelTable& kernels() {
  const KernelTable* table = overriding.load(std::memory_order_acquire);
  return table != nullptr ? *table : chosen();
}

std::vector<const KernelTable*> runnable_kernels() {
  const int machine = processor().level;
  std::vector<const KernelTable*> tables;
  for (const int level : {1, 3, 4}) {
    if (level <= machine) tables.push_back(&table_of(level, Extensions::kNone));
  }
  if (processor().vnni) tables.push_back(&table_of(4, Extensions::kVnni));
  if (processor().bf16) tables.push_back(&table_of(4, Extensions::kVnniBf16));
  return tables;
}

KernelOverride::KernelOverride(const KernelTable& table) {
  overriding.store(&table, std::memory_order_release);
}

KernelOverride::~KernelOverride() { overriding.store(nullptr, std::memory_order_release); }

const char* isa_name() { return kernels().name; }

}  // namespace kvpager
