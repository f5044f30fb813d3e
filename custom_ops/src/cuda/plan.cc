// The plan: which kernels, tiles and workspace for a problem on a device. Pure; runs without a GPU.
#include <algorithm>
#include <cstdarg>
#include <cstdio>

#include "cuda/layout.h"
#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {
namespace {

constexpr int64_t kDecodeTokens = 8, kDecodePairs = 128;
constexpr int kWarps = 8;
constexpr int64_t kMaxExperts = 8192;  // MoeRoute counts them in shared memory

__attribute__((format(printf, 3, 4))) int Fail(char* err, int status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(err, QM_ERROR_SIZE, format, arguments);
  va_end(arguments);
  return status;
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
// Share of the last round that is used when `count` equal pieces go to `slots` at a time.
double Fill(int64_t count, int64_t slots) {
  return static_cast<double>(count) / static_cast<double>(std::max<int64_t>(1, CeilDiv(count, slots)) * slots);
}
uint64_t Align(uint64_t a) { return (a + 255) / 256 * 256; }

int Validate(const qm_cuda_problem& p, const qm_cuda_device& device, char* err) {
  const qm_moe& m = p.moe;
  if (m.op_version != 1) return Fail(err, QM_UNSUPPORTED, "op_version is %d, this library knows 1", m.op_version);
  if (p.type != QM_F16 && p.type != QM_BF16)
    return Fail(err, QM_UNSUPPORTED, "hidden_states are type %d, the CUDA kernels take float16 (1) and bfloat16 (2)",
                p.type);
  if (p.id_bytes != 4 && p.id_bytes != 8)
    return Fail(err, QM_INVALID, "topk_ids are %d bytes wide, expected 4 or 8", p.id_bytes);
  if (device.sm < 80)
    return Fail(err, QM_UNSUPPORTED, "compute capability %d.%d, the kernels need 8.0 or later", device.sm / 10,
                device.sm % 10);
  if (m.hidden_size <= 0 || m.hidden_size % 8)
    return Fail(err, QM_UNSUPPORTED, "hidden_size is %d, the CUDA kernels take positive multiples of 8", m.hidden_size);
  if (m.intermediate_size <= 0)
    return Fail(err, QM_INVALID, "intermediate_size is %d, expected a positive number", m.intermediate_size);
  if (p.local_experts <= 0 || p.local_experts > kMaxExperts)
    return Fail(err, QM_UNSUPPORTED, "w13 has %lld experts, the CUDA kernels take 1 to %lld",
                static_cast<long long>(p.local_experts), static_cast<long long>(kMaxExperts));
  if (m.expert_offset < 0 || m.expert_offset + p.local_experts > m.num_experts)
    return Fail(err, QM_INVALID, "experts [%d, %lld) are not inside num_experts = %d", m.expert_offset,
                static_cast<long long>(m.expert_offset + p.local_experts), m.num_experts);
  if (p.tokens < 0 || p.top_k <= 0 || p.tokens * p.top_k > INT32_MAX / 2)
    return Fail(err, QM_INVALID, "topk_ids is [%lld, %lld]", static_cast<long long>(p.tokens),
                static_cast<long long>(p.top_k));
  if (m.activation < 0 || m.activation > 5 || (!m.gated && m.activation > 3))
    return Fail(err, QM_INVALID, "activation %d with gated = %d", m.activation, m.gated);
  for (int which : {13, 2}) {
    const qm_projection& w = which == 13 ? m.w13 : m.w2;
    if (w.layout != 1 || w.layout_version != 1)
      return Fail(err, QM_INVALID, "w%d_layout is %d version %d, the CUDA kernels read marlin (1) version 1", which,
                  w.layout, w.layout_version);
    if (w.format != 0 || w.zero_points || w.block_n != 1)
      return Fail(err, QM_UNSUPPORTED,
                  "w%d: format %d, zero_points %d, block_n %d; the CUDA kernels have int4 (0), 0, 1 so far", which,
                  w.format, w.zero_points, w.block_n);
    if (w.scale_type != 1 && w.scale_type != 2)
      return Fail(err, QM_UNSUPPORTED, "w%d_scale_type is %d, the CUDA kernels take f16 (1) and bf16 (2)", which,
                  w.scale_type);
    const int g = w.group_size;
    if (g != -1 && g != 32 && (g < 64 || (g & (g - 1))))
      return Fail(err, QM_UNSUPPORTED, "w%d_group_size is %d, the CUDA kernels take -1, 32 and powers of two from 64",
                  which, g);
    if (w.activation_format != 0)
      return Fail(err, QM_UNSUPPORTED, "w%d_activation_format is %d, the CUDA kernels take none (0)", which,
                  w.activation_format);
    if (w.pre_scale != 0)
      return Fail(err, QM_UNSUPPORTED, "w%d_pre_scale is %d, the CUDA kernels take 0", which, w.pre_scale);
    if (w.perm != 0 && (which == 2 || w.perm != 1))
      return Fail(err, QM_UNSUPPORTED, "w%d_perm is %d, the CUDA kernels take 0, and 1 for w13", which, w.perm);
  }
  return QM_OK;
}

constexpr int kStages = 3;
constexpr int kWgmmaPanels = 16;
// As in moe_gemm_wgmma.cuh: token ring, code rings, staging of the results.
int WgmmaSharedBytes(int tokens, int per_block, bool down) {
  const bool small = tokens <= 48;
  return 1024 + (small ? 5 : 6) * tokens * 128 + 8 * (small && per_block == 1 ? 5 : 4) * 2 * (512 + 128 * per_block) +
         2 * tokens * ((down ? 256 : 128) + 16);
}
constexpr int kRoutingBytes = 4 * 1024;  // static DecodeRouting, rounded up

}  // namespace

}  // namespace quantmoe

using namespace quantmoe;

extern "C" size_t qm_cuda_row_bytes(const qm_moe* moe, int projection) {
  MarlinRow row{};
  return MarlinRowOf(*moe, projection, &row) ? row.bytes : 0;
}

extern "C" int qm_cuda_plan_moe(const qm_cuda_problem* problem, const qm_cuda_device* device, qm_cuda_plan* plan,
                                char* err) {
  const qm_cuda_problem& p = *problem;
  if (int status = Validate(p, *device, err)) return status;
  *plan = qm_cuda_plan{};
  MarlinRow w13{}, w2{};
  MarlinRowOf(p.moe, 13, &w13);
  MarlinRowOf(p.moe, 2, &w2);
  const int64_t pairs = p.tokens * p.top_k;
  const int sms = device->multiprocessors;
  const bool decode = p.tokens <= kDecodeTokens && pairs <= kDecodePairs;
  const int64_t most_experts = std::min<int64_t>(pairs, p.local_experts);
  // Tokens an expert gets on average decide the tile.
  const double mean = static_cast<double>(pairs) / static_cast<double>(p.local_experts);

  const bool wgmma = !decode && device->sm == 90 && p.moe.gated && mean > 8;
  plan->path = decode ? QM_CUDA_DECODE : wgmma ? QM_CUDA_WGMMA : QM_CUDA_STREAM;

  auto gemm = [&](const MarlinRow& w, bool direct) {
    qm_cuda_gemm g{};
    const int scale_bytes = w.per_block == 2 ? 8 : 4;
    g.warps_k = 8;
    // Measured: each change of panels costs a sum over the warps that split K, which decode, with few tiles, can
    // afford.
    while (g.warps_k > 1 && w.units < (decode ? 2 : 8) * g.warps_k) g.warps_k /= 2;
    g.cluster = 1;
    g.stages = kStages;
    if (wgmma) {
      g.panels = kWgmmaPanels;
      const int tokens = mean <= 40 ? 48 : 128;
      g.n_tiles = tokens / 8;
      g.shared_bytes = WgmmaSharedBytes(tokens, w.per_block, direct);
      g.grid = tokens == 48 ? 2 * sms : sms;
      // Few units of work: down's K is cut, into parts that fill the multiprocessors best. A part costs a pass of
      // combine.
      const double tiles = static_cast<double>(most_experts) * std::max(1.0, mean / tokens + 0.5);
      const int64_t pieces = static_cast<int64_t>(tiles * static_cast<double>(CeilDiv(w.panels, kWgmmaPanels)));
      double best = 0;
      g.warps_k = 1;
      for (int parts : {1, 2, 4}) {
        const double worth = Fill(pieces * parts, g.grid) * (1 - 0.02 * parts);
        if (parts > 1 && (!direct || w.units / parts < 16 || worth <= best)) continue;
        best = worth;
        g.warps_k = parts;
      }
      return g;
    }
    const int reserved = 1024 + (decode ? kRoutingBytes : 0);
    auto fits = [&](int panels, int n_tiles) {
      g.panels = panels;
      g.n_tiles = n_tiles;
      g.shared_bytes =
          kWarps * (kStages * (panels * (512 + 32 * scale_bytes) + n_tiles * 1024) + panels * n_tiles * 512);
      return g.shared_bytes <= device->shared_bytes - reserved;
    };
    auto slots = [&] {  // blocks resident at once; the first number is what the kernels' registers allow
      const int blocks = g.n_tiles > 2 ? 1 : g.panels == 2 && g.n_tiles == 1 ? 3 : 2;
      return sms * std::clamp(device->shared_bytes / (g.shared_bytes + reserved), 1, blocks);
    };
    if (direct) {
      // Measured (README.md): an output tile is best shared by two blocks, if that loads the multiprocessors evenly.
      // Bigger clusters leave multiprocessors empty, three or six blocks worst.
      const int64_t work = most_experts * w.units;
      struct {
        int panels, cluster;
      } const candidates[] = {{4, 1}, {4, 2}, {2, 2}, {2, 4}, {4, 4}, {2, 1}};
      for (const auto& c : candidates) {
        if (!fits(c.panels, 1) || (c.cluster > 1 && device->sm < 90)) continue;
        if (c.panels == 4 && slots() == sms && device->sm >= 90) continue;
        if (c.panels == 4 && c.cluster == 1 && work > 4 * kWarps) continue;
        g.cluster = c.cluster;
        g.grid = static_cast<int32_t>(CeilDiv(w.panels, c.panels) * c.cluster);
        if (Fill(g.grid, sms) >= 0.8) break;
      }
      return g;
    }
    auto units = [&] {
      return most_experts * CeilDiv(w.panels, static_cast<int64_t>(g.panels) * (kWarps / g.warps_k));
    };
    if (decode) {
      // Four panels a warp cost fewer instructions a byte than two, but share out less evenly.
      double best = 0;
      for (int panels : {4, 2}) {
        if (!fits(panels, 1)) continue;
        double worth = units() > slots() ? Fill(units(), slots()) : Fill(units(), sms);
        worth *= panels == 2 ? 0.9 : slots() > sms ? 1.0 : 0.6;  // one block alone cannot hide its waits
        if (worth < best) {
          fits(4, 1);
          break;
        }
        best = worth;
      }
    } else {
      (mean > 12 && fits(2, 4)) || (mean > 5 && fits(2, 2)) || (fits(4, 1) && slots() > sms) || fits(2, 1);
    }
    g.grid = static_cast<int32_t>(std::clamp<int64_t>(units(), 1, slots()));
    return g;
  };
  plan->w13 = gemm(w13, false);
  plan->w2 = gemm(w2, decode || wgmma);

  uint64_t end = 0;
  auto take = [&](uint64_t bytes) {
    const uint64_t at = end;
    end += Align(bytes);
    return at;
  };
  const uint64_t hidden_columns =
      wgmma ? static_cast<uint64_t>(w2.units) * 64 : static_cast<uint64_t>(w13.panels) * (p.moe.gated ? 8 : 16);
  plan->hidden = take(static_cast<uint64_t>(pairs) * hidden_columns * 2);
  if (p.moe.w13.perm) plan->gathered = take(static_cast<uint64_t>(pairs) * p.moe.hidden_size * 2);
  if (!decode) {
    plan->max_tiles = static_cast<int32_t>(pairs / (8 * plan->w13.n_tiles) + most_experts);
    plan->partial = take(static_cast<uint64_t>(pairs) * p.moe.hidden_size * (wgmma ? 2 * plan->w2.warps_k : 4));
    plan->tiles = take(16 * (static_cast<uint64_t>(plan->max_tiles) + 1));
    plan->sorted_pairs = take(8 * static_cast<uint64_t>(pairs));
    if (wgmma) plan->prepared = take(static_cast<uint64_t>(p.moe.w13.perm ? pairs : p.tokens) * w13.units * 128);
  }
  plan->workspace_bytes = end;
  return QM_OK;
}
