// C ABI of the CUDA kernels: problem -> plan -> launch, three plain structs. It has no engine and no global state.
// Functions neither allocate nor synchronize, unless their comment says so. A plan's launch is a fixed sequence of
// kernels, so a CUDA graph can capture it.
//
// The plan is a pure function of problem and device, without a CUDA call. An engine makes it when shapes become known,
// and keeps it. Tests make it without a GPU.
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

typedef struct {
  qm_moe moe;
  int32_t type;      // qm_type of hidden_states and output: QM_F16 or QM_BF16
  int32_t id_bytes;  // 4 or 8: width of topk_ids
  int64_t tokens, top_k, local_experts;
  // A cache of experts in device memory. A slot keeps an expert. A call that needs more experts fills staging. 0 slots:
  // no cache, and experts are read from w13 and w2.
  int32_t slots, staging;
  // host_share: of 256 experts that miss, the host multiplies so many (qm_cuda_host), rounded down in each call. The
  // others are copied. 0: no host is asked. host_layer: the layer in a request. A call that asks has at
  // most QM_CUDA_HOST_TOKENS tokens and QM_CUDA_HOST_PAIRS pairs.
  int32_t host_share, host_layer;
} qm_cuda_problem;
#define QM_CUDA_HOST_TOKENS 8
#define QM_CUDA_HOST_PAIRS 128

// Which kernels a launch runs.
typedef enum {
  QM_CUDA_DECODE = 0,  // gate_up reads topk_ids itself; down owns output tiles and sums the experts in registers
  QM_CUDA_STREAM = 1,  // route, gate_up, down, combine on mma.sync
  QM_CUDA_WGMMA = 2,   // route, gate_up, down, combine on wgmma (sm_90a)
  // e4m3 times e4m3 (sm_90a): route, quantize, gate_up, which quantizes h or is followed by a quantize, down, combine
  QM_CUDA_FP8 = 3,
  QM_CUDA_DENSE = 4,  // a linear of more than a few rows on wgmma (sm_90a): one kernel
} qm_cuda_path;

// What a step does. x: the call's activations, or what the step before made of them.
typedef enum {
  QM_CUDA_ROUND = 0,            // x in the values of an activation format, or as codes
  QM_CUDA_GATHER = 1,           // x in act-order, a row a pair
  QM_CUDA_ROUTE = 2,            // the lists of tiles and of sorted pairs; x in the order in which wgmma reads it
  QM_CUDA_QUANTIZE = 3,         // x as e4m3 codes, in the order of sorted pairs
  QM_CUDA_GATE_UP = 4,          // a product
  QM_CUDA_ROUND_HIDDEN = 5,     // as QM_CUDA_ROUND, between the products
  QM_CUDA_QUANTIZE_HIDDEN = 6,  // as QM_CUDA_QUANTIZE, between the products
  QM_CUDA_DOWN = 7,             // a product
  QM_CUDA_COMBINE = 8,          // the sum of a token's experts
  QM_CUDA_LINEAR = 9,           // a linear's product
  QM_CUDA_RESOLVE = 10,         // which experts are in a slot, which are to be copied, and where to
  QM_CUDA_FILL = 11,            // the copies
  QM_CUDA_ADD_HOST = 12,        // adds what the host has multiplied, for which it waits
} qm_cuda_step_kind;
#define QM_CUDA_MOST_STEPS 10
#define QM_CUDA_CALLERS UINT64_MAX  // in place of an offset: the caller's activations, or output

// One kernel.
typedef struct {
  int32_t kind;  // qm_cuda_step_kind
  int32_t grid, grid_y, block, block_y, shared_bytes;
  int32_t cluster;    // blocks of a cluster; in a product they share one output tile, each with a part of K
  int32_t dependent;  // may start while the kernel before it in the stream still runs
  // A product's row of src/cuda/instances/instances.inc. panels: 16-row panels that a warp holds at once (wgmma and
  // dense: a block). n_tiles: 8-token tiles that a warp holds at once (dense: a tile). stages: of a warp's ring of
  // weights; 2 stages have two units of K each.
  int32_t panels, n_tiles, stages;
  // Warps that split K; the others take other panels. 0: a block's warps share all its units of K. wgmma: the parts of
  // K that blocks share, also in the step that adds them up.
  int32_t warps_k;
  int32_t packed;    // mma.sync: tokens are codes and scales, e4m3 (sm_89 and later) or nvfp4 (sm_120a). In a step that
                     // rounds: it makes them
  int32_t weighted;  // multiplies by the router's weight
  int32_t ordered;   // QM_CUDA_ROUTE: every run has one order of tiles
  // Rows of tokens or pairs, and their columns of 16 bits.
  int32_t in_rows, in_columns, out_rows, out_columns;
  uint64_t in, out;  // byte offsets into the workspace, or QM_CUDA_CALLERS
} qm_cuda_step;

typedef struct {
  int32_t path, step_count;
  qm_cuda_step steps[QM_CUDA_MOST_STEPS];
  int32_t max_tiles, down_max_tiles;  // capacities of the lists of tiles
  // Byte offsets into the workspace. down_tiles equals tiles if both products read one list. A cache has `where`, the
  // address of each expert's row of w13, then of w2, and `copies`, the number of copies, then the copies. A host has
  // `kept`: the number of qm_cuda_request::asked, and 16 bytes later int32 ids [tokens, top_k] of the device's pairs.
  uint64_t tiles, down_tiles, sorted_pairs, positions, where, copies, kept, workspace_bytes;
} qm_cuda_plan;

// The host's part of a call, with problem.host_share > 0: page-locked memory that both read and write. A session's
// layers share it, because their calls come one after the other. The device writes a request, `asked` last. A thread of
// the host waits for `asked`, multiplies, and writes y, then `answered`. The call's last kernel waits for `answered`.
// No CUDA function is called in between, so replays of a captured graph ask as launches do.
typedef struct {
  uint64_t asked;  // differs from the numbers of the layer's last 2^32 calls; 0: nothing yet
  int32_t layer, tokens, top_k;
  int32_t unused[11];
  uint64_t answered;  // the same number
  int32_t unused_too[14];
} qm_cuda_request;
typedef struct {
  qm_cuda_request* request;
  float* x;        // [QM_CUDA_HOST_TOKENS, H]: hidden_states
  float* weights;  // [QM_CUDA_HOST_PAIRS]: topk_weights
  int32_t* ids;    // [QM_CUDA_HOST_PAIRS]: topk_ids of the host's pairs, -1 for other pairs
  float* y;        // [QM_CUDA_HOST_TOKENS, H]: a token's sum of the host's pairs
} qm_cuda_host;

typedef struct {
  const void* hidden_states;  // [tokens, H]
  const void* topk_ids;       // [tokens, top_k]
  const float* topk_weights;  // [tokens, top_k]
  const void* w13;            // [local_experts, row], 16-byte aligned
  const void* w2;
  void* output;     // [tokens, H]
  void* workspace;  // plan.workspace_bytes, 256-byte aligned; contents need not survive between calls
  // A cache has these, with problem.slots > 0, 256-byte aligned. w13 and w2 are then host memory that the device can
  // read. Launches that share any of these run one after the other.
  void* slots;        // problem.slots * qm_cuda_slot_bytes; contents survive: the row of w13, then w2's at 256 bytes
  void* staging;      // problem.staging * qm_cuda_slot_bytes; contents need not survive, layers may share them
  void* cache_state;  // qm_cuda_cache_state_bytes; zeros at first, except for experts that have a slot by then
  // NULL, or the addresses of each expert's row of w13, then of w2, [2, local_experts], in place of w13 and w2. Only
  // experts are read that the call needs and no slot has. The array and the addresses are 16-byte aligned.
  const void* const* rows;
  qm_cuda_host host;  // addresses of the device
} qm_cuda_tensors;

// The beginning of a cache_state: experts that calls needed, each once a call.
typedef struct {
  uint64_t hits, misses;  // with a slot, without
  uint64_t staged;        // misses that were copied to staging
  uint64_t not_copied;    // misses that were read in host memory
  uint64_t computed;      // misses that the host multiplied
} qm_cuda_cache_counts;
// The offset in a cache_state of int32[local_experts], each expert's slot plus 1, or 0. Then comes int32[slots], each
// slot's expert plus 1, or 0.
#define QM_CUDA_SLOT_OF (sizeof(qm_cuda_cache_counts) + 8)

// Fills the description of a CUDA device. It asks the driver.
QM_API int qm_cuda_query(int ordinal, qm_cuda_device*, char* err);
// Bytes of one expert's packed row, by FORMAT.md section 3. 0: the attributes are not valid. projection: 13 or 2.
QM_API size_t qm_cuda_row_bytes(const qm_moe*, int projection);
// Bytes of a slot: an expert's rows of w13 and w2. 0: the attributes are not valid.
QM_API size_t qm_cuda_slot_bytes(const qm_moe*);
QM_API size_t qm_cuda_cache_state_bytes(int64_t local_experts, int32_t slots);
// QM_INVALID: attributes contradict each other. QM_UNSUPPORTED: there is no kernel; `err` names what there is.
QM_API int qm_cuda_plan_moe(const qm_cuda_problem*, const qm_cuda_device*, qm_cuda_plan*, char* err);
// QM_INVALID: the plan names a kernel that is not compiled. qm_cuda_launch refuses it, too. No CUDA call.
QM_API int qm_cuda_check_plan(const qm_cuda_problem*, const qm_cuda_plan*, char* err);
// QM_INVALID: an act-order in w13 (device memory) does not have each feature once, or CUDA or memory fails. Launches
// clamp what they read of it, so a wrong order only gives wrong results. The function copies the orders to the host and
// waits, so the stream must not be captured.
QM_API int qm_cuda_check_moe(const qm_cuda_problem*, const void* w13, void* stream, char* err);
// Enqueues on `stream`, a cudaStream_t. Ids outside [expert_offset, expert_offset + local_experts) contribute zero.
QM_API int qm_cuda_launch(const qm_cuda_problem*, const qm_cuda_plan*, const qm_cuda_tensors*, void* stream, char* err);

// QuantLinear: one kernel. If the weights ask for it, another kernel first rounds x or brings it into act-order. x and
// y are 16-byte aligned.
typedef struct {
  qm_linear linear;
  int32_t type;  // qm_type of x and y: QM_F16 or QM_BF16
  int64_t rows;
} qm_cuda_linear_problem;
typedef struct {
  const void* x;  // [rows, in_features]
  const void* w;  // [1, row], 16-byte aligned
  void* y;        // [rows, out_features]
  void* workspace;
} qm_cuda_linear_tensors;
QM_API size_t qm_cuda_linear_row_bytes(const qm_linear*);
QM_API int qm_cuda_plan_linear(const qm_cuda_linear_problem*, const qm_cuda_device*, qm_cuda_plan*, char* err);
QM_API int qm_cuda_check_plan_linear(const qm_cuda_linear_problem*, const qm_cuda_plan*, char* err);
QM_API int qm_cuda_check_linear(const qm_cuda_linear_problem*, const void* w, void* stream, char* err);
QM_API int qm_cuda_launch_linear(const qm_cuda_linear_problem*, const qm_cuda_plan*, const qm_cuda_linear_tensors*,
                                 void* stream, char* err);

// CachedAttention. `rows` stays on the device, so a plan depends on shapes alone. A launch that a CUDA graph captured
// serves every position. A row that asks for tokens or slots that are not there stores nothing, and its output is NaN.
// With a block_size a row is a request. If there are as many tokens as requests, each request has one.
typedef struct {
  qm_attention attention;
  int32_t type;  // qm_type of qkv, output and, if cache_format is none, the caches: QM_F16 or QM_BF16
  int64_t batch, tokens, past_slots, slots;  // B, S, P and max(P, L); with a block_size R, S and twice M * block_size
  int64_t blocks, positions;                 // with a block_size: N, K
} qm_cuda_attention_problem;
typedef struct {
  int32_t tile_rows;   // queries in a block: heads of tokens that share their keys
  int32_t splits;      // blocks that share a tile's slots
  int32_t cluster;     // splits, if they are a cluster that adds up its results. 1: another kernel adds them up, if any
  int32_t stages;      // tiles of few rows: stages of the ring in shared memory
  int32_t wgmma;       // 1: many rows on wgmma (sm_90a); 0: mma.sync
  int32_t few_tokens;  // with a block_size: requests of up to so many tokens are tiles of few rows
  int32_t many_rows;   // with a block_size: rows of a tile of the other requests; 0: there are none
  uint64_t queries, sums, partial, workspace_bytes;  // byte offsets into the workspace
} qm_cuda_attention_plan;
typedef struct {
  const void *qkv, *past_key, *past_value;  // 16-byte aligned
  const int32_t* rows;
  const float *cos, *sin, *q_norm, *k_norm, *sinks;
  const int32_t* block_table;  // with a block_size: [R, M]
  void* output;
  void *present_key, *present_value;  // 16-byte aligned; past's memory, if slots are past_slots, or other memory
  void* workspace;
} qm_cuda_attention_tensors;
// Keys and values have 64, 96, 128, 192 or 256 features, or keys 192 and values 128. Latent attention (key_split 288)
// has keys of 576 and values of 512, without norms. cache_format is none, int8 or, from compute capability 9.0 on,
// fp8_e4m3. QM_UNSUPPORTED: something else.
QM_API int qm_cuda_plan_attention(const qm_cuda_attention_problem*, const qm_cuda_device*, qm_cuda_attention_plan*,
                                  char* err);
QM_API int qm_cuda_launch_attention(const qm_cuda_attention_problem*, const qm_cuda_attention_plan*,
                                    const qm_cuda_attention_tensors*, void* stream, char* err);

// Operators with a QM_CUDA line in op.def, by their names. `rows` stays on the device, as in CachedAttention. A row
// that asks for tokens that are not there stores nothing, and its output is NaN.
typedef struct {
  int32_t chosen[4];         // for the kernels, for example StateChoice in src/cuda/state/linear_attention.h
  uint64_t workspace_bytes;  // if a call needs none, a call with fewer tokens or rows needs none, too
} qm_cuda_node_plan;
typedef struct {
  // As qm_call's, with 16-byte aligned data. present may be past's memory, and AddRMSNorm's y may be x's. An input with
  // a QM_CONSTANT line is constant, as packed weights are.
  const qm_tensor *inputs, *outputs;
  void* workspace;  // plan.workspace_bytes, 256-byte aligned
  void* stream;     // a cudaStream_t
} qm_cuda_call;
// Reads types and shapes of the inputs, not their data. QM_UNSUPPORTED: something that no kernel takes.
//
// - T is QM_F16 or QM_BF16; MoERouting takes any type.
// - CausalConv: an even number of channels, even x_size and x_offset, width 2 to 4.
// - GatedDelta: head sizes 64 and 128.
// - StateSpace: a state_size of 64, 128 or 256, a head_size that is a multiple of 32, a norm_size up to 16384.
QM_API int qm_cuda_plan_node(const char* op, const void* node, const qm_tensor* inputs, const qm_cuda_device*,
                             qm_cuda_node_plan*, char* err);
// MoERouting gives what quant_moe.h says, except the last bits of the weights. MoERouter's logits are f32 sums of exact
// products. Their order depends on the number of tokens.
QM_API int qm_cuda_launch_node(const char* op, const void* node, const qm_cuda_node_plan*, const qm_cuda_call*,
                               char* err);

// Ranks whose GPUs write to each other's memory. Each rank has a box in its GPU's memory, which the others write to.
// All ranks make equal calls in one order, one at a time. A call waits on the GPU for the other ranks' calls.
#define QM_CUDA_PEERS 8
#define QM_CUDA_MOST_BLOCKS 256
typedef struct {
  int32_t rank, world;         // 2 to QM_CUDA_PEERS
  int32_t blocks;              // most blocks of a long sum, equal in all ranks; all of them run at once
  void* boxes[QM_CUDA_PEERS];  // each rank's, as this rank's GPU reaches it
} qm_cuda_peers;
typedef struct {
  int32_t type;  // qm_type of x and y: QM_F16 or QM_BF16
  int64_t count;
  const void* x;
  void* y;  // x's memory, or other
} qm_cuda_sum;
typedef struct {
  int32_t type;  // as qm_cuda_sum's
  int64_t rows, columns;
  const void* x;  // [rows, columns]
  void* y;        // [rows, world, columns]
} qm_cuda_gather;
QM_API size_t qm_cuda_box_bytes(int32_t world);
// Enqueues what a new box needs. It must end in all ranks before any rank makes another call.
QM_API int qm_cuda_clear_box(int32_t world, void* box, void* stream, char* err);
// y = the sum of all ranks' x, in f32 in the order of the ranks, rounded once. All ranks have equal bytes.
QM_API int qm_cuda_launch_sum(const qm_cuda_peers*, const qm_cuda_sum*, void* stream, char* err);
// AddRMSNorm of this sum; tensors do not overlap. The residual needs only the rank's own rows, r % world == rank. With
// more than a few rows, `sum` gets only these rows. QM_UNSUPPORTED: the columns are no multiple of 8, or more than
// QM_CUDA_SUM_COLUMNS.
#define QM_CUDA_SUM_COLUMNS 8192
QM_API int qm_cuda_launch_sum_norm(const qm_cuda_peers*, const qm_norm*, const qm_cuda_call*, char* err);
// y = all ranks' x, row after row. NaNs may have other bits.
QM_API int qm_cuda_launch_gather(const qm_cuda_peers*, const qm_cuda_gather*, void* stream, char* err);

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
} qm_cuda_choice_problem;
typedef struct {
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
  void* workspace;           // qm_cuda_choice_bytes, 256-byte aligned
} qm_cuda_choice_tensors;
QM_API size_t qm_cuda_choice_bytes(const qm_cuda_choice_problem*);
QM_API int qm_cuda_launch_choice(const qm_cuda_choice_problem*, const qm_cuda_choice_tensors*, void* stream, char* err);
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
