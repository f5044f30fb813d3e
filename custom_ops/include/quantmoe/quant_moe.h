// C ABI of the quantmoe kernels: no engine, no exceptions across it; kernels allocate nothing and have no state.
//
// A caller fills an operator's struct (attributes by name, from op.def), validates it once against its packed tensors,
// and then for each call plans, provides a workspace and runs. Functions that can fail return 0 or a qm_status and
// write a sentence into `err` (QM_ERROR_SIZE bytes) that names the attribute or value and what was expected.
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

// The attributes of an operator ("QuantMoE", say), op_version first. `node` is the operator's
// struct above; a file of an op_version before `since` lacks the attribute.
typedef struct {
  char name[32];
  char kind;       // 'i' int32, 'f' float, 's' the name of an enum value
  int32_t since;   // op_version
  int32_t offset;  // of its 4 bytes in the node
} qm_attribute;
QM_API const qm_attribute* qm_attribute_at(const char* op, size_t index);  // NULL past the end
QM_API size_t qm_node_size(const char* op);                                // 0: no such operator
// Sets op_version, first, and each later attribute to what its absence means. QM_UNSUPPORTED: a version that this
// library does not know.
QM_API int qm_set_version(const char* op, void* node, int64_t op_version, char* err);
QM_API int qm_set_int(const char* op, void* node, const char* name, int64_t value, char* err);
QM_API int qm_set_float(const char* op, void* node, const char* name, float value, char* err);
QM_API int qm_set_string(const char* op, void* node, const char* name, const char* value, char* err);

// A tensor's shape; a size below 0 is not known. A rank below 0: an optional input that is left out.
typedef struct {
  int32_t rank;
  int64_t sizes[8];
} qm_shape;
// Checks the shapes of a node's inputs, of which optional ones may be left out, by op.def's, and writes the outputs'
// shapes.
QM_API int qm_infer_shapes(const char* op, const void* node, const qm_shape* inputs, int32_t count, qm_shape* outputs,
                           char* err);

// Bytes of one expert's packed row by FORMAT.md; 0 when the attributes are not valid. projection: 13 or 2.
QM_API size_t qm_row_bytes(const qm_moe*, int projection);

// Checks everything that does not depend on the call: attribute values and their combinations, the packed tensors'
// shapes (experts in this slice, int32 words a row), and that a kernel for this machine exists.
QM_API int qm_moe_validate(const qm_moe*, const int64_t w13_shape[2], const int64_t w2_shape[2], char* err);

// Runs task(arg, 0..count-1), in any order and on any threads, and returns when all are done.
typedef void (*qm_task)(void* arg, size_t index);
typedef void (*qm_parallel_for)(void* context, qm_task task, void* arg, size_t count);

// The rows of experts that are not all in memory at one time.
typedef struct {
  void* context;
  // Makes rows readable, in ascending order those of experts from `first` on that have pairs (begin[e] < begin[e + 1]):
  // as many as there is room for, at least one. Writes their addresses to w13[e] and w2[e], 64-byte aligned, and
  // returns the first expert with pairs that it left out, or local_experts. They stay until the next call. Below 0: it
  // failed, `err` (QM_ERROR_SIZE bytes) says why. Called on the thread that called qm_moe_run.
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
  const qm_expert_rows* experts;  // NULL: w13 and w2 have all; otherwise these are not read, and the output is the same
} qm_moe_call;

// Long calls work in slices of tokens: whatever their number, at most 264 MiB (or one token's activations, where they
// are more) and, for each lane, (max(H, I) + 128) KiB, H and I rounded up to the group sizes. Lanes that the call
// cannot use at one time count nothing; one token needs a row a lane.
QM_API size_t qm_moe_workspace(const qm_moe*, const qm_moe_call*);
// Fails (QM_INVALID) on an id outside [-1, num_experts), naming token, slot and id; the output is then unspecified.
QM_API int qm_moe_run(const qm_moe*, const qm_moe_call*, char* err);

// QuantLinear: the same packed bytes (a row of w2) and kernels.
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
// As qm_moe_workspace, I being K.
QM_API size_t qm_linear_workspace(const qm_linear*, const qm_linear_call*);
QM_API int qm_linear_run(const qm_linear*, const qm_linear_call*, char* err);

// CachedAttention. D: head_size, V: v_head_size. With a key_split or a nope_size, of latent attention, see op.def.
// With a block_size a row is a request: past_slots and slots are those of its blocks.
QM_API int qm_attention_validate(const qm_attention*, char* err);
typedef struct {
  qm_type type;               // of qkv and output
  qm_type cache_type;         // QM_F32 or QM_F16
  int64_t batch, tokens;      // B, S; with a block_size R, S
  int64_t past_slots, slots;  // P, and those of present, at least P; with a block_size M * block_size
  int64_t blocks, positions;  // with a block_size: N, K
  const void* qkv;            // [B, S, (num_heads + kv_num_heads) D + kv_num_heads V]; gated: num_heads V more before
  const void* past_key;       // [B, kv_num_heads, past_slots, D]
  const void* past_value;     // [B, kv_num_heads, past_slots, V]
  const int32_t* rows;        // [B, 3]: first new token that counts, how many do, tokens in the cache before them
  const float *cos, *sin;     // [B, S, rotary_size / 2]
  const float *q_norm, *k_norm;  // by qk_norm
  const float* sinks;            // [num_heads]
  const void *k_up, *v_up;       // with a nope_size, of `type`: [num_heads, nope_size, V], [num_heads, V, out_size]
  const int32_t* block_table;    // with a block_size: [R, M]
  void* output;                  // [B, S, num_heads V]; with a nope_size out_size for V
  void *present_key, *present_value;  // [B, kv_num_heads, slots, D or V]; past's memory: appended to in place
  void* workspace;                    // qm_attention_workspace bytes, 64-byte aligned
  int lanes;
  qm_parallel_for parallel_for;
  void* parallel_context;
} qm_attention_call;
// At most 64 MiB, 4 bytes a token, and for each lane, with R = max(128, num_heads / kv_num_heads) queries,
// 4 (R D + 32 D + 256 V + R (2 V + 304)) bytes, V rounded up to 16: 488 KB for D = V = 128. With a nope_size M
// also 4 ((num_heads + kv_num_heads) D + num_heads V) bytes a token of 128, or of one row that is absorbed, and for
// each lane at most 4 (T (Q + U + 16) + (M + U + 35) V + 256 (Q + U) + 32 D + 128 (U + 288) + 8704) bytes, Q = M + D -
// V, U = out_size rounded up to 16, T = min(S, 2048): 1.9 MB for a prompt of 512 of DeepSeek-V3.
QM_API size_t qm_attention_workspace(const qm_attention*, const qm_attention_call*);
// Fails (QM_INVALID), and writes nothing, when `rows` asks for tokens or slots that are not there, naming the row, or
// when present is past's memory but has more slots.
QM_API int qm_attention_run(const qm_attention*, const qm_attention_call*, char* err);

// The operators that have a QM_CPU line in op.def, by their names.
typedef struct {
  void* data;    // NULL: left out, or [0] for none
  int32_t type;  // qm_type of T or C; a type that op.def states is not said
  qm_shape shape;
} qm_tensor;
typedef struct {
  const qm_tensor *inputs,
      *outputs;                  // as op.def lists them, those that are left out included; shapes as qm_infer_shapes
  void* workspace;               // qm_workspace bytes, 64-byte aligned
  int lanes;                     // upper bound of threads that will work; also passed to qm_workspace
  qm_parallel_for parallel_for;  // NULL: run on the calling thread
  void* parallel_context;
} qm_call;
// Checks everything that does not depend on the call.
QM_API int qm_validate(const char* op, const void* node, char* err);
// CausalConv, of width W: 2 (W + 1) KiB a lane. GatedDelta, with K and V rounded up to 16, a lane:
// 4 (K V + 32 (4 K + 2 V + 16)) bytes, 167 KB for K = V = 128. StateSpace: 4 H P bytes a token, and a lane's as
// GatedDelta's.
QM_API size_t qm_workspace(const char* op, const void* node, const qm_call*);
// An output may be the memory of the input that op.def says it is like. A token of MoERouting with an expert's logit
// that is not a number gets the ids 0..top_k-1 and weights that are not numbers, before its shared experts. Fails
// (QM_INVALID), and writes nothing, when `rows` asks for tokens that are not there, naming the row.
QM_API int qm_run(const char* op, const void* node, const qm_call*, char* err);

// One matrix [n, k] as QuantizedMatrix has it, beside the attributes that say what its codes and scales are. Packing
// reads the arrays, and what is NULL has none; unpacking fills them, NULL or not by the attributes.
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
// Floats to codes and scales: for each group the scale, and what else it has, of the least weighted square error that a
// search finds. Formats: int4, int8, mxfp4, nvfp4 and K-quants.
typedef struct {
  int32_t format, group_size, scale_type;
  int32_t zero_points;  // 1: each group of integers has one
  qm_type type;
  int64_t n, k;
  const void* weights;      // [n, k] of `type`, finite
  const float* importance;  // [k], not negative, of the squared errors of each input feature; NULL: all alike
  float factor;             // of all weights: the reciprocal of nvfp4's global scale, else 1
} qm_quantization;
// Fills codes, scales and, if there are any, zero_points. The same bytes for any number of lanes, on any processor.
// QM_UNSUPPORTED or QM_INVALID: another format, or a group_size that the format has not.
QM_API int qm_quantize(const qm_quantization*, const qm_matrix*, int lanes, qm_parallel_for, void* context, char* err);
// Packs an expert's matrices into its rows, and the reverse, in the layouts that the attributes name (FORMAT.md 1 to
// 3). gate: read when `gated` is 1. What the attributes do not name is not read; where they name what a matrix lacks,
// the row gets what that means (the middle zero point, the bias 0, the pre-scale 1, the order of the features). With
// w2_perm the rows of gate and up are packed in down's order. Work is split over lanes by parallel_for.
// QM_UNSUPPORTED or QM_INVALID: attributes that a layout refuses, a permutation that is none, nvfp4 scales with a sign.
QM_API int qm_pack_expert(const qm_moe*, const qm_matrix* gate, const qm_matrix* up, const qm_matrix* down,
                          void* w13_row, void* w2_row, int lanes, qm_parallel_for, void* context, char* err);
QM_API int qm_unpack_expert(const qm_moe*, const void* w13_row, const void* w2_row, qm_matrix* gate, qm_matrix* up,
                            qm_matrix* down, int lanes, qm_parallel_for, void* context, char* err);
QM_API int qm_pack_linear(const qm_linear*, const qm_matrix*, void* row, int lanes, qm_parallel_for, void* context,
                          char* err);
QM_API int qm_unpack_linear(const qm_linear*, const void* row, qm_matrix*, int lanes, qm_parallel_for, void* context,
                            char* err);
// The bytes of a row and of its parts: codes (of layout cpu_panel the panels, which hold all but the last three),
// scales, zero points, global scales, biases, permutations, input scales, pre-scales. Of its matrices [n, k] there are
// `halves`: gate and up, or one.
enum { QM_ROW_PARTS = 8 };
typedef struct {
  int64_t bytes;
  int64_t at[QM_ROW_PARTS], sizes[QM_ROW_PARTS];
} qm_row;
// QM_UNSUPPORTED or QM_INVALID: attributes that the layout, or every kernel that reads it, refuses.
QM_API int qm_row_of(const qm_projection*, int64_t n, int64_t k, int halves, qm_row*, char* err);
// QM_UNSUPPORTED: of what a layer in layout marlin cannot have together.
QM_API int qm_check_marlin_layer(const qm_projection* w13, const qm_projection* w2, char* err);

// The panels of layout cpu_panel alone, FORMAT.md section 2, of some rows of a matrix, for hosts that have no expert in
// memory. `dst` starts at panel 0 of these rows; consecutive panels are `panel_step` panels apart (2 for the halves of
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
// A qm_parallel_for that starts std::threads; context is ignored. For hosts without a pool (packing, tests). Where the
// system has fewer threads, the calling one runs the other tasks.
QM_API void qm_parallel_threads(void* context, qm_task task, void* arg, size_t count);
// CPUs that the affinity of the process's threads allows, of any of them, and no more than the CPU quota of its control
// groups (versions 1 and 2) is worth, rounded up; at least 1. For tests: `allowed` above 0 stands for the affinity,
// `root`, otherwise "", is where proc and sys are.
QM_API int qm_cpus(int allowed, const char* root);

// Kernels in order of preference, best first; usable: this machine has its features. QUANTMOE_FORCE_KERNEL=name selects
// one, an unknown or unusable name makes qm_moe_validate fail.
QM_API const char* qm_kernel_name(size_t index, int* usable);  // NULL past the end
QM_API const char* qm_kernel_selected(const qm_moe*, char* err);
QM_API const char* qm_version(void);
QM_API const char* qm_compiler(void);  // of this library: "clang 22.1.8"

// Probes for the bench, on `lanes` threads: bytes/s of one pass over `data` (larger than the caches), and operations/s
// (two a multiply-add) of the int8 instructions of the selected kernel; 0 when there is no kernel.
QM_API double qm_probe_read(const void* data, size_t bytes, int lanes);
QM_API double qm_probe_int8(int lanes);

#ifdef __cplusplus
}
#endif
