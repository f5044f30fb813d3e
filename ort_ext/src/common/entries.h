// The session entries quantmoe.*: which there are, and what they say.
#pragma once
#include <string>

#include "common/ort_api.h"
#include "experts/experts.h"
#include "ranks/place.h"

namespace quantmoe {

// The registration leaves in the options which library they have.
constexpr const char* kRegistered = "quantmoe.registered";
// And what the entries were, as entries_text returns them.
constexpr const char* kSeen = "quantmoe.seen";

// The entries of session options. Throws std::invalid_argument for a name that is not an entry.
std::string entries_text(const OrtApi* api, const OrtSessionOptions* options);

// Throws where a session's entries are others than those that the library was registered with.
void check_entries(const OrtApi* api, const OrtKernelInfo* info);

// Whether sessions with these options compare all bytes of the packed weights when they are created.
bool wants_verify(const OrtApi* api, const OrtSessionOptions* options);

// What sessions with these options do with experts.
ExpertSettings expert_settings(const OrtApi* api, const OrtSessionOptions* options);

// Which ranks of a sliced model a session adds up with, and how long it waits for them.
GroupSettings group_settings(const OrtApi* api, const OrtSessionOptions* options);

}  // namespace quantmoe
