// Launches what calls.py has written, and calls what does not come from a graph, with addresses that are none. The
// driver is fake_driver.cc, which prints what arrives.
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "quantmoe/quant_moe_cuda.h"

namespace {

const auto stream = reinterpret_cast<void*>(16);
char error[QM_ERROR_SIZE];

int say(const char* what, int status) {
  std::printf("%s: %s\n", what, status ? error : "launched");
  return status;
}

std::vector<char> bytes_of(const std::string& hex) {
  std::vector<char> bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2)
    bytes.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  return bytes;
}

int run(const std::string& line, const qm_cuda_device& device) {
  std::istringstream words(line);
  std::string op;
  words >> op;
  std::vector<std::vector<char>> structs;  // node, inputs, outputs, perhaps experts outside the device's memory
  for (std::string hex; words >> hex;) structs.push_back(bytes_of(hex));
  const auto tensors = [&](size_t i) { return reinterpret_cast<const qm_tensor*>(structs[i].data()); };
  qm_cuda_call call{tensors(1), tensors(2), reinterpret_cast<void*>(uint64_t{99} << 32), stream, nullptr, nullptr};
  if (structs.size() > 3) call.experts = reinterpret_cast<const qm_cuda_experts*>(structs[3].data());
  qm_cuda_node_plan plan;
  if (qm_cuda_plan_node(op.c_str(), structs[0].data(), &call, &device, &plan, error)) return say(op.c_str(), 1);
  return say(op.c_str(), qm_cuda_launch_node(op.c_str(), structs[0].data(), &plan, &call, error));
}

// What programs call beside a graph.
int run_others() {
  qm_cuda_choice choice{};
  choice.type = QM_BF16, choice.batch = 2, choice.vocabulary = 32000, choice.temperature = 1, choice.top_p = 0.9;
  uint64_t address = 0;
  for (size_t at = offsetof(qm_cuda_choice, logits); at < sizeof choice; at += 8) {
    address += uint64_t{1} << 32;
    std::memcpy(reinterpret_cast<char*>(&choice) + at, &address, 8);
  }
  int failed = say("choice", qm_cuda_launch_choice(&choice, stream, error));
  void *own = nullptr, *memory = nullptr, *host = nullptr;
  failed |= say("open_stream", qm_cuda_open_stream(&own, error));
  failed |= say("allocate", qm_cuda_allocate(1000, &memory, error));
  failed |= say("host_memory", qm_cuda_host_memory(100, &host, error));
  failed |= say("copy", qm_cuda_copy(memory, 100, host, 50, 20, 2, own, error));
  failed |= say("wait", qm_cuda_wait(own, error));
  failed |= say("free", qm_cuda_free(memory, error));
  failed |= say("allocate_box", qm_cuda_allocate_box(2, &memory, error));
  return failed;
}

}  // namespace

int main(int, char** arguments) {
  qm_cuda_device device{};
  if (say("query", qm_cuda_query(0, &device, error))) return 1;
  std::printf("%d %d %d\n", device.sm, device.multiprocessors, device.shared_bytes);
  int failed = 0;
  std::ifstream lines(arguments[1]);
  for (std::string line; std::getline(lines, line);) failed |= run(line, device);
  return failed | run_others();
}
