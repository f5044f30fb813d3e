// libFuzzer target: saved prompts as C++ reads them (packages/cpp), which C# and Python read alike. A
// cache is saved, and the file damaged, with a checksum that holds or does not. Checked:
//   - a file is refused with a reason, or loads within the cache's tensors (AddressSanitizer)
//   - an undamaged one gives the tokens, keys, values and states that were saved
#define ORT_API_MANUAL_INIT
#include "../../packages/cpp/include/quantmoe/saved_cache.h"
#include "fuzz.h"

using namespace quantmoe;

namespace {

struct Tensor {
  ONNXTensorElementDataType type;
  Ids shape;
  std::string bytes;
};

// What saved_cache.h asks ONNX Runtime: the type, shape and memory of a tensor.
const OrtApi* table() {
  static OrtApi api{};
  set_tensor_functions<Tensor>(api);
  api.ReleaseValue = [](OrtValue*) noexcept {};
  return &api;
}

// A model's cache of so many slots.
struct Cache {
  std::vector<Tensor> tensors;
  std::vector<Ort::Value> values;

  Cache(const std::vector<Past>& pasts, int64_t slots, Rng& rng) {
    for (const Past& past : pasts) {
      const Ids shape = past.shape_of(slots);
      Tensor& tensor = tensors.emplace_back(past.type, shape, std::string(element_count(shape) * past.size, 0));
      random_bytes(rng, tensor.bytes.data(), tensor.bytes.size());
    }
    for (Tensor& tensor : tensors) values.emplace_back(reinterpret_cast<OrtValue*>(&tensor));
  }
  // The part of its first tokens, or a state.
  std::string part(const Past& past, size_t i, int64_t length) {
    const Pieces pieces(past, values[i], length);
    std::string found;
    for (int64_t piece = 0; piece < pieces.count; ++piece)
      found.append(pieces.data + piece * pieces.stride, pieces.bytes);
    return found;
  }
};

std::vector<Past> model_of(FuzzedDataProvider& data) {
  std::vector<Past> pasts;
  const auto add = [&](const std::string& name, ONNXTensorElementDataType type, Ids shape) {
    Tensor tensor{type, std::move(shape), ""};
    pasts.emplace_back(name, Ort::ConstTensorTypeAndShapeInfo{reinterpret_cast<OrtTensorTypeAndShapeInfo*>(&tensor)});
  };
  const int layers = data.ConsumeIntegralInRange(1, 2);
  for (int layer = 0; layer < layers; ++layer) {
    const std::string name = "past_key_values." + std::to_string(layer);
    const int64_t window = data.ConsumeIntegralInRange(1, 2), heads = data.ConsumeIntegralInRange(1, 2);
    const auto type = data.PickValueInArray({ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
                                             ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8});
    if (data.ConsumeBool()) {
      add(name + ".key", type, {-1, heads, -1, 3});
      add(name + ".value", type, {-1, heads, -1, 2});
    } else {
      Ids conv{-1, 3, 2}, state{-1, heads, 2, 2};
      if (window > 1) conv.insert(conv.begin(), window), state.insert(state.begin(), window);
      add(name + ".conv_state", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, conv);
      add(name + ".recurrent_state", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, state);
    }
  }
  return pasts;
}

void damage_state(FuzzedDataProvider& data, std::string& file) {
  static const char* const kPieces[] = {"@-5",
                                        "@99999999999999999999",
                                        "[18446744073709551615]",
                                        "\"",
                                        "{",
                                        "}",
                                        ", ",
                                        "-1",
                                        "\"shape\"",
                                        "\"tokens\"",
                                        "\"checksum\"",
                                        "__metadata__"};
  damage(data, file, [&](size_t at) {
    if (data.ConsumeBool())
      file.replace(at, data.ConsumeIntegralInRange<size_t>(0, 4), data.PickValueInArray(kPieces));
    else if (const size_t digit = file.find_first_of("0123456789", at); digit != file.npos)  // of the header
      file[digit] = static_cast<char>('0' + data.ConsumeIntegralInRange(0, 9));
  });
  if (file.size() < 12 || !data.ConsumeBool()) return;
  const uint32_t sum = crc32(0, file.data(), static_cast<int64_t>(file.size()) - 4);
  std::memcpy(&file[file.size() - 4], &sum, 4);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  static const bool ready = (Ort::InitApi(table()), true);
  static const std::filesystem::path path = own_file("state");
  if (!ready) return 0;
  FuzzedDataProvider data(bytes, size);
  Rng rng(data.ConsumeIntegral<uint32_t>());
  const std::vector<Past> pasts = model_of(data);
  Ids tokens(data.ConsumeIntegralInRange<size_t>(1, 6));
  for (int64_t& token : tokens) token = data.ConsumeIntegralInRange<int64_t>(0, 3);
  const int64_t length = static_cast<int64_t>(tokens.size()), slots = length + data.ConsumeIntegralInRange(0, 3);
  Cache saved(pasts, slots, rng), loaded(pasts, slots, rng);
  Ends ends;
  const bool hybrid = std::any_of(pasts.begin(), pasts.end(), [](const Past& past) { return past.is_state(); });
  if (hybrid && length > 1 && data.ConsumeBool()) ends[length - 1] = states_of(pasts, saved.values);
  std::filesystem::remove(path);  // a damaged one, which is never replaced
  save_state(path, "model", tokens, pasts, saved.values, ends);
  const std::string whole = read_file(path);
  std::string file = whole;
  damage_state(data, file);
  if (file != whole) write_file(path, file);
  try {
    StateFile found(path, "model", pasts);
    const int64_t kept = static_cast<int64_t>(found.tokens().size());
    if (kept > slots) return 0;
    for (size_t i = 0; i < pasts.size(); ++i) found.load_into(pasts[i], kept, loaded.values[i]);
    for (const auto& [end, states] : found.load_ends(kept)) CHECK(end <= kept, "an end at %lld", (long long)end);
    if (file != whole) return 0;
    CHECK(found.tokens() == tokens, "the tokens do not come back");
    for (size_t i = 0; i < pasts.size() && kept; ++i)
      CHECK(loaded.part(pasts[i], i, kept) == saved.part(pasts[i], i, kept), "%s does not come back",
            pasts[i].name.c_str());
  } catch (const std::runtime_error& why) {
    CHECK(file != whole, "a whole file is refused: %s", why.what());
    CHECK(why.what()[0], "a refusal without a reason");
  }
  return 0;
}
