// What plan and kernels of the nodes between the products share: MoERouting, MoERouter, AddRMSNorm, AddRMSNormRouter,
// TokenRows.
#pragma once
#include "cuda/common/host_device.h"
#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {

QM_CONSTEXPR int logits_of(const qm_routing& r) { return r.num_experts + r.shared_gate; }
QM_CONSTEXPR int slots_of(const qm_routing& r) { return r.top_k + r.shared_experts; }
// Shared memory that a warp selects a token's experts in: a word a logit, 1 an expert, 1 a group, 1 a selected one.
constexpr int select_words(const qm_routing& r) { return logits_of(r) + r.num_experts + r.n_group + r.top_k; }

// What chosen has in a router's qm_cuda_node_plan: a RouterPath; blocks of a cluster.
enum RouterChoice { kRouterPath = 0, kRouterBlocks = 1 };
// MoERouter's kernels.
enum RouterPath {
  kRouterCluster = 0,  // a cluster for eight tokens: a block has the weights of some experts, and selects for a token
  kRouterRows = 1,     // a warp an expert of a token, then moe_select
  kRouterTiles = 2,    // mma.sync on tiles of tokens and experts, then moe_select
};
constexpr int kRouterThreads = 512, kRouterWarps = kRouterThreads / 32;  // of a block of a cluster
constexpr int kRouterTokens = 8;     // of a cluster: its first blocks select for one each
constexpr int kRouterMostTiles = 5;  // of 16 experts a block has
constexpr int kRouterFewPieces = 4;  // of a warp, of 32 columns: with fewer registers blocks begin beside those before
constexpr int kRouterFew = 32;       // tokens up to which weights are read again for each cluster or token
constexpr int kRouterRowsThreads = 128;
constexpr int kRouterTileTokens = 32, kRouterTileExperts = 64, kRouterTileColumns = 64, kRouterStages = 8;
constexpr int kRouterTileThreads = 256;
constexpr int kRouterTileBytes = kRouterStages * (kRouterTileTokens + kRouterTileExperts) * kRouterTileColumns * 2;
// Blocks of a cluster: 8, which every GPU with clusters runs, or 16 for more experts. A cluster of 16 has to lie in one
// of at most eight groups of multiprocessors (GPCs). More than 8 * 14 multiprocessors fill one.
constexpr int router_cluster_of(const qm_routing& r, const qm_cuda_device& device) {
  return device.sm == 90 && device.multiprocessors > 112 && r.num_experts > 128 ? 16 : 8;
}
// Of a shared gate's row the last block has a part besides.
constexpr int router_tiles_of(const qm_routing& r, int blocks) {
  return ((r.num_experts + blocks - 1) / blocks + 15) / 16;
}
// Dynamic shared memory of a block of a cluster.
constexpr int router_shared(const qm_routing& r, int blocks) {
  return 4 * (kRouterWarps * router_tiles_of(r, blocks) * 16 * kRouterTokens + select_words(r));
}
// Of a MoERouter or AddRMSNormRouter: MoERouting's attributes.
template <class Router>
constexpr qm_routing routing_of(const Router& r) {
  static_assert(sizeof(qm_router) == sizeof(qm_routing) + sizeof(r.hidden_size) &&
                    sizeof(qm_norm_router) == sizeof(qm_router) + sizeof(qm_norm_router::norm_epsilon),
                "these have MoERouting's attributes: a new one is in all three");
  return {r.op_version, r.num_experts,           r.top_k,          r.method,     r.renormalize, r.n_group,
          r.topk_group, r.routed_scaling_factor, r.shared_experts, r.shared_gate};
}

constexpr int kMostNormThreads = 1024;
constexpr int kRowsThreads = 1024;

}  // namespace quantmoe
