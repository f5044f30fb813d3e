// C ABI of the CPU kernels, without an engine. No exception crosses it. Kernels allocate nothing and have no state.
//
// A caller fills an operator's struct (attributes by name, from op.def), and validates it once against its packed
// tensors. For each call it asks for the workspace's size, provides the workspace, and runs. Functions that can fail
// return 0 or a qm_status. They write a sentence into `err` (QM_ERROR_SIZE bytes): the attribute or value, and what was
// expected.
#pragma once
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define QM_API __declspec(dllexport)
#else
#define QM_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum { QM_ERROR_SIZE = 512 };
typedef enum { QM_OK = 0, QM_INVALID = 1, QM_UNSUPPORTED = 2 } qm_status;
typedef enum { QM_F32 = 0, QM_F16 = 1, QM_BF16 = 2 } qm_type;

// The operators' attributes, expanded from op.def; enums as their codes.
typedef int32_t qm_kind_i;
typedef float qm_kind_f;
#define QM_ENUM(kind) typedef int32_t qm_kind_##kind;
#include "op.def"
#define QM_FIELD(kind, name) qm_kind_##kind name;
typedef struct {
#define QM_PROJECTION_ATTR(kind, name) QM_FIELD(kind, name)
#include "op.def"
} qm_projection;
// qm_moe, qm_linear and so on.
#define QM_OP(op, name, version) typedef struct {
#define QM_ATTR(op, kind, name) QM_FIELD(kind, name)
#define QM_PROJECTION(op, prefix) qm_projection prefix;
#define QM_END(op, name) \
  }                      \
  qm_##name;
#include "op.def"
#undef QM_FIELD

// The attributes of an operator, for example of "QuantMoE"; op_version is the first. `node` is the operator's struct
// above. A file with an op_version below `since` lacks the attribute.
typedef struct {
  char name[32];
  char kind;       // 'i' int32, 'f' float, 's' the name of an enum value
  int32_t since;   // op_version
  int32_t offset;  // of its 4 bytes in the node
} qm_attribute;
QM_API const qm_attribute* qm_attribute_at(const char* op, size_t index);  // NULL past the end
QM_API size_t qm_node_size(const char* op);                                // 0: no such operator
// Sets op_version, and gives each later attribute the value that its absence means. Call it first. QM_UNSUPPORTED: this
// library does not know the version.
QM_API int qm_set_version(const char* op, void* node, int64_t op_version, char* err);
QM_API int qm_set_int(const char* op, void* node, const char* name, int64_t value, char* err);
QM_API int qm_set_float(const char* op, void* node, const char* name, float value, char* err);
QM_API int qm_set_string(const char* op, void* node, const char* name, const char* value, char* err);

// A tensor's shape. A size below 0 is not known. A rank below 0 is an optional input that is left out.
typedef struct {
  int32_t rank;
  int64_t sizes[8];
} qm_shape;
// Checks the shapes of a node's inputs by op.def, and writes the shapes of its outputs.
QM_API int qm_infer_shapes(const char* op, const void* node, const qm_shape* inputs, int32_t count, qm_shape* outputs,
                           char* err);

// Bytes of one expert's packed row, by FORMAT.md. 0: the attributes are not valid. projection: 13 or 2.
QM_API size_t qm_row_bytes(const qm_moe*, int projection);

// Checks everything that does not depend on the call: attributes and their combinations, and the packed tensors'
// shapes. A shape is [experts in this slice, int32 words a row]. A kernel for this machine must exist.
QM_API int qm_moe_validate(const qm_moe*, const int64_t w13_shape[2], const int64_t w2_shape[2], char* err);

// Runs task(arg, 0..count-1) in any order, on any threads. Returns when all are done.
typedef void (*qm_task)(void* arg, size_t index);
typedef void (*qm_parallel_for)(void* context, qm_task task, void* arg, size_t count);

// The rows of experts, if not all of them are in memory at one time.
typedef struct {
  void* context;
  // Makes rows of experts readable, from expert `first` on in ascending order, as many as there is room for, at least
  // one. Only experts with pairs count (begin[e] < begin[e + 1]). Writes the rows' addresses to w13[e] and w2[e],
  // 64-byte aligned. Returns the first expert with pairs that it left out, or local_experts. Rows stay until the next
  // call. Below 0: it failed, and `err` (QM_ERROR_SIZE bytes) says why. It is called on qm_moe_run's thread.
  int64_t (*read)(void* context, const int64_t* begin, int64_t first, const void** w13, const void** w2, char* err);
} qm_expert_rows;

typedef struct {
  qm_type type;  // of hidden_states and output
  int id_bytes;  // 4 or 8: width of topk_ids
  int64_t tokens, top_k, local_experts;
  const void* hidden_states;  // [tokens, H]
  const void* topk_ids;       // [tokens, top_k]
  const float* topk_weights;  // [tokens, top_k]
  const void* w13;            // [local_experts, row], 64-byte aligned
  const void* w2;
  void* output;                  // [tokens, H]
  void* workspace;               // qm_moe_workspace bytes, 64-byte aligned
  int lanes;                     // upper bound of threads that will work; also passed to qm_moe_workspace
  qm_parallel_for parallel_for;  // NULL: run on the calling thread
  void* parallel_context;
  const qm_expert_rows* experts;  // NULL: w13 and w2 have all rows. Otherwise w13 and w2 are not read
} qm_moe_call;

// At most 264 MiB, or one token's activations if they are more, because long calls work in slices of tokens. Each lane
// that the call can use adds (max(H, I) + 128) KiB, with H and I rounded up to the group sizes. With one token, a lane
// adds a row.
QM_API size_t qm_moe_workspace(const qm_moe*, const qm_moe_call*);
// QM_INVALID: an id is outside [-1, num_experts). `err` names token, slot and id, and the output is unspecified.
QM_API int qm_moe_run(const qm_moe*, const qm_moe_call*, char* err);

// QuantLinear, with the kernels of experts. `w` is packed like a row of w2.
QM_API int qm_linear_validate(const qm_linear*, const int64_t w_shape[2], char* err);
typedef struct {
  qm_type type;  // of x and y
  int64_t rows;
  const void* x;  // [rows, K]
  const void* w;  // [1, row], 64-byte aligned
  void* y;        // [rows, N]
  void* workspace;
  int lanes;
  qm_parallel_for parallel_for;
  void* parallel_context;
} qm_linear_call;
// As qm_moe_workspace, with I = K.
QM_API size_t qm_linear_workspace(const qm_linear*, const qm_linear_call*);
QM_API int qm_linear_run(const qm_linear*, const qm_linear_call*, char* err);

// CachedAttention. D: head_size, V: v_head_size. For latent attention (key_split, nope_size) see op.def. With a
// block_size a row is a request, and past_slots and slots count its blocks' slots.
QM_API int qm_attention_validate(const qm_attention*, char* err);
typedef struct {
  qm_type type;                           // of qkv and output
  qm_type cache_type;                     // QM_F32 or QM_F16
  int64_t batch, tokens;                  // B, S; with a block_size R, S
  int64_t past_slots, slots;              // P, and present's slots, at least P; with a block_size M * block_size
  int64_t blocks, positions;              // with a block_size: N, K
  int64_t selected_lists, selected_size;  // with `selected`: G, E
  const void* qkv;         // [B, S, (num_heads + kv_num_heads) D + kv_num_heads V]; gated: num_heads V more before
  const void* past_key;    // [B, kv_num_heads, past_slots, D]
  const void* past_value;  // [B, kv_num_heads, past_slots, V]
  const int32_t* rows;     // [B, 3]: first new token that counts, how many do, tokens in the cache before them
  const float *cos, *sin;  // [B, S, rotary_size / 2]
  const float *q_norm, *k_norm;  // by qk_norm
  const float* sinks;            // [num_heads]
  const void *k_up, *v_up;       // with a nope_size, of `type`: [num_heads, nope_size, V], [num_heads, V, out_size]
  const int32_t* block_table;    // with a block_size: [R, M]
  const int32_t* selected;       // [B, S, selected_lists, selected_size], or NULL
  void* output;                  // [B, S, num_heads V]; with a nope_size out_size for V
  void *present_key, *present_value;  // [B, kv_num_heads, slots, D or V]; past's memory: appended to in place
  void* workspace;                    // qm_attention_workspace bytes, 64-byte aligned
  int lanes;
  qm_parallel_for parallel_for;
  void* parallel_context;
} qm_attention_call;
// The sum of these parts. V, and U = out_size, are rounded up to 16. R is max(128, num_heads / kv_num_heads).
//
// - At most 64 MiB, and 4 bytes a token.
// - For each lane `4 (R D + 32 D + 256 V + R (2 V + 304))` bytes, 488 KB for D = V = 128.
//
// With a nope_size M there are more. Q is M + D - V, T is min(S, 2048).
//
// - For each of 128 tokens, or of one row that is absorbed, `4 ((num_heads + kv_num_heads) D + num_heads V)` bytes.
// - For each lane `4 (T (Q + U + 16) + (M + U + 35) V + 256 (Q + U) + 32 D + 128 (U + 288) + 8704)` bytes at most.
//   This is 1.9 MB for a prompt of 512 of DeepSeek-V3.
QM_API size_t qm_attention_workspace(const qm_attention*, const qm_attention_call*);
// QM_INVALID: `rows` asks for tokens or slots that are not there, or `selected` names slots that its token does not
// see. `err` names the row or the token. Or present is past's memory with more slots. Then nothing is written.
QM_API int qm_attention_run(const qm_attention*, const qm_attention_call*, char* err);

// Operators with a QM_CPU line in op.def, by their names.
typedef struct {
  void* data;    // NULL: left out, or [0] for none
  int32_t type;  // qm_type of T or C; not read if op.def states the type
  qm_shape shape;
} qm_tensor;
typedef struct {
  const qm_tensor *inputs,
      *outputs;                  // all of op.def's, also inputs that are left out; shapes as qm_infer_shapes
  void* workspace;               // qm_workspace bytes, 64-byte aligned
  int lanes;                     // upper bound of threads that will work; also passed to qm_workspace
  qm_parallel_for parallel_for;  // NULL: run on the calling thread
  void* parallel_context;
} qm_call;
// Checks everything that does not depend on the call.
QM_API int qm_validate(const char* op, const void* node, char* err);
// A lane of CausalConv takes 2 (W + 1) KiB, with W its width. A lane of GatedDelta or StateSpace takes
// `4 (K V + 32 (4 K + 2 V + 16))` bytes, 167 KB for K = V = 128. K and V are rounded up to 16. A token of StateSpace
// adds 4 H P bytes. SparseIndexer takes 4 bytes for each slot of at most 128 tokens, 16 MB or the slots of 1 token if
// they are more. Each of its lanes takes `4 (R (D + 272) + 32 D + 2048)` bytes, R being max(128, num_heads).
QM_API size_t qm_workspace(const char* op, const void* node, const qm_call*);
// An output may be the memory of an input if op.def gives it this input's shape. MoERouting: a token with a NaN among
// the experts' logits gets the ids 0..top_k-1 and NaN weights, then its shared experts. QM_INVALID: `rows` asks for
// tokens that are not there. `err` names the row, and nothing is written.
QM_API int qm_run(const char* op, const void* node, const qm_call*, char* err);

// One matrix [n, k], as QuantizedMatrix has it. The attributes say what its codes and scales are. Packing reads the
// arrays; NULL is an array that the matrix lacks. Unpacking fills the arrays that the attributes name.
typedef struct {
  void* codes;           // [n, k]: a byte a code, two for 16-bit formats
  void* scales;          // [ceil(n / block_n), groups] of scale_type
  uint8_t* zero_points;  // the shape of scales
  float* bias;           // [n]
  float* pre_scale;      // [k]
  int32_t* perm;         // [k]
  float global_scale;    // 1 when there is none
  float input_scale;     // 0 when there is none
} qm_matrix;
// Floats to codes and scales. For each group, a search finds the scale, and zero point or minimum, with the least
// weighted square error. Formats: int4, int8, mxfp4, nvfp4 and K-quants.
typedef struct {
  int32_t format, group_size, scale_type;
  int32_t zero_points;  // 1: each group of integers has one
  qm_type type;
  int64_t n, k;
  const void* weights;      // [n, k] of `type`, finite
  const float* importance;  // [k], not negative: weights of the input features' squared errors; NULL: all are equal
  float factor;             // of all weights: the reciprocal of nvfp4's global scale, else 1
} qm_quantization;
// Fills codes, scales and, if there are any, zero_points. Any number of lanes on any processor gives the same bytes.
// QM_UNSUPPORTED or QM_INVALID: another format, or a group_size that the format lacks.
QM_API int qm_quantize(const qm_quantization*, const qm_matrix*, int lanes, qm_parallel_for, void* context, char* err);
// Packs an expert's matrices into its rows, and the reverse, in the layouts that the attributes name (FORMAT.md 1 to
// 3). `gate` is read if `gated` is 1. An array that the attributes do not name is not read. If the attributes name an
// array that a matrix lacks, the row gets a neutral value. These are the middle zero point, the bias 0, the pre-scale
// 1, and the order of the features. With w2_perm the rows of gate and up are packed in down's order. QM_UNSUPPORTED or
// QM_INVALID: a layout refuses the attributes, a permutation is none, nvfp4 scales have a sign.
QM_API int qm_pack_expert(const qm_moe*, const qm_matrix* gate, const qm_matrix* up, const qm_matrix* down,
                          void* w13_row, void* w2_row, int lanes, qm_parallel_for, void* context, char* err);
QM_API int qm_unpack_expert(const qm_moe*, const void* w13_row, const void* w2_row, qm_matrix* gate, qm_matrix* up,
                            qm_matrix* down, int lanes, qm_parallel_for, void* context, char* err);
QM_API int qm_pack_linear(const qm_linear*, const qm_matrix*, void* row, int lanes, qm_parallel_for, void* context,
                          char* err);
QM_API int qm_unpack_linear(const qm_linear*, const void* row, qm_matrix*, int lanes, qm_parallel_for, void* context,
                            char* err);
// The bytes of a row and of its parts: codes, scales, zero points, global scales, biases, permutations, input scales,
// pre-scales. In layout cpu_panel the codes are panels, which hold all parts except the last three. `halves`: 2
// matrices [n, k], gate and up, or 1.
enum { QM_ROW_PARTS = 8 };
typedef struct {
  int64_t bytes;
  int64_t at[QM_ROW_PARTS], sizes[QM_ROW_PARTS];
} qm_row;
// QM_UNSUPPORTED or QM_INVALID: the layout, or every kernel that reads it, refuses the attributes.
QM_API int qm_row_of(const qm_projection*, int64_t n, int64_t k, int halves, qm_row*, char* err);
// QM_UNSUPPORTED: a layer in layout marlin cannot have both projections.
QM_API int qm_check_marlin_layer(const qm_projection* w13, const qm_projection* w2, char* err);

// Panels of layout cpu_panel (FORMAT.md section 2) for some rows of a matrix, for hosts that have no whole expert in
// memory. `dst` starts at panel 0 of these rows. Consecutive panels are `panel_step` panels apart (2 for the halves of
// a gated w13).
typedef struct {
  int32_t format, group_size, scale_type;
  int64_t n, k;
  const void* codes;           // as qm_matrix's
  const void* scales;          // [ceil(n / block_n), groups] of scale_type
  const uint8_t* zero_points;  // the shape of scales, or NULL
  int32_t block_n;
  float global_scale;        // 1 when there is none
  const float* bias;         // [n] or NULL
  const int32_t* row_order;  // [n] or NULL: source row of each packed row
  int panel_step;
} qm_pack_source;
QM_API int qm_pack_panels(const qm_pack_source*, void* dst, int lanes, qm_parallel_for, void* context, char* err);
typedef struct {
  int64_t panel_rows, panel_bytes, row_bytes;  // output features of a panel; of the panel; of the expert's row
} qm_panel_row;
QM_API int qm_panel_row_of(const qm_projection*, int64_t n, int64_t k, int halves, qm_panel_row*, char* err);
// A qm_parallel_for that starts std::threads, for hosts without a pool (packing, tests). `context` is ignored. If the
// system refuses a thread, the calling thread runs the other tasks.
QM_API void qm_parallel_threads(void* context, qm_task task, void* arg, size_t count);
// The number of CPUs that the process may use, at least 1. The affinity of any of its threads counts, and the CPU quota
// of its control groups (versions 1 and 2), rounded up. For tests: `allowed` above 0 replaces the affinity, and `root`,
// otherwise "", is the folder with proc and sys.
QM_API int qm_cpus(int allowed, const char* root);

// The kernels, the preferred one first. `usable`: this machine has its features. QUANTMOE_FORCE_KERNEL=name selects
// one. With an unknown or unusable name, qm_moe_validate fails.
QM_API const char* qm_kernel_name(size_t index, int* usable);  // NULL past the end
QM_API const char* qm_kernel_selected(const qm_moe*, char* err);
QM_API const char* qm_version(void);
QM_API const char* qm_compiler(void);  // of this library: "clang 22.1.8"

// Probes for `quantmoe bench`, on `lanes` threads: bytes/s of one pass over `data` (larger than the caches), and
// operations/s of the selected kernel's int8 instructions. A multiply-add is two operations. 0: there is no kernel.
QM_API double qm_probe_read(const void* data, size_t bytes, int lanes);
QM_API double qm_probe_int8(int lanes);

#ifdef __cplusplus
}
#endif
