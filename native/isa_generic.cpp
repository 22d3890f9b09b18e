#define OCTAVO_ISA generic
#include "isa.h"

namespace octavo {
Kernels generic_kernels() { return generic::table("generic"); }
}  // namespace octavo
