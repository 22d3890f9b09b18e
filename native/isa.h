// Fills one instruction set's function table. Included by exactly one translation unit per set.
#pragma once

#include "attention.h"
#include "limits.h"
#include "linear.h"
#include "rows.h"
#include "seal.h"

namespace octavo {
namespace OCTAVO_ISA {

template <class... Args>
struct ByDType {
  template <void (*Bf16)(Args...), void (*Float)(Args...)>
  static void call(DType dtype, Args... args) {
    dtype == DType::kBFloat16 ? Bf16(args...) : Float(args...);
  }
};

inline Kernels table(const char* name) {
  Kernels k;
  k.name = name;
  k.native_bf16 = kNativeBf16;
  k.linear = ByDType<const LinearArgs&, int>::call<linear<bf16>, linear<float>>;
  k.rms_norm = ByDType<const NormArgs&, int>::call<rms_norm<bf16>, rms_norm<float>>;
  k.rope_write = ByDType<const RopeWriteArgs&, int>::call<rope_write<bf16>, rope_write<float>>;
  k.cache_write = ByDType<const StoreArgs&, int>::call<cache_write<bf16>, cache_write<float>>;
  k.attention =
      ByDType<const AttentionArgs&, const AttentionPlan&, int>::call<attention<bf16>, attention<float>>;
  k.seal = ByDType<const SealArgs&, int>::call<seal<bf16>, seal<float>>;
  k.unseal = ByDType<const SealArgs&, float*, float*>::call<unseal<bf16>, unseal<float>>;
  k.read_pass = read_pass;
  return k;
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
