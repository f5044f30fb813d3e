// C ABI of the CUDA kernels: call -> plan -> launch, by an operator's name. It has no engine and no global state.
// Functions neither allocate nor synchronize, unless their comment says so. A plan's launch is a fixed sequence of
// kernels, so a CUDA graph can capture it.
//
// The plan is a pure function of node, call and device, without a CUDA call. An engine makes it when shapes become
// known, and keeps it. Tests make it without a GPU.
//
// A launch's first kernel may start while the kernel before it in the stream ends (programmatic dependent launch).
// Until the earlier kernel has ended, it writes nothing and reads only packed weights, which are constants. A call
// writes slots of a cache before its first product starts.
#pragma once
#include "quantmoe/quant_moe.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  int32_t sm;               // compute capability, 90 for 9.0
  int32_t multiprocessors;  // 132 on an H200. 0: the workspace is large enough for any number; do not launch the plan
  int32_t shared_bytes;     // shared memory a multiprocessor has for blocks, 233472 on sm_90
} qm_cuda_device;

#define QM_CUDA_HOST_TOKENS 8
#define QM_CUDA_HOST_PAIRS 128
// The host's part of a call, with a host_share above 0: page-locked memory that both read and write, zeros at first. A
// session's layers share it, because their calls come one after the other. The device writes a request, `asked` last. A
// thread of the host waits for `asked`, multiplies, and writes y, then `answered`. The call's last kernel waits for
// `answered`. No CUDA function is called in between, so replays of a captured graph ask as launches do.
//
// After this come float x[QM_CUDA_HOST_TOKENS, H], the hidden_states, and y of the same shape, a token's sum of the
// host's pairs. H is the layer's hidden_size.
typedef struct {
  uint64_t asked;  // differs from the numbers of the layer's last 2^32 calls; 0: nothing yet
  int32_t layer, tokens, top_k;
  int32_t unused[11];
  uint64_t answered;  // the same number
  int32_t unused_too[14];
  float weights[QM_CUDA_HOST_PAIRS];  // topk_weights
  int32_t ids[QM_CUDA_HOST_PAIRS];    // topk_ids of the host's pairs, -1 for other pairs
} qm_cuda_host;

// QuantMoE with experts outside the device's memory: w13 and w2 are host memory that the device can read. Launches that
// share any of this memory, which is 256-byte aligned, run one after the other.
typedef struct {
  // A cache of experts in device memory. A slot keeps an expert. A call that needs more experts fills staging. 0 slots:
  // no cache.
  int32_t slots, staging;
  // host_share: of 256 experts that miss, the host multiplies so many (qm_cuda_host), rounded down in each call. The
  // others are copied. 0: no host is asked. host_layer: the layer in a request. A call that asks has at
  // most QM_CUDA_HOST_TOKENS tokens and QM_CUDA_HOST_PAIRS pairs.
  int32_t host_share, host_layer;
  void* slot_memory;     // slots * plan.slot_bytes; contents survive
  void* staging_memory;  // staging * plan.slot_bytes; contents need not survive, layers may share them
  void* cache_state;     // plan.state_bytes; zeros at first
  // NULL, or the addresses of each expert's row of w13, then of w2, [2, local_experts], in place of w13 and w2. Only
  // experts are read that the call needs and no slot has. The array and the addresses are 16-byte aligned.
  const void* const* rows;
  qm_cuda_host* host;  // its address on the device
} qm_cuda_experts;

// Ranks whose GPUs write to each other's memory. Each rank has a box in its GPU's memory, which the others write to.
// All ranks make equal calls in one order, one at a time. A call waits on the GPU for the other ranks' calls.
#define QM_CUDA_PEERS 8
#define QM_CUDA_MOST_BLOCKS 256
#define QM_CUDA_SUM_COLUMNS 8192
typedef struct {
  int32_t rank, world;         // 2 to QM_CUDA_PEERS
  int32_t blocks;              // most blocks of a long sum, equal in all ranks; all of them run at once
  void* boxes[QM_CUDA_PEERS];  // each rank's, as this rank's GPU reaches it
} qm_cuda_peers;
// Allocates a rank's box, which qm_cuda_free frees. It must return in all ranks before any rank makes another call.
QM_API int qm_cuda_allocate_box(int32_t world, void** box, char* err);

// Fills the description of a CUDA device. It asks the driver.
QM_API int qm_cuda_query(int ordinal, qm_cuda_device*, char* err);
#define QM_CUDA_PLAN_WORDS 264
typedef struct {
  uint64_t workspace_bytes;
  uint64_t slot_bytes, state_bytes;    // of qm_cuda_experts
  int32_t chosen[QM_CUDA_PLAN_WORDS];  // for the kernels, for example LayerPlan in src/cuda/moe/layer_plan.h
} qm_cuda_node_plan;
typedef struct {
  // As qm_call's, with 16-byte aligned data. present may be past's memory, and AddRMSNorm's y may be x's. An input with
  // a QM_CONSTANT line is constant, as packed weights are. One with a QM_HOST_SIZE line is in host memory.
  const qm_tensor *inputs, *outputs;
  void* workspace;                 // plan.workspace_bytes, 256-byte aligned; contents need not survive between calls
  void* stream;                    // a cudaStream_t
  const qm_cuda_experts* experts;  // QuantMoE; NULL: all rows are in the device's memory
  const qm_cuda_peers* peers;      // operators of ranks
} qm_cuda_call;
// Reads types and shapes of the inputs, and numbers of experts, not their data. Of a packed input, words of a row that
// are below 0 are not compared. QM_INVALID: attributes or shapes contradict each other. QM_UNSUPPORTED: something that
// no kernel takes; `err` names what there is.
//
// - T is QM_F16 or QM_BF16; MoERouting takes any type.
// - CachedAttention: keys and values have 64, 96, 128, 192 or 256 features, or keys 192 and values 128. With a
//   key_split of 288, keys have 576 and values 512, without norms. cache_format is none, int8 or, from compute
//   capability 9.0 on, fp8_e4m3. The input `selected` needs a key_split, or 128 or 256 features of keys and of values.
//   It has one list, or one for each head of keys.
// - SparseIndexer: a head_size of 64 or 128, past_keys of query's type, up to 128 heads. Each group of several heads
//   counts as the next multiple of 16.
// - CausalConv: an even number of channels, even x_size and x_offset, width 2 to 4.
// - GatedDelta: head sizes 64 and 128.
// - HyperConnection: up to 5 streams, a hidden_size that is a multiple of 8.
// - StateSpace: a state_size of 64, 128 or 256, a head_size that is a multiple of 32, a norm_size up to 16384.
// - Ranks: the plan is empty.
QM_API int qm_cuda_plan_node(const char* op, const void* node, const qm_cuda_call*, const qm_cuda_device*,
                             qm_cuda_node_plan*, char* err);
// Checks what launches trust. QM_INVALID: the plan names a kernel that is not compiled, which launches refuse, too. Or
// an act-order in a packed input with data does not have each feature once. Launches clamp what they read of it, so a
// wrong order only gives wrong results. With an act-order and data, the function copies the orders to the host and
// waits, so the stream must not be captured. Otherwise it makes no CUDA call.
QM_API int qm_cuda_check_node(const char* op, const void* node, const qm_cuda_node_plan*, const qm_cuda_call*,
                              char* err);
// Enqueues on the call's stream. `rows` stays on the device, so a launch that a CUDA graph captured serves every
// position.
//
// - A row of `rows` that asks for tokens or slots that are not there stores nothing, and its output is NaN, its lists
// -1.
// - QuantMoE: ids outside [expert_offset, expert_offset + local_experts) contribute zero.
// - CachedAttention with a block_size: a row is a request. If there are as many tokens as requests, each has one.
// - CachedAttention with `selected`: a list that the operator does not allow makes its token's output undefined. A row
//   of no more tokens than a list has the bytes that it has without `selected`.
// - SparseIndexer: scores are f32 sums of exact products, in any order. Lists are exact for these scores.
// - MoERouting gives what quant_moe.h says, except the last bits of the weights.
// - MoERouter: logits are f32 sums of exact products. Their order depends on the number of tokens.
// - AllReduce: y = the sum of all ranks' x, in f32 in the order of the ranks, rounded once. All ranks have equal bytes.
// - AllReduceAddRMSNorm of this sum; tensors do not overlap. The residual needs only the rank's own rows,
//   r % world == rank. With more than a few rows, `sum` gets only these rows. QM_UNSUPPORTED: the columns are no
//   multiple of 8, or more than QM_CUDA_SUM_COLUMNS.
// - AllGather: y = all ranks' x, row after row. NaNs may have other bits.
QM_API int qm_cuda_launch_node(const char* op, const void* node, const qm_cuda_node_plan*, const qm_cuda_call*,
                               char* err);

#define QM_CUDA_CHOICE_WORKSPACE 21792  // bytes of a row
// Chooses the next token of each row from logits on the device, and writes the inputs of the next run of one token a
// row. Equal logits and an equal random number give an equal token.
typedef struct {
  int32_t type;                            // qm_type of the logits: QM_F32, QM_F16 or QM_BF16
  int32_t batch, vocabulary;               // up to 65,535 and 4,194,304
  int32_t top_k, ngram;                    // 0: all tokens, and no n-gram is forbidden
  double temperature, top_p, min_p;        // temperature 0: the likeliest token
  double repetition, presence, frequency;  // penalties; 1, 0, 0: none
  int64_t capacity, longest;               // columns of mask, and of history
  int64_t column, column_before;           // of mask: the next run's tokens, and the last run's; -1: none

  const void* logits;        // [batch, vocabulary]
  const double* uniform;     // [batch], from 0 to below 1; may be the host's memory, as past and chosen
  const int32_t* past;       // [batch]: tokens of the text so far, all in the cache; -1: the row has ended
  const double* bias;        // [vocabulary], added to logits; NULL: none
  const uint32_t* allowed;   // [batch, (vocabulary + 31) / 32]: bits of tokens that may come; NULL: all may
  int32_t* counts;           // [batch, vocabulary]: twice how often a token was chosen, and 1 if the text has it; NULL
  int32_t* history;          // [batch, longest]: the text, for ngram; NULL
  int64_t *ids, *positions;  // [batch]: inputs of the next run
  int64_t* mask;             // [batch, capacity], of ones where a row has tokens; NULL: none of these three is written
  int32_t* chosen;           // [batch]: the token; -1: logits are not finite; -2: no token is left
  void* workspace;           // batch * QM_CUDA_CHOICE_WORKSPACE bytes, 256-byte aligned
  float* scores;             // [batch, vocabulary], written with bias, allowed, counts or history
} qm_cuda_choice;
QM_API int qm_cuda_launch_choice(const qm_cuda_choice*, void* stream, char* err);
// For the program around an engine: a stream, device memory, and page-locked memory that kernels read and write.
// qm_cuda_copy copies `height` pieces of `width` bytes, from and to either memory. qm_cuda_wait waits for the stream.
QM_API int qm_cuda_open_stream(void** stream, char* err);
QM_API int qm_cuda_allocate(size_t bytes, void** memory, char* err);
QM_API int qm_cuda_free(void* memory, char* err);
QM_API int qm_cuda_host_memory(size_t bytes, void** memory, char* err);
QM_API int qm_cuda_copy(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                        void* stream, char* err);
QM_API int qm_cuda_wait(void* stream, char* err);

#ifdef __cplusplus
}
#endif
