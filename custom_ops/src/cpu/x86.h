// What an x86 processor and its system offer, from cpuid itself: __builtin_cpu_supports calls a part of libgcc that not
// every clang comes with.
#pragma once

#include <cpuid.h>

#include <cstdint>

namespace quantmoe {
namespace {  // of each file's own: compiled for its instruction set

// Bits of XCR0: what the system saves of a thread's registers.
constexpr uint32_t kSavesYmm = 0x06, kSavesZmm = 0xe6, kSavesTiles = 0x600e6;
constexpr uint32_t kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;  // of leaf 7's edx; cpuid.h has other names with gcc

// Whether these bits are set: in XCR0, in ecx of cpuid's leaf 1, and in ebx, ecx and edx of its leaf 7. False: the
// processor has no XCR0 or leaf 7, as before AVX.
bool x86_has(uint32_t xcr0, uint32_t leaf1_ecx, uint32_t leaf7_ebx, uint32_t leaf7_ecx, uint32_t leaf7_edx = 0) {
  uint32_t a, b, c, d, saved, unused;
  leaf1_ecx |= bit_OSXSAVE;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & leaf1_ecx) != leaf1_ecx) return false;
  asm("xgetbv" : "=a"(saved), "=d"(unused) : "c"(0));
  return (saved & xcr0) == xcr0 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & leaf7_ebx) == leaf7_ebx &&
         (c & leaf7_ecx) == leaf7_ecx && (d & leaf7_edx) == leaf7_edx;
}

}  // namespace
}  // namespace quantmoe
