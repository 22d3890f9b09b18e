#define OCTAVO_ISA avx512
#include "isa.h"

namespace octavo {
Kernels avx512_kernels() { return avx512::table("avx512"); }
}  // namespace octavo
