// RegisterCustomOps of both libraries.
#pragma once
#include <deque>
#include <string>

#include "common/operator.h"

namespace quantmoe {

// Appends a library's operators.
using Fill = void (*)(const OrtApi* api, std::deque<Op>& ops);
// Which operators sessions with these options get.
using Choose = Fill (*)(const OrtApi* api, const OrtSessionOptions* options);

// RegisterCustomOps of the library for a provider; choose(api, options) says which operators the session gets. Options
// that have them stay as they are: ONNX Runtime would refuse the domain a second time. The entry says so to other
// copies of the library, too, and goes with the options when they are cloned.
OrtStatus* register_ops(OrtSessionOptions* options, const OrtApiBase* base, const std::string& provider, Choose choose);

}  // namespace quantmoe
