// The other ranks of an engine that is a slice of a model. The environment says how they meet
// (docs/reference/slices.md): QUANTMOE_GROUP has the NCCL id, or QUANTMOE_GROUP_FILE names the file where rank 0
// writes one.
#pragma once
#include "ranks/nccl.h"

namespace quantmoe {

// The process's communicator with all other ranks. The first call makes it, on the current device. An NCCL id serves
// once, so it stays to the end of the process, for all engines. Throws std::runtime_error or std::invalid_argument, now
// and later, if the ranks do not meet. Throws in all ranks if this process is another rank, or if the ranks met with
// another export. `place` has no group.
const Communicator& communicator_of(const Place& place);

}  // namespace quantmoe
