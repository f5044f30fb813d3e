// libFuzzer target: what a session is told in words, and the traces of experts that it reads. The input chooses
// settings, mostly words that are near valid ones, and damages a trace. Checked:
//   - settings are taken, or refused with a reason; what is taken is in its range
//   - a trace is refused with a reason, or has layers and experts of the model alone; an undamaged one is what was
//     written
#include <memory>
#include <stdexcept>

#include "experts/experts.h"
#include "fuzz.h"
#include "ranks/place.h"

using namespace quantmoe;

namespace {

std::string word(FuzzedDataProvider& data) {
  static const char* const kWords[] = {"",    "disk",      "host", "auto", "gpu", "cpu", "copy", "24*copy,24*cpu",
                                       "50%", "3*40%,cpu", "1",    "512",  "0",   ",",   "*",    "%",
                                       "1*",  "65536*cpu", "101%"};
  std::string text = data.PickValueInArray(kWords);
  switch (data.ConsumeIntegralInRange(0, 5)) {
    case 0:
      return data.ConsumeRandomLengthString(24);
    case 1:
      text += data.ConsumeRandomLengthString(4);
      break;
    case 2:
      text += std::to_string(data.ConsumeIntegral<int64_t>());
      break;
    default:
      break;
  }
  return text;
}

template <class Body>
bool is_taken(const Body& body) {
  try {
    body();
    return true;
  } catch (const std::invalid_argument& why) {
    CHECK(why.what()[0], "a refusal without a reason");
    return false;
  }
}

void settings(FuzzedDataProvider& data) {
  ExpertSettings given;
  for (std::string* each : {&given.experts, &given.ram, &given.reserve, &given.trace, &given.gpu_memory, &given.misses,
                            &given.threads, &given.warm})
    if (data.ConsumeBool()) *each = word(data);
  given.of_environment = data.ConsumeBool();
  is_taken([&] { given.check(); });
  if (is_taken([&] { given.check_cuda(); }))
    for (const int32_t share : given.host_shares()) CHECK(share >= 0 && share <= 256, "a share of %d", share);
  if (is_taken([&] { (void)given.ram_bytes(); })) CHECK(given.ram_bytes() >= -1, "%lld", (long long)given.ram_bytes());
  GroupSettings group;
  group.timeout = word(data);
  if (is_taken([&] { (void)group.patience(); }))
    CHECK(group.patience().count() >= 1 && group.patience().count() <= 86400, "%s", group.timeout.c_str());
}

// Layers of a model, as a session of it has them.
std::unique_ptr<Experts> experts_of(const std::string& trace, const std::string& warm,
                                    const std::vector<int64_t>& layers) {
  ExpertSettings given;
  given.trace = trace;
  given.warm = warm;
  auto experts = std::make_unique<Experts>(given);
  for (size_t i = 0; i < layers.size(); ++i) {
    ExpertLayer layer;
    layer.node = "layer " + std::to_string(i);
    layer.experts = layers[i];
    for (ExpertLayer::Tensor& tensor : layer.tensors) tensor.row_bytes = 64;
    experts->add(std::move(layer));
  }
  return experts;
}

void trace(FuzzedDataProvider& data) {
  static const std::string path = own_file("trace");
  std::filesystem::remove(path);  // what is no trace is not written over
  std::vector<int64_t> layers(data.ConsumeIntegralInRange<size_t>(1, 3));
  for (int64_t& experts : layers) experts = data.ConsumeIntegralInRange(1, 9);
  struct Call {
    int layer;
    int64_t tokens, top_k;
    std::vector<int32_t> ids;
  };
  std::vector<Call> calls(data.ConsumeIntegralInRange<size_t>(0, 4));
  {
    const auto writer = experts_of(path, "", layers);
    writer->start();
    for (Call& call : calls) {
      call.layer = data.ConsumeIntegralInRange<int>(0, static_cast<int>(layers.size()) - 1);
      call.tokens = data.ConsumeIntegralInRange(0, 5);
      call.top_k = data.ConsumeIntegralInRange(1, 3);
      for (int64_t i = 0; i < call.tokens * call.top_k; ++i)
        call.ids.push_back(data.ConsumeIntegralInRange<int32_t>(
            -1, static_cast<int32_t>(layers[static_cast<size_t>(call.layer)]) - 1));
      writer->trace(call.layer, call.ids.data(), call.tokens, call.top_k);
    }
  }
  const std::string whole = read_file(path);
  std::string file = whole;
  damage(data, file, [&](size_t at) {
    if (data.ConsumeBool()) {
      file.append(data.ConsumeRandomLengthString(20));
    } else if (const size_t word = file.find('\n') + 1 + at / 2 * 2; word + 2 <= file.size()) {  // of a record
      const uint16_t value =
          data.ConsumeBool() ? data.ConsumeIntegral<uint16_t>() : data.ConsumeIntegralInRange<uint16_t>(0, 9);
      std::memcpy(&file[word], &value, 2);
    }
  });
  write_file(path, file);
  if (data.ConsumeIntegralInRange(0, 7) == 0) layers[0] = data.ConsumeIntegralInRange(1, 9);
  const auto reader = experts_of("", path, layers);
  try {
    const Trace found = reader->read_warm();
    CHECK(found.runs.size() == layers.size(), "%zu layers", found.runs.size());
    size_t runs = 0;
    for (size_t i = 0; i < layers.size(); ++i)
      for (const Trace::Run& run : found.runs[i]) {
        ++runs;
        for (const uint16_t id : run.ids) CHECK(id < layers[i], "expert %d of %lld", id, (long long)layers[i]);
      }
    for (const auto& [layer, expert] :
         found.most_used(5, data.ConsumeIntegralInRange<int>(-1, static_cast<int>(layers.size()) - 1)))
      CHECK(expert < layers[static_cast<size_t>(layer)], "expert %lld", (long long)expert);
    if (file != whole) return;
    CHECK(runs == calls.size(), "%zu records, %zu were written", runs, calls.size());
    std::vector<size_t> next(layers.size());
    for (const Call& call : calls) {
      const Trace::Run& run = found.runs[static_cast<size_t>(call.layer)][next[static_cast<size_t>(call.layer)]++];
      std::vector<uint16_t> ids;
      for (const int32_t id : call.ids)
        if (id >= 0) ids.push_back(static_cast<uint16_t>(id));
      CHECK(run.tokens == call.tokens && run.top_k == call.top_k && run.ids == ids, "another record");
    }
  } catch (const std::runtime_error& why) {
    CHECK(why.what()[0], "a refusal without a reason");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  FuzzedDataProvider data(bytes, size);
  (data.ConsumeIntegralInRange(0, 3) ? trace : settings)(data);
  return 0;
}
