#include "cpu/moe/layer.h"

#include <cstring>

// With 256 MiB each slice of a large layer has a block of rows or more for an expert. So slices stream the weights
// hardly more often than blocks do.
int64_t qm_slice_bytes = int64_t{256} << 20;

namespace quantmoe {

void LayerCall::divide(size_t bytes) {
  const int64_t most = std::max<int64_t>(tokens, 1), token_bytes = ceil_div(static_cast<int64_t>(bytes), most);
  slices = ceil_div(most, std::max<int64_t>(qm_slice_bytes / std::max<int64_t>(token_bytes, 1), 1));
  tokens = ceil_div(all_tokens, slices);
  // A task has no more rows than there are tokens. An expert has more rows only if a token asks for it twice. It is
  // then several blocks.
  block_rows = std::clamp<int64_t>(tokens, 1, kBlockRows);
  tile_rows = std::min<int64_t>(block_rows, kernel.tile_rows);
}

// The part at `offset` of an expert's row, of a side, or of both where there is one.
const void* ExpertMatrix::vector(int64_t expert, int64_t offset, int count, int side) const {
  return count ? row(expert) + offset + (side < count ? side : count - 1) * parts.vector : nullptr;
}

const float* ExpertMatrix::pre_scales(int64_t expert, int side) const {
  return static_cast<const float*>(vector(expert, parts.pre_scales, node.pre_scale, side));
}

Preparation ExpertMatrix::preparation(int64_t expert, int side, bool gather) const {
  Preparation out{};
  if (!rotated) out.pre_scale = pre_scales(expert, side);
  if (has_input_scales(node)) out.stored = reinterpret_cast<const float*>(row(expert) + parts.input_scales)[side];
  if (gather) out.perm = static_cast<const int32_t*>(vector(expert, parts.perms, node.perm, side));
  return out;
}

Preparation ExpertMatrix::known_preparation(int64_t expert, int side, bool gather) const {
  Preparation how = preparation(expert, side, gather);
  if (node.activation_format != k_activation_format_fp8_tensor || how.stored != 0.0f) return how;
  float found;
  std::memcpy(&found, largest + expert * sides + side, 4);
  const float step = found / 448.0f;
  how.stored = step > 0.0f ? step : 1.0f;
  return how;
}

bool ExpertMatrix::check_perm(const int32_t* perm, int64_t expert) {
  uint32_t last = 0;
  for (int64_t k = 0; k < panel.k; ++k) last = std::max(last, static_cast<uint32_t>(perm[k]));
  if (last < static_cast<uint64_t>(panel.k)) return true;
  __atomic_store_n(&bad_perm, expert, __ATOMIC_RELAXED);
  return false;
}

int ExpertMatrix::check_perms(const char* name, int32_t expert_offset, char* err) const {
  if (bad_perm < 0) return QM_OK;
  return fail(err, QM_INVALID,
              "%s's act-order of expert %lld has columns outside 0 to %lld: not the bytes of a packed tensor", name,
              (long long)(bad_perm + expert_offset), (long long)(panel.k - 1));
}

}  // namespace quantmoe
