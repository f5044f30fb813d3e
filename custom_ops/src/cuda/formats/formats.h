// All formats, and their facts by kind.
#pragma once
#include "cuda/formats/float.cuh"
#include "cuda/formats/fp8.cuh"
#include "cuda/formats/int4.cuh"
#include "cuda/formats/int8.cuh"
#include "cuda/formats/k_quants.cuh"
#include "cuda/formats/mxfp4.cuh"
#include "cuda/formats/nvfp4.cuh"

namespace quantmoe {

enum class WeightKind {
#define QM_CUDA_FORMAT(F) k##F,
#include "cuda/formats/formats.inc"
};

// body(facts) of a kind; of one that there is not, the last's.
template <class Body>
constexpr auto with_facts(WeightKind kind, const Body& body) {
#define QM_CUDA_FORMAT(F) \
  if (kind == WeightKind::k##F) return body(F##Facts{});
#include "cuda/formats/formats.inc"
  return body(FloatFacts{});
}

inline WeightKind kind_of(const qm_projection& w) {
#define QM_CUDA_FORMAT(F) \
  if (F##Facts::is(w)) return WeightKind::k##F;
#include "cuda/formats/formats.inc"
  return WeightKind::kFloat;
}

constexpr int bits_of(WeightKind kind) {
  return with_facts(kind, [](auto f) { return f.kBits; });
}
constexpr bool two_levels(WeightKind kind) {
  return with_facts(kind, [](auto f) { return f.kTwoLevels; });
}
constexpr int scale_bytes(WeightKind kind, int per_block) {
  return with_facts(kind, [=](auto f) { return f.scale_bytes(per_block); });
}
constexpr int zero_bytes(WeightKind kind) {
  return with_facts(kind, [](auto f) { return f.kZeroBytes; });
}

}  // namespace quantmoe
