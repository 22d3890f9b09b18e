#define OCTAVO_ISA avx512bf16
#include "isa.h"

namespace octavo {
Kernels avx512bf16_kernels() { return avx512bf16::table("avx512bf16"); }
}  // namespace octavo
