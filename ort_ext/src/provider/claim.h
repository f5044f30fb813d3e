// com.microsoft's QMoE and MatMulNBits as calls of the core: which nodes it computes, and their weights as panels.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "provider/packed_file.h"
#include "provider/provider_api.h"
#include "quantmoe/quant_moe.h"

namespace quantmoe {

// What activations are rounded to: what a node's accuracy_level says, nothing, or int8.
enum class Activations { kAuto, kFloat, kInt8 };

// Why a node stays with ONNX Runtime.
struct Unclaimed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An input that is an initializer, or absent.
struct Constant {
  const OrtValueInfo* info = nullptr;
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  Shape shape;
  explicit operator bool() const { return info; }
};

// A weight [rows, k] of each expert, which a packed tensor is made of. Gate and up are one: `halves` 2.
struct Matrix {
  Constant codes, scales, zero_points, bias;
  Constant global_scales;  // nvfp4: of each expert
  bool columns = false;    // nvfp4: codes are [k, rows / 2], two rows a byte
  qm_projection projection{};
  int64_t experts = 1, n = 0, k = 0;  // n: of one half
  int halves = 1;
  bool interleaved = false;  // gate's and up's rows alternate
  int64_t bits = 4;          // of a stored code; below 4 it becomes one of 4 bits, of the same value
  int64_t code_row = 0;      // bytes of a row of codes
  qm_row row{};              // of an expert
  size_t bytes() const { return static_cast<size_t>(experts * row.bytes); }
};

// A node that the core computes.
struct Claim {
  std::string node;
  bool moe = false;
  qm_type type = QM_F32;
  qm_moe experts{};
  qm_linear linear{};
  int64_t top_k = 0;
  bool normalize = false;           // router_weights that are selected are divided by their sum
  std::vector<Matrix> weights;      // w13 and w2, or w
  std::vector<std::string> inputs;  // names of a run's inputs: x; router_probs, router_weights ("": none)
};

// Whether a node is of one of the two operators.
bool is_candidate(const GraphApi& api, const OrtNode* node);
// Reads a candidate. Throws Unclaimed.
Claim read_claim(const GraphApi& api, const OrtNode* node, Activations activations);

// Names the weights of a matrix, in 64 hexadecimal digits. For tensors in data files these are the file's name, size
// and time, the place, and samples of the bytes. For tensors in the model's file or in memory all bytes count.
std::string identity_of(const GraphApi& api, const Matrix& matrix, const std::filesystem::path& folder);
// The BLAKE3 of all bytes of a matrix's tensors.
std::string source_sum(const GraphApi& api, const Matrix& matrix);
// Packs all experts.
void pack_matrix(const GraphApi& api, const Matrix& matrix, const Put& put);

std::string node_name(const GraphApi& api, const OrtNode* node);
std::vector<const OrtValueInfo*> node_inputs(const GraphApi& api, const OrtNode* node);
std::string value_name(const GraphApi& api, const OrtValueInfo* value);  // "": an input that is left out

}  // namespace quantmoe
