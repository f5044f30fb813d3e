// The operators as ONNX Runtime custom operators on the CUDA execution provider: a thin adapter over the C ABI of
// quant_moe_cuda.h.
//
// A library of its own, so that the CPU's has no CUDA inside; a session takes one of them (ONNX Runtime refuses a
// second library for a domain). ONNX Runtime copies the packed weights, initializers of a CUDA node, to the device
// once, when the session is created; the kernels read them there. Launches go to ONNX Runtime's stream, with a
// workspace of its allocator for that stream. What can be checked is checked when a session is created. With the
// session entry quantmoe.experts = host the packed experts stay in host memory, with disk in their file
// (device_experts.h).
#include <cuda_runtime_api.h>

#include <optional>
#include <vector>

#include "adapter.h"
#include "experts/device_experts.h"
#include "experts/per_session.h"
#include "quantmoe/quant_moe_cuda.h"
#include "ranks/nccl.h"

namespace quantmoe {
namespace {

// A node on a device.
class CudaKernel : public Kernel {
 protected:
  CudaKernel(const Op& op, const OrtApi* api, const OrtKernelInfo* info);
  void check_packed(const OrtKernelInfo* info, size_t input, bool verify) const;
  int64_t count_experts(const OrtKernelInfo* info, size_t input, size_t row_bytes) const;
  int device_ordinal() const;
  void query_device();  // asks for the device: after what needs none is checked
  void* stream_of(OrtKernelContext* context) const;
  // Freed when what uses it is enqueued; the allocator keeps it for this stream, where later work comes after.
  struct Release {
    OrtAllocator* allocator;
    void operator()(void* memory) const { allocator->Free(allocator, memory); }
  };
  using Scratch = std::unique_ptr<void, Release>;
  Scratch scratch_of(OrtKernelContext* context, size_t bytes) const;
  template <class Plan, class Problem, class Make, class Launch>
  void execute(OrtKernelContext* context, const Problem& problem, const Make& make, const Launch& launch) const;
  qm_cuda_norm_problem read_norm(const OrtKernelInfo* info, const qm_norm& norm) const;
  qm_cuda_norm_tensors norm_tensors(OrtKernelContext* context, qm_cuda_norm_problem* problem) const;

  qm_cuda_device device_{};

 private:
  std::unique_ptr<OrtAllocator, void (*)(OrtAllocator*)> allocator_;  // of the node's device
  const OrtMemoryInfo* memory_ = nullptr;
};

CudaKernel::CudaKernel(const Op& op, const OrtApi* api, const OrtKernelInfo* info)
    : Kernel(op, api, info), allocator_(nullptr, api->ReleaseAllocator) {
  OrtAllocator* allocator;
  check(api->KernelInfoGetAllocator(info, OrtMemTypeDefault, &allocator), "the device's allocator");
  allocator_.reset(allocator);
  memory_ = allocator->Info(allocator);
}

// How many experts a packed tensor holds, whose rows are checked.
int64_t CudaKernel::count_experts(const OrtKernelInfo* info, size_t input, size_t row_bytes) const {
  Shape shape;
  get_weight(info, input, shape);
  const int64_t words = static_cast<int64_t>(row_bytes / 4);
  // No words: an attribute is wrong, which the plan will name.
  if (words && shape[1] != words)
    fail(std::string(op_.inputs.first[input].name) + " has shape " + text_of(shape) + ", expected [experts, " +
         std::to_string(words) + " int32 words] for these attributes");
  return shape[0];
}

// Compares a packed tensor, which is on the device, with the node's identity of it.
void CudaKernel::check_packed(const OrtKernelInfo* info, size_t input, bool verify) const {
  Shape shape;
  const char* data = static_cast<const char*>(data_of(get_weight(info, input, shape)));
  std::vector<char> copy;
  check_identity(info, input, verify, [&](size_t at, size_t size) {
    copy.resize(size);
    if (const cudaError_t e = cudaMemcpy(copy.data(), data + at, size, cudaMemcpyDefault))
      throw std::runtime_error(node_ + ": CUDA: " + cudaGetErrorString(e));
    return copy.data();
  });
}

int CudaKernel::device_ordinal() const {
  int ordinal = 0;
  check(api_->MemoryInfoGetId(memory_, &ordinal));
  return ordinal;
}

void CudaKernel::query_device() {
  char error[QM_ERROR_SIZE];
  if (qm_cuda_query(device_ordinal(), &device_, error)) fail(error);
}

void* CudaKernel::stream_of(OrtKernelContext* context) const {
  void* stream = nullptr;
  check(api_->KernelContext_GetGPUComputeStream(context, &stream));
  return stream;
}

// Null for no bytes.
CudaKernel::Scratch CudaKernel::scratch_of(OrtKernelContext* context, size_t bytes) const {
  void* memory = nullptr;
  if (bytes) check(api_->KernelContext_GetScratchBuffer(context, memory_, bytes, &memory));
  return Scratch(memory, Release{allocator_.get()});
}

// Plans a call, and makes it with a workspace.
template <class Plan, class Problem, class Make, class Launch>
void CudaKernel::execute(OrtKernelContext* context, const Problem& problem, const Make& make,
                         const Launch& launch) const {
  Plan plan;
  char error[QM_ERROR_SIZE];
  if (make(&problem, &device_, &plan, error)) fail(error);
  const Scratch workspace = scratch_of(context, plan.workspace_bytes);
  if (launch(plan, workspace.get(), stream_of(context), error)) throw std::runtime_error(node_ + ": " + error);
}

class CudaMoE : public CudaKernel {
 public:
  CudaMoE(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool verify);
  void run(OrtKernelContext* context) const override;

 private:
  qm_cuda_problem problem_{};               // but for tokens and top_k
  std::shared_ptr<DeviceExperts> experts_;  // null: they are inputs on the device
  std::shared_ptr<Experts> trace_;          // of what is routed to them; null: none is wanted
  int layer_ = 0, traced_layer_ = 0;

  void trace(const qm_cuda_problem& problem, const void* topk_ids, cudaStream_t stream) const;
};

CudaMoE::CudaMoE(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool verify) : CudaKernel(op, api, info) {
  read_attributes(info, &problem_.moe);
  problem_.type = op.type();
  problem_.id_bytes = op.id_bytes();
  problem_.local_experts = count_experts(info, QuantMoE_w13, qm_cuda_row_bytes(&problem_.moe, 13));
  if (const int64_t experts = count_experts(info, QuantMoE_w2, qm_cuda_row_bytes(&problem_.moe, 2));
      experts != problem_.local_experts)
    fail("w13 has " + std::to_string(problem_.local_experts) + " experts and w2 " + std::to_string(experts) +
         ", expected the same number");
  query_device();
  qm_cuda_problem probe = problem_;
  probe.tokens = probe.top_k = 1;
  qm_cuda_plan plan;
  char error[QM_ERROR_SIZE];
  if (qm_cuda_plan_moe(&probe, &device_, &plan, error)) fail(error);
  check_packed(info, QuantMoE_w13, verify);
  check_packed(info, QuantMoE_w2, verify);
  Shape shape;
  const void* w13 = data_of(get_weight(info, QuantMoE_w13, shape));
  if (problem_.moe.w13.perm && qm_cuda_check_moe(&problem_, w13, nullptr, error)) fail(error);
  const OrtLogger* logger;  // each session has one: it says which session this is
  check(api->KernelInfo_GetLogger(info, &logger), "the session's logger");
  try {
    if (op.experts->trace != "") {
      ExpertSettings settings;
      settings.trace = op.experts->trace;
      trace_ = PerSession<Experts>::of(logger, settings);
      ExpertLayer layer{node_, problem_.local_experts, {}};
      for (const int i : {0, 1})
        layer.tensors[i].row_bytes = static_cast<int64_t>(qm_cuda_row_bytes(&problem_.moe, i ? 2 : 13));
      traced_layer_ = trace_->add(std::move(layer));
    }
    if (!op.experts->host()) return;
    experts_ = PerSession<DeviceExperts>::of(logger, *op.experts);
    layer_ = experts_->add(node_, problem_, w13, data_of(get_weight(info, QuantMoE_w2, shape)));
  } catch (const std::exception& e) {
    fail(e.what());
  }
}

// Waits for the device: ids are there, and the file is the host's.
void CudaMoE::trace(const qm_cuda_problem& problem, const void* topk_ids, cudaStream_t stream) const try {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const auto must = [](cudaError_t error) {
    if (error != cudaSuccess)
      throw std::runtime_error(std::string("quantmoe.trace: CUDA: ") + cudaGetErrorString(error));
  };
  must(cudaStreamIsCapturing(stream, &status));
  if (status != cudaStreamCaptureStatusNone)
    throw std::runtime_error("quantmoe.trace: a CUDA graph is captured, whose replays nothing sees; run without one");
  std::vector<char> ids(static_cast<size_t>(problem.tokens * problem.top_k * problem.id_bytes));
  must(cudaMemcpyAsync(ids.data(), topk_ids, ids.size(), cudaMemcpyDeviceToHost, stream));
  must(cudaStreamSynchronize(stream));
  trace_->start();
  if (problem.id_bytes == 8)
    trace_->trace(traced_layer_, reinterpret_cast<const int64_t*>(ids.data()), problem.tokens, problem.top_k);
  else
    trace_->trace(traced_layer_, reinterpret_cast<const int32_t*>(ids.data()), problem.tokens, problem.top_k);
} catch (const std::runtime_error& error) {
  throw std::runtime_error(node_ + ": " + error.what());
}

void CudaMoE::run(OrtKernelContext* context) const {
  const FreeSizes<int64_t> sizes = check_tokens(context);
  OrtValue* output = get_output(context, QuantMoE_output, sizes);
  qm_cuda_problem problem = problem_;
  problem.tokens = elements(*sizes.rest());
  problem.top_k = sizes.at('K');
  if (problem.tokens == 0) return;
  qm_cuda_tensors tensors{};
  tensors.hidden_states = data_of(get_input(context, QuantMoE_hidden_states));
  tensors.topk_ids = data_of(get_input(context, QuantMoE_topk_ids));
  tensors.topk_weights = static_cast<const float*>(data_of(get_input(context, QuantMoE_topk_weights)));
  if (trace_) trace(problem, tensors.topk_ids, static_cast<cudaStream_t>(stream_of(context)));
  std::string said;
  std::optional<DeviceExperts::Turn> turn;
  if (experts_) {
    try {
      turn.emplace(*experts_, static_cast<cudaStream_t>(stream_of(context)), problem.top_k, &said);
      turn->place(layer_, &problem, &tensors);
    } catch (const std::runtime_error& error) {
      throw std::runtime_error(node_ + ": " + error.what());
    }
  } else {
    tensors.w13 = data_of(get_input(context, QuantMoE_w13));
    tensors.w2 = data_of(get_input(context, QuantMoE_w2));
  }
  if (said != "") log_info(context, said);
  execute<qm_cuda_plan>(context, problem, qm_cuda_plan_moe,
                        [&](const qm_cuda_plan& plan, void* workspace, void* stream, char* error) {
                          tensors.output = data_of(output);
                          tensors.workspace = workspace;
                          return qm_cuda_launch(&problem, &plan, &tensors, stream, error);
                        });
}

class CudaLinear : public CudaKernel {
 public:
  CudaLinear(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool verify) : CudaKernel(op, api, info) {
    read_attributes(info, &problem_.linear);
    problem_.type = op.type();
    if (const int64_t rows = count_experts(info, QuantLinear_w, qm_cuda_linear_row_bytes(&problem_.linear)); rows != 1)
      fail("w has " + std::to_string(rows) + " rows, expected 1");
    query_device();
    qm_cuda_linear_problem probe = problem_;
    probe.rows = 1;
    qm_cuda_plan plan;
    char error[QM_ERROR_SIZE];
    if (qm_cuda_plan_linear(&probe, &device_, &plan, error)) fail(error);
    check_packed(info, QuantLinear_w, verify);
    Shape shape;
    const void* w = data_of(get_weight(info, QuantLinear_w, shape));
    if (problem_.linear.w.perm && qm_cuda_check_linear(&problem_, w, nullptr, error)) fail(error);
  }
  void run(OrtKernelContext* context) const override;

 private:
  qm_cuda_linear_problem problem_{};  // but for rows
};

void CudaLinear::run(OrtKernelContext* context) const {
  const FreeSizes<int64_t> sizes = check_inputs(context);
  const OrtValue* x = get_input(context, QuantLinear_x);
  qm_cuda_linear_problem problem = problem_;
  problem.rows = elements(*sizes.rest());
  OrtValue* y = get_output(context, QuantLinear_y, sizes);
  if (problem.rows == 0) return;
  execute<qm_cuda_plan>(context, problem, qm_cuda_plan_linear,
                        [&](const qm_cuda_plan& plan, void* workspace, void* stream, char* error) {
                          const qm_cuda_linear_tensors tensors{data_of(x), data_of(get_input(context, QuantLinear_w)),
                                                               data_of(y), workspace};
                          return qm_cuda_launch_linear(&problem, &plan, &tensors, stream, error);
                        });
}

class CudaRouting : public CudaKernel {
 public:
  CudaRouting(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool) : CudaKernel(op, api, info) {
    read_attributes(info, &problem_.routing);
    problem_.type = op.type();
    char error[QM_ERROR_SIZE];
    if (qm_cuda_validate_routing(&problem_, error)) fail(error);
  }
  void run(OrtKernelContext* context) const override;

 private:
  qm_cuda_routing_problem problem_{};  // but for tokens
};

void CudaRouting::run(OrtKernelContext* context) const {
  const FreeSizes<int64_t> sizes = check_inputs(context);
  qm_cuda_routing_problem problem = problem_;
  problem.tokens = elements(*sizes.rest());
  qm_cuda_routing_tensors tensors{};
#define QM_ONLY "ops/moe_routing.def"
#include "tensors.inc"
  char error[QM_ERROR_SIZE];
  if (qm_cuda_launch_routing(&problem, &tensors, stream_of(context), error))
    throw std::runtime_error(node_ + ": " + error);
}

class CudaRouter : public CudaKernel {
 public:
  CudaRouter(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool) : CudaKernel(op, api, info) {
    read_attributes(info, &problem_.router);
    problem_.type = op.type();
    query_device();
    qm_cuda_router_plan plan;
    char error[QM_ERROR_SIZE];
    if (qm_cuda_plan_router(&problem_, &device_, &plan, error)) fail(error);
    const qm_router& router = problem_.router;
    const Shape wanted{router.num_experts + router.shared_gate, router.hidden_size};
    if (const Shape found = shape_of(get_constant(info, MoERouter_weight)); found != wanted)
      fail("weight has shape " + text_of(found) + ", expected [num_experts + shared_gate, hidden_size] " +
           text_of(wanted));
  }
  void run(OrtKernelContext* context) const override;

 private:
  qm_cuda_router_problem problem_{};  // but for tokens
};

void CudaRouter::run(OrtKernelContext* context) const {
  const FreeSizes<int64_t> sizes = check_inputs(context);
  qm_cuda_router_problem problem = problem_;
  problem.tokens = elements(*sizes.rest());
  qm_cuda_router_tensors tensors{};
#define QM_ONLY "ops/moe_router.def"
#include "tensors.inc"
  execute<qm_cuda_router_plan>(context, problem, qm_cuda_plan_router,
                               [&](const qm_cuda_router_plan& plan, void* workspace, void* stream, char* error) {
                                 tensors.workspace = workspace;
                                 return qm_cuda_launch_router(&problem, &plan, &tensors, stream, error);
                               });
}

// What AllReduceAddRMSNorm has of AddRMSNorm: its inputs and outputs.
static_assert(AllReduceAddRMSNorm_x == AddRMSNorm_x && AllReduceAddRMSNorm_residual == AddRMSNorm_residual &&
              AllReduceAddRMSNorm_weight == AddRMSNorm_weight);

qm_cuda_norm_problem CudaKernel::read_norm(const OrtKernelInfo* info, const qm_norm& norm) const {
  const Shape weight = shape_of(get_constant(info, AddRMSNorm_weight));
  if (weight.size() != 1) fail("weight has shape " + text_of(weight) + ", expected [features]");
  const qm_cuda_norm_problem problem{norm, op_.type(), 0, weight[0]};
  char error[QM_ERROR_SIZE];
  if (qm_cuda_validate_norm(&problem, error)) fail(error);
  return problem;
}

// And the problem's rows.
qm_cuda_norm_tensors CudaKernel::norm_tensors(OrtKernelContext* context, qm_cuda_norm_problem* problem) const {
  const FreeSizes<int64_t> sizes = check_inputs(context);
  problem->rows = elements(*sizes.rest());
  qm_cuda_norm_tensors tensors{};
#define QM_ONLY "ops/add_rms_norm.def"
#include "tensors.inc"
  return tensors;
}

class CudaNorm : public CudaKernel {
 public:
  CudaNorm(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool) : CudaKernel(op, api, info) {
    qm_norm norm;
    read_attributes(info, &norm);
    problem_ = read_norm(info, norm);
  }
  void run(OrtKernelContext* context) const override {
    qm_cuda_norm_problem problem = problem_;
    const qm_cuda_norm_tensors tensors = norm_tensors(context, &problem);
    char error[QM_ERROR_SIZE];
    if (qm_cuda_launch_norm(&problem, &tensors, stream_of(context), error))
      throw std::runtime_error(node_ + ": " + error);
  }

 private:
  qm_cuda_norm_problem problem_{};  // but for rows
};

class CudaRows : public CudaKernel {
 public:
  CudaRows(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool) : CudaKernel(op, api, info) {
    read_attributes(info, &problem_.node);
    char error[QM_ERROR_SIZE];
    if (qm_cuda_validate_rows(&problem_, error)) fail(error);
  }
  void run(OrtKernelContext* context) const override;

 private:
  qm_cuda_rows_problem problem_{};  // but for the sizes
};

void CudaRows::run(OrtKernelContext* context) const {
  const FreeSizes<int64_t> sizes = check_inputs(context);
  qm_cuda_rows_problem problem = problem_;
  problem.batch = sizes.at('B');
  problem.tokens = sizes.at('S');
  problem.past_slots = sizes.at('P');
  problem.length = sizes.at('L');
  const qm_cuda_rows_tensors tensors{static_cast<const int64_t*>(data_of(get_input(context, TokenRows_attention_mask))),
                                     static_cast<int32_t*>(data_of(get_output(context, TokenRows_rows, sizes))),
                                     static_cast<int64_t*>(data_of(get_output(context, TokenRows_last, sizes)))};
  char error[QM_ERROR_SIZE];
  if (qm_cuda_launch_rows(&problem, &tensors, stream_of(context), error))
    throw std::runtime_error(node_ + ": " + error);
}

class CudaAttention : public CudaKernel {
 public:
  CudaAttention(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool) : CudaKernel(op, api, info) {
    read_attributes(info, &problem_.attention);
    problem_.type = op.type();
    query_device();
    qm_cuda_attention_plan plan;
    char error[QM_ERROR_SIZE];
    if (qm_cuda_plan_attention(&problem_, &device_, &plan, error)) fail(error);
    check_caches(problem_.attention);
  }
  void run(OrtKernelContext* context) const override;

 private:
  qm_cuda_attention_problem problem_{};  // but for the shapes
};

void CudaAttention::run(OrtKernelContext* context) const {
  const FreeSizes<int64_t> sizes = check_inputs(context);
  const auto input = [&](int32_t index) { return data_of(get_input(context, static_cast<size_t>(index))); };
  const auto floats = [&](int32_t index) { return static_cast<const float*>(input(index)); };
  qm_cuda_attention_problem problem = problem_;
  problem.batch = sizes.at('B');
  problem.tokens = sizes.at('S');
  problem.past_slots = sizes.at('P');
  problem.slots = std::max(problem.past_slots, sizes.at('L'));
  qm_cuda_attention_tensors tensors{};
  tensors.qkv = input(CachedAttention_qkv);
  tensors.past_key = input(CachedAttention_past_key);
  tensors.past_value = input(CachedAttention_past_value);
  tensors.rows = static_cast<const int32_t*>(input(CachedAttention_rows));
  tensors.cos = floats(CachedAttention_cos);
  tensors.sin = floats(CachedAttention_sin);
  tensors.q_norm = floats(CachedAttention_q_norm);
  tensors.k_norm = floats(CachedAttention_k_norm);
  tensors.sinks = floats(CachedAttention_sinks);
  tensors.output = data_of(get_output(context, CachedAttention_output, sizes));
  tensors.present_key = data_of(get_present(context, CachedAttention_present_key, sizes));
  tensors.present_value = data_of(get_present(context, CachedAttention_present_value, sizes));
  execute<qm_cuda_attention_plan>(context, problem, qm_cuda_plan_attention,
                                  [&](const qm_cuda_attention_plan& plan, void* workspace, void* stream, char* error) {
                                    tensors.workspace = workspace;
                                    return qm_cuda_launch_attention(&problem, &plan, &tensors, stream, error);
                                  });
}

class CudaConv : public CudaKernel {
 public:
  CudaConv(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool) : CudaKernel(op, api, info) {
    read_attributes(info, &problem_.conv);
    problem_.type = op.type();
    char error[QM_ERROR_SIZE];
    if (qm_cuda_validate_conv(&problem_, error)) fail(error);
  }
  void run(OrtKernelContext* context) const override;

 private:
  qm_cuda_conv_problem problem_{};  // but for the sizes
};

void CudaConv::run(OrtKernelContext* context) const {
  qm_cuda_conv_problem problem = problem_;
  qm_cuda_conv_tensors tensors{};
  read_stateful(context, problem.conv, problem, tensors);
  char error[QM_ERROR_SIZE];
  if (qm_cuda_launch_conv(&problem, &tensors, stream_of(context), error))
    throw std::runtime_error(node_ + ": " + error);
}

// GatedDelta or StateSpace. kNode: the attributes in the problem.
template <auto kNode, class Problem, class Plan, class Tensors,
          int (*kPlan)(const Problem*, const qm_cuda_device*, Plan*, char*),
          int (*kLaunch)(const Problem*, const Plan*, const Tensors*, void*, char*)>
class CudaStateful : public CudaKernel {
 public:
  CudaStateful(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool) : CudaKernel(op, api, info) {
    read_attributes(info, &(problem_.*kNode));
    problem_.type = op.type();
    query_device();
    Plan plan;
    char error[QM_ERROR_SIZE];
    if (kPlan(&problem_, &device_, &plan, error)) fail(error);
  }
  void run(OrtKernelContext* context) const override {
    Problem problem = problem_;
    Tensors tensors{};
    read_stateful(context, problem.*kNode, problem, tensors);
    execute<Plan>(context, problem, kPlan, [&](const Plan& plan, void* workspace, void* stream, char* error) {
      tensors.workspace = workspace;
      return kLaunch(&problem, &plan, &tensors, stream, error);
    });
  }

 private:
  Problem problem_{};  // but for the sizes
};
using CudaDelta = CudaStateful<&qm_cuda_delta_problem::delta, qm_cuda_delta_problem, qm_cuda_delta_plan,
                               qm_cuda_delta_tensors, qm_cuda_plan_delta, qm_cuda_launch_delta>;
using CudaSpace = CudaStateful<&qm_cuda_space_problem::space, qm_cuda_space_problem, qm_cuda_space_plan,
                               qm_cuda_space_tensors, qm_cuda_plan_space, qm_cuda_launch_space>;

// A node that needs the other ranks.
class CudaRank : public CudaKernel {
 protected:
  using CudaKernel::CudaKernel;
  template <class Node>
  void join(const OrtKernelInfo* info, const Node& node);
  template <class Call>
  void enqueue(const Shape& x, cudaStream_t stream, const Call& call) const;

 private:
  std::shared_ptr<Communicator> communicator_;
};

template <class Node>
void CudaRank::join(const OrtKernelInfo* info, const Node& node) {
  const OrtLogger* logger;  // each session has one: it says which session this is
  check(api_->KernelInfo_GetLogger(info, &logger), "the session's logger");
  const Place place = place_in_group(node, "to rank 0's NCCL id in hex");
  try {
    communicator_ = PerSession<Communicator>::of(logger, DevicePlace{place, device_ordinal()});
  } catch (const std::exception& e) {
    fail(e.what());
  }
  check_place(communicator_->place(), place);
}

template <class Call>
void CudaRank::enqueue(const Shape& x, cudaStream_t stream, const Call& call) const {
  try {
    communicator_->agree(node_, text_of(x), stream);
    call(*communicator_);
  } catch (const std::runtime_error& error) {
    communicator_->fail_all(node_ + ": " + error.what());
    throw std::runtime_error(node_ + ": " + error.what());
  }
}

class CudaReduce : public CudaRank {
 public:
  CudaReduce(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool) : CudaRank(op, api, info) {
    const auto reduce = read_checked<qm_reduce>(info, check_reduce);
    join(info, reduce);
  }
  void run(OrtKernelContext* context) const override {
    const OrtValue* x = get_input(context, AllReduce_x);
    const Shape shape = shape_of(x);
    OrtValue* y = get_output(context, 0, shape);
    if (elements(shape) == 0) return;
    const auto stream = static_cast<cudaStream_t>(stream_of(context));
    enqueue(shape, stream,
            [&](const Communicator& all) { all.reduce(data_of(x), data_of(y), elements(shape), op_.type(), stream); });
  }
};

class CudaReduceNorm : public CudaRank {
 public:
  CudaReduceNorm(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool) : CudaRank(op, api, info) {
    const auto node = read_checked<qm_reduce_norm>(info, check_reduce_norm);
    problem_ = read_norm(info, norm_of(node));
    join(info, node);
  }
  void run(OrtKernelContext* context) const override {
    qm_cuda_norm_problem problem = problem_;
    const qm_cuda_norm_tensors tensors = norm_tensors(context, &problem);
    if (problem.rows == 0) return;
    const auto stream = static_cast<cudaStream_t>(stream_of(context));
    enqueue({problem.rows, problem.columns}, stream,
            [&](const Communicator& all) { all.reduce(problem, tensors, stream); });
  }

 private:
  qm_cuda_norm_problem problem_{};  // but for rows
};

class CudaGather : public CudaRank {
 public:
  CudaGather(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool) : CudaRank(op, api, info) {
    gather_ = read_checked<qm_gather>(info, check_gather);
    join(info, gather_);
  }
  void run(OrtKernelContext* context) const override;

 private:
  qm_gather gather_{};
};

void CudaGather::run(OrtKernelContext* context) const {
  const OrtValue* x = get_input(context, AllGather_x);
  OrtValue* y = get_output(context, AllGather_y, check_inputs(context));
  const Shape shape = shape_of(x);
  const int64_t count = elements(shape);
  if (count == 0) return;
  const auto stream = static_cast<cudaStream_t>(stream_of(context));
  const int64_t rows = gather_.axis < 0 ? count / shape.back() : 1;
  const size_t size = op_.type() == QM_F32 ? 4 : 2, all_bytes = size * static_cast<size_t>(count * gather_.world);
  const Scratch scratch = scratch_of(context, rows > 1 ? all_bytes : 0);
  enqueue(shape, stream, [&](const Communicator& all) {
    all.gather(data_of(x), data_of(y), count, rows, op_.type(), scratch.get(), stream);
  });
}

class CudaScatter : public CudaRank {
 public:
  CudaScatter(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool) : CudaRank(op, api, info) {
    scatter_ = read_checked<qm_scatter>(info, check_scatter);
    join(info, scatter_);
  }
  void run(OrtKernelContext* context) const override {
    const OrtValue* x = get_input(context, ReduceScatter_x);
    OrtValue* y = get_output(context, ReduceScatter_y, check_inputs(context));
    const int64_t own = elements(shape_of(x)) / scatter_.world;
    if (own == 0) return;
    const auto stream = static_cast<cudaStream_t>(stream_of(context));
    enqueue(shape_of(x), stream,
            [&](const Communicator& all) { all.scatter(data_of(x), data_of(y), own, op_.type(), stream); });
  }

 private:
  qm_scatter scatter_{};
};

template <class T, bool verify>
Kernel* make_node(const Op& op, const OrtApi* api, const OrtKernelInfo* info) {
  return new T(op, api, info, verify);
}

template <bool verify>
void add_operators(const OrtApi* api, std::deque<Op>& ops) {
  constexpr auto kId32 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, kId64 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
  constexpr auto kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  constexpr const char* kProvider = "CUDAExecutionProvider";
  for (auto type : {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16}) {
    for (auto id_type : {kId32, kId64})
      ops.emplace_back(api, kProvider, "QuantMoE", type, id_type, make_node<CudaMoE, verify>);
    ops.emplace_back(api, kProvider, "QuantLinear", type, kId32, make_node<CudaLinear, verify>);
    ops.emplace_back(api, kProvider, "MoERouting", type, kId32, make_node<CudaRouting, verify>);
    ops.emplace_back(api, kProvider, "MoERouter", type, kId32, make_node<CudaRouter, verify>);
    ops.emplace_back(api, kProvider, "AddRMSNorm", type, kId32, make_node<CudaNorm, verify>);
    for (auto cache : {type, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8}) {
      ops.emplace_back(api, kProvider, "TokenRows", type, cache, make_node<CudaRows, verify>);
      ops.emplace_back(api, kProvider, "CachedAttention", type, cache, make_node<CudaAttention, verify>);
    }
    ops.emplace_back(api, kProvider, "AllReduce", type, kId32, make_node<CudaReduce, verify>);
    ops.emplace_back(api, kProvider, "AllReduceAddRMSNorm", type, kId32, make_node<CudaReduceNorm, verify>);
    ops.emplace_back(api, kProvider, "AllGather", type, kId32, make_node<CudaGather, verify>);
    ops.emplace_back(api, kProvider, "ReduceScatter", type, kId32, make_node<CudaScatter, verify>);
    ops.emplace_back(api, kProvider, "CausalConv", type, kId32, make_node<CudaConv, verify>);
    ops.emplace_back(api, kProvider, "GatedDelta", type, kId32, make_node<CudaDelta, verify>);
    ops.emplace_back(api, kProvider, "StateSpace", type, kId32, make_node<CudaSpace, verify>);
  }
  ops.emplace_back(api, kProvider, "MoERouting", kFloat, kId32, make_node<CudaRouting, verify>);
}

}  // namespace
}  // namespace quantmoe

extern "C" QM_API OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  return quantmoe::register_ops(
      options, base, "CUDA provider", [](const OrtApi* api, const OrtSessionOptions* options) {
        return quantmoe::wants_verify(api, options) ? quantmoe::add_operators<true> : quantmoe::add_operators<false>;
      });
}
