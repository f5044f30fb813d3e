// Memory of ranks that write to each other's. Pure: no CUDA.
#include "cuda/ranks/peers.h"

using namespace quantmoe;

size_t qm_cuda_box_bytes(int32_t world) { return box_bytes(world); }
