// Which instance of a product's kernels, on how many blocks. Pure; runs without a GPU.
#pragma once
#include <cstdint>

#include "cuda/common/layout.h"
#include "cuda/gemm/instances.h"

namespace quantmoe {

// A product's weights, and the device.
struct ProductWeights {
  const qm_cuda_device& device;
  const qm_projection& w;
  const MarlinRow& row;
};
// What the call asks of a product.
struct ProductLoad {
  int path;  // of PlanPath
  Product product;
  int64_t most_experts;  // that get tokens
  double mean;           // tokens an expert gets on average
  int most_tiles;        // of 8 tokens, in path stream
};

// Whether the kernels of path decode have the shared memory they take. int8 with zero points lacks it where a
// multiprocessor has 100 KiB, and takes stream.
bool decode_fits(const ProductWeights&);
// A product of the layer, or of a linear where no function below has its own.
PlanStep choose_gemm(const ProductWeights&, const ProductLoad&);
// A linear of a few rows; shared_bytes 0: the GPU has too little for the kernels that keep many stages in flight.
PlanStep choose_linear_decode(const ProductWeights&);
// A linear of floats on mma.sync.
PlanStep choose_float_stream(const ProductWeights&, int64_t rows);
// A linear of more rows on wgmma.
PlanStep choose_dense(const ProductWeights&, int64_t rows);

}  // namespace quantmoe
