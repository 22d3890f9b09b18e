#define OCTAVO_ISA avx2
#include "isa.h"

namespace octavo {
Kernels avx2_kernels() { return avx2::table("avx2"); }
}  // namespace octavo
