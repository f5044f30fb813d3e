// The other ranks of an engine that is a slice of a model. The environment says how they meet
// (docs/reference/slices.md): QUANTMOE_GROUP has the NCCL id, or QUANTMOE_GROUP_FILE names the file where rank 0
// writes one.
#pragma once
#include "ranks/nccl.h"

namespace quantmoe {

// The process's communicator, made at the first call, on the current device, with all other ranks: an NCCL id serves
// once, so it stays to the end of the process, for all engines. Throws std::runtime_error or std::invalid_argument
// where the ranks do not meet, now and later, and, in all ranks, for another rank than the process is and for another
// export than they have met with. `place` has no group.
const Communicator& communicator_of(const Place& place);

}  // namespace quantmoe
