// Launches what calls.py has written, and calls what does not come from a graph, with addresses that are none. The
// driver is fake_driver.cc, which prints what arrives.
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

template <class T>
T of(const std::string& hex) {
  T found{};
  const std::vector<char> bytes = bytes_of(hex);
  if (bytes.size() != sizeof(T)) std::printf("%zu bytes, expected %zu\n", bytes.size(), sizeof(T));
  std::memcpy(&found, bytes.data(), sizeof(T));
  return found;
}

// A struct of nothing but addresses.
template <class T>
T addresses() {
  T all;
  for (size_t i = 0; i < sizeof(T) / 8; ++i) {
    const uint64_t address = (i + 1) << 32;
    std::memcpy(reinterpret_cast<char*>(&all) + 8 * i, &address, 8);
  }
  return all;
}

int run(const std::string& line, const qm_cuda_device& device) {
  std::istringstream words(line);
  std::string kind, name, first, inputs, outputs;
  words >> kind;
  if (kind == "node") words >> name;
  words >> first >> inputs >> outputs;
  if (kind == "moe") {
    const auto problem = of<qm_cuda_problem>(first);
    auto tensors = addresses<qm_cuda_tensors>();
    tensors.rows = nullptr;
    qm_cuda_plan plan;
    if (qm_cuda_plan_moe(&problem, &device, &plan, error)) return say("moe", 1);
    return say("moe", qm_cuda_launch(&problem, &plan, &tensors, stream, error));
  }
  if (kind == "linear") {
    const auto problem = of<qm_cuda_linear_problem>(first);
    const auto tensors = addresses<qm_cuda_linear_tensors>();
    qm_cuda_plan plan;
    if (qm_cuda_plan_linear(&problem, &device, &plan, error)) return say("linear", 1);
    return say("linear", qm_cuda_launch_linear(&problem, &plan, &tensors, stream, error));
  }
  if (kind == "attention") {
    const auto problem = of<qm_cuda_attention_problem>(first);
    const auto tensors = addresses<qm_cuda_attention_tensors>();
    qm_cuda_attention_plan plan;
    if (qm_cuda_plan_attention(&problem, &device, &plan, error)) return say("attention", 1);
    return say("attention", qm_cuda_launch_attention(&problem, &plan, &tensors, stream, error));
  }
  const std::vector<char> node = bytes_of(first), in = bytes_of(inputs), out = bytes_of(outputs);
  const auto tensors = [](const std::vector<char>& all) { return reinterpret_cast<const qm_tensor*>(all.data()); };
  qm_cuda_node_plan plan;
  const qm_cuda_call call{tensors(in), tensors(out), reinterpret_cast<void*>(uint64_t{99} << 32), stream};
  if (qm_cuda_plan_node(name.c_str(), node.data(), tensors(in), &device, &plan, error)) return say(name.c_str(), 1);
  return say(name.c_str(), qm_cuda_launch_node(name.c_str(), node.data(), &plan, &call, error));
}

// What programs call beside a graph.
int run_others() {
  qm_cuda_choice_problem choice{};
  choice.type = QM_BF16, choice.batch = 2, choice.vocabulary = 32000, choice.temperature = 1, choice.top_p = 0.9;
  const auto chosen = addresses<qm_cuda_choice_tensors>();
  int failed = say("choice", qm_cuda_launch_choice(&choice, &chosen, stream, error));
  void *own = nullptr, *memory = nullptr, *host = nullptr;
  failed |= say("open_stream", qm_cuda_open_stream(&own, error));
  failed |= say("allocate", qm_cuda_allocate(1000, &memory, error));
  failed |= say("host_memory", qm_cuda_host_memory(100, &host, error));
  failed |= say("copy", qm_cuda_copy(memory, 100, host, 50, 20, 2, own, error));
  failed |= say("wait", qm_cuda_wait(own, error));
  failed |= say("clear_box", qm_cuda_clear_box(2, memory, own, error));
  failed |= say("free", qm_cuda_free(memory, error));
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
