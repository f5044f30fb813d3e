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

// Whether an entry that is 0 or 1 is 1. Throws std::invalid_argument for another value.
bool is_on(const OrtApi* api, const OrtSessionOptions* options, const std::string& entry);

// What sessions with these options do with experts.
ExpertSettings expert_settings(const OrtApi* api, const OrtSessionOptions* options);

// Which ranks of a sliced model a session adds up with, and how long it waits for them.
GroupSettings group_settings(const OrtApi* api, const OrtSessionOptions* options);

}  // namespace quantmoe
