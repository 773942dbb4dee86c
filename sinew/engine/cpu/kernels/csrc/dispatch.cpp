// Find the instruction sets that this CPU supports.
#include "buffer.h"
#include "kernels.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace lowbit {
namespace {

const char* without_tiles = "";  // the reason why no set uses the CPU's tile instructions
#if defined(LOWBIT_x86_amx)
const Tiles* const TILES = amx_tiles(&without_tiles);
const Tiles* const HALF_TILES = TILES == nullptr ? nullptr : amx_half_tiles();
#endif

// The best set comes first. A set exists only if the compiler supports both of its files.
#if defined(TILES_EMULATED)  // tests use this list on any CPU
const Set ALL[] = {
    {portable_kernels(), portable_floats(), true, nullptr, TILES, HALF_TILES},
    {portable_kernels(), portable_floats(), true},
};
#elif defined(__x86_64__)
#if defined(LOWBIT_x86_avx512bf16)
const Halves* const HALVES = __builtin_cpu_supports("avx512bf16") ? avx512bf16_halves() : nullptr;
#else
const Halves* const HALVES = nullptr;
#endif
const Set ALL[] = {
#if defined(LOWBIT_x86_amx) && defined(LOWBIT_x86_avx512vnni) && defined(LOWBIT_floats_avx512)
    {avx512vnni_kernels(), avx512_floats(),
     TILES != nullptr && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw"), HALVES, TILES, HALF_TILES},
#endif
#if defined(LOWBIT_x86_avx512vnni) && defined(LOWBIT_floats_avx512)
    {avx512vnni_kernels(), avx512_floats(),
     __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw"), HALVES},
#endif
#if defined(LOWBIT_x86_avxvnni) && defined(LOWBIT_floats_avx2)
    {avxvnni_kernels(), avx2_floats(),
     __builtin_cpu_supports("avxvnni") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
#endif
#if defined(LOWBIT_x86_avx2) && defined(LOWBIT_floats_avx2)
    {avx2_kernels(), avx2_floats(), __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
#endif
    {portable_kernels(), portable_floats(), true},
};
#elif defined(__aarch64__)
#if defined(__linux__)
const bool DOTPROD = getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
const bool I8MM = getauxval(AT_HWCAP2) & HWCAP2_I8MM, BF16 = getauxval(AT_HWCAP2) & HWCAP2_BF16;
#else  // every Apple M1 has dot products
const bool DOTPROD = true, I8MM = false, BF16 = false;
#endif
#if defined(LOWBIT_arm_bf16)
const Halves* const HALVES = BF16 ? neon_bf16_halves() : nullptr;
#else
const Halves* const HALVES = nullptr;
#endif
const Set ALL[] = {
#if defined(LOWBIT_arm_i8mm) && defined(LOWBIT_floats_neon)
    {neon_i8mm_kernels(), neon_floats(), I8MM, HALVES},
#endif
#if defined(LOWBIT_arm_dotprod) && defined(LOWBIT_arm_fmla) && defined(LOWBIT_floats_neon)
    {neon_dotprod_kernels(), neon_floats(), DOTPROD, neon_fmla_halves()},
#endif
    {portable_kernels(), portable_floats(), true},
};
#else
const Set ALL[] = {{portable_kernels(), portable_floats(), true}};
#endif

}  // namespace

const Set* set_here(int index) {
  for (const Set& each : ALL)
    if (each.here && index-- == 0) return &each;
  return nullptr;
}

}  // namespace lowbit

// Return 1 if the index-th set of kernels computes a format of panels.
extern "C" PUBLIC int lowbit_takes_panels(int index, int format) {
  const lowbit::Set* set = lowbit::set_here(index);
  return set != nullptr && set->takes(format);
}

// Return the name of the index-th set of kernels that this CPU can run, best first, or null after the last set.
extern "C" PUBLIC const char* lowbit_kernels(int index) {
  const lowbit::Set* set = lowbit::set_here(index);
  return set == nullptr ? nullptr : set->name();
}

// Return the products of rounded attention (Set::attention) of the index-th set, or null after the last set.
extern "C" PUBLIC const char* lowbit_attention(int index) {
  const lowbit::Set* set = lowbit::set_here(index);
  return set == nullptr ? nullptr : set->attention();
}

// Return the reason why no set uses the CPU's tile instructions. Return "" if a set uses them, or if the CPU or the
// library has none.
extern "C" PUBLIC const char* lowbit_without_tiles() { return lowbit::without_tiles; }
