#include "common/registration.h"

#if defined(_WIN32)
#define NOMINMAX
#include <windows.h>
#elif defined(__APPLE__)
#include <dlfcn.h>
#endif

#include <algorithm>
#include <cstdio>
#include <list>
#include <mutex>
#include <stdexcept>

#include "common/entries.h"

namespace quantmoe {
namespace {

// What the sessions of one ONNX Runtime refer to; a process may hold several runtimes. Never destroyed: a session may
// still run on another thread while the process exits, and the library stays loaded (nodelete, CMakeLists.txt).
struct Registration {
  const OrtApi* api;
  Fill fill;
  const ExpertSettings experts;
  const GroupSettings group;
  const bool one_logit;
  std::deque<Op> ops;
  OrtCustomOpDomain* domain = nullptr;

  Registration(const OrtApi* api, Fill fill, bool lists_entries, const ExpertSettings& experts,
               const GroupSettings& group, bool one_logit)
      : api(api), fill(fill), experts(experts), group(group), one_logit(one_logit) {
    fill(api, ops);
    for (Op& op : ops) {
      op.lists_entries = lists_entries;
      op.experts = &this->experts;
      op.group = &this->group;
      op.one_logit = one_logit;
    }
    OrtStatus* status = api->CreateCustomOpDomain("quantmoe", &domain);
    for (const Op& op : ops)
      if (!status) status = api->CustomOpDomain_Add(domain, &op);
    if (!status) return;
    api->ReleaseStatus(status);
    throw std::runtime_error("quantmoe: ONNX Runtime refuses the operator domain");
  }
};

// The library stays when ONNX Runtime unloads it. On Linux a link option sees to it (CMakeLists.txt).
void stay() {
#if defined(_WIN32)
  HMODULE self;
  (void)GetModuleHandleExW(GET_MODULE_HANDLE_EX_FLAG_PIN | GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS,
                           reinterpret_cast<LPCWSTR>(&stay), &self);
#elif defined(__APPLE__)
  if (Dl_info self; dladdr(reinterpret_cast<const void*>(&stay), &self))
    (void)dlopen(self.dli_fname, RTLD_NOW | RTLD_NODELETE);
#endif
}

}  // namespace

OrtStatus* register_ops(OrtSessionOptions* options, const OrtApiBase* base, const std::string& provider,
                        Choose choose) {
  stay();
  const OrtApi* api = base->GetApi(kOrtApi);
  if (!api) {
    const std::string message =
        std::string("quantmoe needs ONNX Runtime 1.21 or newer, found ") + base->GetVersionString();
    return base->GetApi(1)->CreateStatus(ORT_NOT_IMPLEMENTED, message.c_str());
  }
  OrtStatus* status = nullptr;
  OrtStatus* failure = guard(api, [&] {
    static std::mutex mutex;
    static auto& all = *new std::list<Registration>;
    const std::lock_guard lock(mutex);
    if (const std::string found = session_entry(api, options, kRegistered); found != "") {
      if (found == provider) return;
      throw std::invalid_argument("quantmoe: these session options have the " + found +
                                  "'s library, expected that or the " + provider + "'s, not both");
    }
    int minor = 0;
    const bool lists_entries = std::sscanf(base->GetVersionString(), "1.%d", &minor) == 1 && minor >= kListsEntries;
    std::string seen;
    if (lists_entries) seen = entries_text(api, options);
    const Fill fill = choose(api, options);
    const ExpertSettings experts = expert_settings(api, options);
    const GroupSettings group = group_settings(api, options);
    const bool one_logit = is_on(api, options, "quantmoe.one_logit");
    (void)group.patience();
    if (provider != "CPU") experts.check_cuda();
    auto r = std::find_if(all.begin(), all.end(), [&](const Registration& r) {
      return r.api == api && r.fill == fill && r.experts == experts && r.group == group && r.one_logit == one_logit;
    });
    if (r == all.end()) r = all.emplace(all.end(), api, fill, lists_entries, experts, group, one_logit);
    status = api->AddCustomOpDomain(options, r->domain);
    if (!status) status = api->AddSessionConfigEntry(options, kRegistered, provider.c_str());
    if (!status && lists_entries) status = api->AddSessionConfigEntry(options, kSeen, seen.c_str());
  });
  return failure ? failure : status;
}

}  // namespace quantmoe
