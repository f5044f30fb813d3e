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
enum { QM_INT32 = 3, QM_INT64 = 4 };  // of ids

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

// An operator of op.def, for example "QuantMoE": its struct above, and its attributes in the struct's order. The first
// is op_version. A file with an op_version below `since` lacks the attribute.
typedef struct {
  char name[32];
  char kind;       // 'i' int32, 'f' float, 's' the name of an enum value
  int32_t since;   // op_version
  int32_t offset;  // of its 4 bytes in the node
} qm_attribute;
typedef struct {
  const char* name;
  size_t bytes;  // of the struct
  size_t count;  // of attributes
  const qm_attribute* attributes;
} qm_operator;
QM_API const qm_operator* qm_find_operator(const char* op);  // NULL: there is none
// Sets attributes of a node, in any order. If op_version is among them, each later attribute first gets the value that
// its absence means. QM_UNSUPPORTED: this library does not know the op_version.
typedef struct {
  const char* name;
  char kind;  // as qm_attribute's: which of the three it has
  int64_t integer;
  float number;
  const char* text;
} qm_value;
QM_API int qm_set_attributes(const char* op, void* node, const qm_value* values, size_t count, char* err);

// A tensor's shape. A size below 0 is not known. A rank below 0 is an optional input that is left out.
typedef struct {
  int32_t rank;
  int64_t sizes[8];
} qm_shape;
// Checks the shapes of a node's inputs by op.def, and writes the shapes of its outputs.
QM_API int qm_infer_shapes(const char* op, const void* node, const qm_shape* inputs, int32_t count, qm_shape* outputs,
                           char* err);

// Runs task(arg, 0..count-1) in any order, on any threads. Returns when all are done. NULL in its place starts threads
// for the call, at most lanes - 1. If the system refuses a thread, the calling thread does its work.
typedef void (*qm_task)(void* arg, size_t index);
typedef void (*qm_parallel_for)(void* context, qm_task task, void* arg, size_t count);

// Makes rows of experts readable, from expert `first` on in ascending order, as many as there is room for, at least
// one. Only experts with pairs count (begin[e] < begin[e + 1]). Writes the rows' addresses to w13[e] and w2[e],
// 64-byte aligned. Returns the first expert with pairs that it left out, or local_experts. Rows stay until the next
// call. Below 0: it failed, and `err` (QM_ERROR_SIZE bytes) says why. It is called on qm_run's thread.
typedef int64_t (*qm_read_experts)(void* context, const int64_t* begin, int64_t first, const void** w13,
                                   const void** w2, char* err);

typedef struct {
  void* data;    // NULL: left out, or [0] for none
  int32_t type;  // qm_type of T or C, of I QM_INT32 or QM_INT64; not read if op.def states the type
  qm_shape shape;
} qm_tensor;
typedef struct {
  const qm_tensor *inputs,
      *outputs;     // all of op.def's, also inputs that are left out; shapes as qm_infer_shapes
  void* workspace;  // qm_workspace bytes, 64-byte aligned
  int lanes;        // upper bound of threads that will work, below 2 the calling one; also passed to qm_workspace
  qm_parallel_for parallel_for;
  void* parallel_context;
  qm_read_experts read_experts;  // QuantMoE. NULL: w13 and w2 have all rows. Otherwise their data is not read
  void* experts_context;
} qm_call;
// Checks everything that does not depend on the call: attributes and their combinations. A kernel for this machine must
// exist. `packed`: the shapes of the packed inputs in op.def's order, [experts in this slice, int32 words of a row], or
// NULL: they are not compared.
QM_API int qm_validate(const char* op, const void* node, const qm_shape* packed, char* err);
// Packed data is 64-byte aligned.
//
// - QuantMoE: at most 264 MiB, or one token's activations if they are more, because long calls work in slices of
//   tokens. Each lane that the call can use adds (max(H, I) + 128) KiB, with H and I rounded up to the group sizes.
//   With one token, a lane adds a row. QuantLinear takes as much, with I = K.
// - CachedAttention: the sum of these parts. D is head_size. V = v_head_size and U = out_size are rounded up to 16.
//   R is max(128, num_heads / kv_num_heads). At most 64 MiB, and 4 bytes a token. For each lane
//   `4 (R D + 32 D + 256 V + R (2 V + 304))` bytes, 488 KB for D = V = 128.
// - CachedAttention with a nope_size M has more. Q is M + D - V, T is min(S, 2048). For each of 128 tokens, or of one
//   row that is absorbed, `4 ((num_heads + kv_num_heads) D + num_heads V)` bytes. For each lane
//   `4 (T (Q + U + 16) + (M + U + 35) V + 256 (Q + U) + 32 D + 128 (U + 288) + 8704)` bytes at most. This is 1.9 MB for
//   a prompt of 512 of DeepSeek-V3.
// - CausalConv: a lane takes 2 (W + 1) KiB, with W its width.
// - GatedDelta and StateSpace: a lane takes `4 (K V + 32 (4 K + 2 V + 16))` bytes, 167 KB for K = V = 128. K and V are
//   rounded up to 16. A token of StateSpace adds 4 H P bytes.
// - HyperConnection: a lane takes 8 bytes for each feature.
// - SparseIndexer: 4 bytes for each slot and group of at most 128 tokens, 16 MB or one token's if that is more. A lane
//   adds `4 (R (D + 272) + 32 D + 2048)` bytes, R being max(128, num_heads).
QM_API size_t qm_workspace(const char* op, const void* node, const qm_call*);
// An output may be the memory of an input if op.def gives it this input's shape. QM_INVALID:
//
// - `rows` asks for tokens or slots that are not there, or `selected` names slots that its token does not see. `err`
//   names the row or the token, and nothing is written. The same holds if present is past's memory with more slots.
// - QuantMoE: an id is outside [-1, num_experts). `err` names token, slot and id, and the output is unspecified.
//
// MoERouting: a token with a NaN among the experts' logits gets the ids 0..top_k-1 and NaN weights, then its shared
// experts.
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
// Packs the matrices of a QuantLinear, or of an expert of a QuantMoE, into their rows, and the reverse. The attributes
// name the layouts (FORMAT.md). A QuantMoE has the matrices gate (only if `gated` is 1), up and down, and the
// rows of w13 and w2. An array that the attributes do not name is not read. If the attributes name an array that a
// matrix lacks, the row gets a neutral value. These are the middle zero point, the bias 0, the pre-scale 1, and the
// order of the features. With w2_perm the rows of gate and up are packed in down's order. QM_UNSUPPORTED or QM_INVALID:
// another operator, a layout refuses the attributes, a permutation is none, nvfp4 scales have a sign.
QM_API int qm_pack(const char* op, const void* node, const qm_matrix* matrices, void* const* rows, int lanes,
                   qm_parallel_for, void* context, char* err);
QM_API int qm_unpack(const char* op, const void* node, const void* const* rows, qm_matrix* matrices, int lanes,
                     qm_parallel_for, void* context, char* err);
// The bytes of a row and of its parts: codes, scales, zero points, global scales, biases, permutations, input scales,
// pre-scales. In layout cpu_panel the codes are panels, which hold all parts except the last three. `halves`: 2
// matrices [n, k], gate and up, or 1.
enum { QM_ROW_PARTS = 8 };
typedef struct {
  int64_t bytes;
  int64_t at[QM_ROW_PARTS], sizes[QM_ROW_PARTS];
  int64_t panel_rows, panel_bytes;  // of layout cpu_panel: output features of a panel, and its bytes
} qm_row;
// QM_UNSUPPORTED or QM_INVALID: the layout, or every kernel that reads it, refuses the attributes.
QM_API int qm_row_of(const qm_projection*, int64_t n, int64_t k, int halves, qm_row*, char* err);
// QM_UNSUPPORTED: a layer in layout marlin cannot have both projections.
QM_API int qm_check_marlin_layer(const qm_projection* w13, const qm_projection* w2, char* err);

// This library and its kernels. QUANTMOE_FORCE_KERNEL=name selects a kernel. QM_UNSUPPORTED: the name is unknown or not
// usable. Then `kernel` is NULL, and qm_validate fails, too.
enum { QM_MOST_KERNELS = 8 };
typedef struct {
  const char* version;
  const char* compiler;                  // "clang 22.1.8"
  const char* kernel;                    // the selected one
  const char* kernels[QM_MOST_KERNELS];  // the preferred one first, then NULLs
  int32_t usable[QM_MOST_KERNELS];       // 1: this machine has its features
  // CPUs that the process may use, at least 1. The affinity of any of its threads counts, and the CPU quota of its
  // control groups (versions 1 and 2), rounded up.
  int32_t cpus;
} qm_library;
QM_API int qm_describe(qm_library*, char* err);

// Probes for `quantmoe bench`, on `lanes` threads: bytes/s of one pass over `data` (larger than the caches), and
// operations/s of the selected kernel's int8 instructions. A multiply-add is two operations. 0: there is no kernel.
QM_API double qm_probe_read(const void* data, size_t bytes, int lanes);
QM_API double qm_probe_int8(int lanes);

#ifdef __cplusplus
}
#endif
