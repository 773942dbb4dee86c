// The tile instructions (AMX) that products use, once as instructions and once in plain C++ (-DTILES_EMULATED) with the
// same bits. Every tile has 16 rows of 64 bytes. A caller that loads a smaller tile fills the rest with zeros.
//
//   int8   c[m][n] += sum over k < 64 of a[m][k] (signed) * b[k / 4][n][k % 4] (unsigned), in 32 bits
//   bf16   The even and the odd k < 32 are summed separately from zero, in the order of k, each step a fused multiply-add.
//          Then c[m][n] += even + odd, with two more roundings. All roundings are to nearest even. Numbers below 2^-126
//          are zeros before and after each step.
//
// The instructions are written in assembler. gcc 12's _tile_loadconfig declares only 8 of the 64 bytes that it reads,
// so the compiler removes stores to the other bytes.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(TILES_EMULATED)
#include <cmath>
#else
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace lowbit {
namespace tiles {

constexpr int ROWS = 16, BYTES = 64, SIZE = ROWS * BYTES;

#if defined(TILES_EMULATED)

inline thread_local char registers[8][SIZE];

inline bool present() { return true; }
inline bool permitted() { return true; }
inline void begin() { std::memset(registers, 0, sizeof registers); }
inline void end() {}
template <int T>
inline void zero() {
  std::memset(registers[T], 0, SIZE);
}
template <int T>
inline void load(const void* from, int64_t stride) {
  for (int r = 0; r < ROWS; ++r) std::memcpy(registers[T] + r * BYTES, static_cast<const char*>(from) + r * stride, BYTES);
}
template <int T>
inline void store(void* to, int64_t stride) {
  for (int r = 0; r < ROWS; ++r) std::memcpy(static_cast<char*>(to) + r * stride, registers[T] + r * BYTES, BYTES);
}
template <int C, int A, int B>
inline void dot_bytes() {
  for (int m = 0; m < ROWS; ++m)
    for (int n = 0; n < 16; ++n) {
      uint32_t sum;  // wraps around like the instruction
      std::memcpy(&sum, registers[C] + m * BYTES + 4 * n, 4);
      for (int k = 0; k < BYTES; ++k) {
        const int32_t value = static_cast<int8_t>(registers[A][m * BYTES + k]);
        const int32_t code = static_cast<uint8_t>(registers[B][k / 4 * BYTES + 4 * n + k % 4]);
        sum += static_cast<uint32_t>(value * code);
      }
      std::memcpy(registers[C] + m * BYTES + 4 * n, &sum, 4);
    }
}
inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline float widened(const char* half) {
  char bytes[4] = {0, 0, half[0], half[1]};
  float x;
  std::memcpy(&x, bytes, 4);
  return flushed(x);
}
template <int C, int A, int B>
inline void dot_halves() {
  for (int m = 0; m < ROWS; ++m)
    for (int n = 0; n < 16; ++n) {
      float sums[2] = {}, c;
      for (int k = 0; k < BYTES / 2; ++k) {
        const float x = widened(registers[A] + m * BYTES + 2 * k), w = widened(registers[B] + k / 2 * BYTES + 4 * n + 2 * (k % 2));
        sums[k % 2] = flushed(std::fma(x, w, sums[k % 2]));
      }
      std::memcpy(&c, registers[C] + m * BYTES + 4 * n, 4);
      c = flushed(flushed(c) + flushed(sums[0] + sums[1]));
      std::memcpy(registers[C] + m * BYTES + 4 * n, &c, 4);
    }
}

#else

inline bool present() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1);
}
// Request the tile registers, which the system gives to a process on request only. The request fails before Linux 5.16,
// and with some hypervisors and filters of system calls.
inline bool permitted() {
  constexpr long request = 0x1023, data = 18;  // ARCH_REQ_XCOMP_PERM and XTILEDATA
  return syscall(SYS_arch_prctl, request, data) == 0;
}
// A thread may use tiles between begin() and end(). After end(), a switch of threads saves no tiles.
inline void begin() {
  alignas(64) static const struct Shapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {BYTES, BYTES, BYTES, BYTES, BYTES, BYTES, BYTES, BYTES};
    uint8_t rows[16] = {ROWS, ROWS, ROWS, ROWS, ROWS, ROWS, ROWS, ROWS};
  } shapes;
  asm volatile("ldtilecfg %0" ::"m"(shapes));
}
inline void end() { asm volatile("tilerelease"); }
template <int T>
inline void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
inline void load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline void store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
template <int C, int A, int B>
inline void dot_bytes() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
inline void dot_halves() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif

}  // namespace tiles
}  // namespace lowbit
