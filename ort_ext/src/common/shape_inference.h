// Shapes of a node's outputs in a graph, from op.def.
#pragma once
#include "common/operator.h"

namespace quantmoe {

// Sets the outputs' shapes to what op.def states. Inputs that contradict op.def are the node's to refuse. An output is
// left out where its rank or a size is not known.
void infer_shapes(const Op& op, OrtShapeInferContext* context);

}  // namespace quantmoe
