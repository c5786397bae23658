// Leaves one stack for another. On x86-64 some twenty instructions: the compiler saves what is live,
// and the jump (unlike a return) goes where the processor predicts. Floating-point modes are not
// switched: all fibers of a launch share those of their host thread.
#pragma once

#include <cstddef>
#include <cstdint>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace kvpager::shim {

using FiberEntry = void (*)();  // never returns

#if defined(__x86_64__)

// A stack pointer to switch to that starts `entry` on the stack below `top` (16-byte aligned).
inline void* prepare_stack(void* top, void* /*bottom*/, FiberEntry entry) {
  uintptr_t* const slots = static_cast<uintptr_t*>(top);
  slots[-1] = 0;  // where entry would return to; leaves the stack as after a call
  slots[-2] = reinterpret_cast<uintptr_t>(entry);
  return slots - 2;
}

// Stores where this stack is to be resumed in *saved and goes on at `target`.
inline __attribute__((always_inline)) void switch_stack(void** saved, void* target) {
  asm volatile(
      "leaq -128(%%rsp), %%rsp\n\t"  // past the red zone
      "pushq %%rbp\n\t"
      "leaq 1f(%%rip), %%rax\n\t"
      "pushq %%rax\n\t"
      "movq %%rsp, (%%rdi)\n\t"
      "movq %%rsi, %%rsp\n\t"
      "popq %%rax\n\t"
      "jmpq *%%rax\n"
      "1:\n\t"
      "popq %%rbp\n\t"
      "leaq 128(%%rsp), %%rsp"
      : "+D"(saved), "+S"(target)
      :
      : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0",
        "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
        "xmm12", "xmm13", "xmm14", "xmm15",
#if defined(__AVX512F__)
        "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25",
        "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "xmm31", "k0", "k1", "k2", "k3", "k4", "k5",
        "k6", "k7",
#endif
        "memory", "cc");
}

#else  // ucontext: slow (it saves the signal mask), and everywhere

// What a stack pointer points to: a context at the top of the stack it resumes.
inline void* prepare_stack(void* top, void* bottom, FiberEntry entry) {
  ucontext_t* const context = static_cast<ucontext_t*>(top) - 1;
  getcontext(context);
  context->uc_stack.ss_sp = bottom;
  context->uc_stack.ss_size =
      static_cast<size_t>(reinterpret_cast<char*>(context) - static_cast<char*>(bottom));
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  return context;
}

inline void switch_stack(void** saved, void* target) {
  ucontext_t here;
  *saved = &here;
  swapcontext(&here, static_cast<ucontext_t*>(target));
}

#endif

}  // namespace kvpager::shim
