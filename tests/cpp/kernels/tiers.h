// What holds in every tier of instructions.
#pragma once

#include <doctest/doctest.h>

#include <string>

#include "kernels/kernel_table.h"

namespace kvpager::testing {

// Calls step(table) while kernels() is each table that this machine can run.
template <class Step>
void in_every_tier(const Step& step) {
  for (const KernelTable* table : runnable_kernels()) {
    CAPTURE(std::string(table->name));
    const KernelOverride use(*table);
    step(*table);
  }
}

}  // namespace kvpager::testing
