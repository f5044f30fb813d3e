// Token ids in, token ids out: an exported model's session and the KV cache of a text. Needs ONNX Runtime alone.
#pragma once

#include <onnxruntime_cxx_api.h>
#include <quantmoe/saved_cache.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <shared_mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace quantmoe {

// The model is closed, or was closed while it answered.
struct Closed : std::runtime_error {
  Closed() : std::runtime_error("the model is closed; open it again") {}
};

// The answer was cancelled.
struct Cancelled : std::runtime_error {
  Cancelled() : std::runtime_error("the answer was cancelled") {}
};

// Ends an answer within a step, from any thread. Copies end the same answers.
class Cancel {
 public:
  // Ends the answers that were begun with this, and those that will be.
  void cancel() const {
    const std::lock_guard lock(shared_->gate);
    shared_->asked = true;
    if (shared_->run) shared_->run->SetTerminate();
  }

 private:
  friend class TokenCache;
  struct Shared {
    std::mutex gate;
    bool asked = false;
    Ort::RunOptions* run = nullptr;
  };
  void set(Ort::RunOptions* run) const {
    const std::lock_guard lock(shared_->gate);
    shared_->run = run;
  }
  void check() const {
    const std::lock_guard lock(shared_->gate);
    if (shared_->asked) throw Cancelled();
  }
  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

// What an answer gives, as it comes: the range of one loop.
template <typename T>
class Stream {
 public:
  explicit Stream(std::function<std::optional<T>()> next) : next_(std::move(next)) {}

  // The next item; nothing at the end.
  std::optional<T> next() { return next_(); }

  class Iterator {
   public:
    using value_type = T;
    using difference_type = std::ptrdiff_t;
    explicit Iterator(Stream* stream) : stream_(stream), item_(stream->next()) {}
    const T& operator*() const { return *item_; }
    Iterator& operator++() { return item_ = stream_->next(), *this; }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const { return !item_; }

   private:
    Stream* stream_;
    std::optional<T> item_;
  };
  Iterator begin() { return Iterator(this); }
  std::default_sentinel_t end() const { return {}; }

 private:
  std::function<std::optional<T>()> next_;
};

// An exported folder that is open. Copies are the same model, and any thread may use them.
class Model {
 public:
  // Opens a folder that `quantmoe export` wrote. `configure` changes the session's options, for example threads,
  // entries or an execution provider. The environment variable QUANTMOE_ORT_LIBRARY names the library of the operators.
  // Without it the folder's copy is loaded, which is native code of whoever exported the folder.
  explicit Model(const std::filesystem::path& folder, const std::function<void(Ort::SessionOptions&)>& configure = {})
      : open_(std::make_shared<Open>()) {
    static Ort::Env environment(ORT_LOGGING_LEVEL_ERROR, "quantmoe");
    Ort::SessionOptions options;
    if (configure) configure(options);
    const char* own = std::getenv("QUANTMOE_ORT_LIBRARY");
    const std::filesystem::path library = own ? std::filesystem::path(own) : folder / kLibrary;
    options.RegisterCustomOpsLibrary(library.c_str());  // reads the session's entries
    open_->folder = folder;
    open_->session.emplace(environment, (folder / "model.onnx").c_str(), options);
    read_metadata();
  }

  // The folder as it was given.
  const std::filesystem::path& folder() const { return open_->folder; }

  // An entry of the model's metadata; nothing if there is none.
  std::optional<std::string> metadata(const std::string& name) const {
    const auto found = open_->metadata.find(name);
    return found == open_->metadata.end() ? std::nullopt : std::optional(found->second);
  }

  // The most tokens of a text, prompt and answers together.
  size_t context_length() const { return open_->context_length; }

  // The ids of the tokens after which an answer ends.
  const Ids& stop_tokens() const { return open_->stop_tokens; }

  // Cancels answers that are being generated, waits for their last step, and closes the model. Later calls throw
  // Closed.
  void close() const {
    open_->closing = true;
    {
      const std::lock_guard lock(open_->runs_gate);
      for (Ort::RunOptions* run : open_->runs) run->SetTerminate();
    }
    const std::unique_lock lock(open_->gate);
    open_->session.reset();
  }

  void check_open() const {
    if (open_->closing) throw Closed();
  }

 private:
  friend class TokenCache;
#if defined(_WIN32)
  static constexpr const char* kLibrary = "quantmoe_ort.dll";
#elif defined(__APPLE__)
  static constexpr const char* kLibrary = "libquantmoe_ort.dylib";
#else
  static constexpr const char* kLibrary = "libquantmoe_ort.so";
#endif

  struct Open {
    std::filesystem::path folder;
    std::map<std::string, std::string> metadata;
    size_t context_length,
        short_context;  // texts longer than the second are run again from their first token (longrope)
    Ids stop_tokens;
    std::vector<Past> pasts;
    std::atomic<bool> closing = false;
    std::shared_mutex gate;  // a step shares the session
    std::optional<Ort::Session> session;
    std::mutex runs_gate;
    std::set<Ort::RunOptions*> runs;
  };

  void read_metadata() {
    Ort::AllocatorWithDefaultOptions allocator;
    const Ort::Session& session = *open_->session;
    const Ort::ModelMetadata found = session.GetModelMetadata();
    for (const auto& key : found.GetCustomMetadataMapKeysAllocated(allocator))
      open_->metadata[key.get()] = found.LookupCustomMetadataMapAllocated(key.get(), allocator).get();
    const Ids context = numbers("context_length"), short_context = numbers("short_context");
    constexpr size_t kAll = std::numeric_limits<size_t>::max();
    open_->context_length = context.empty() ? kAll : context[0];
    open_->short_context = short_context.empty() ? kAll : short_context[0];
    open_->stop_tokens = numbers("eos_token_id");
    for (size_t i = 0; i < session.GetInputCount(); ++i) {
      const std::string name = session.GetInputNameAllocated(i, allocator).get();
      if (name.starts_with("past_key_values."))
        open_->pasts.emplace_back(name, session.GetInputTypeInfo(i).GetTensorTypeAndShapeInfo());
    }
  }

  // Numbers with commas between.
  Ids numbers(const std::string& name) const {
    Ids found;
    const std::string text = metadata(name).value_or("");
    for (const char *at = text.data(), *end = at + text.size(); at < end; ++at) {
      const auto [next, error] = std::from_chars(at, end, found.emplace_back());
      if (error != std::errc() || (next != end && *next != ','))
        throw std::runtime_error(folder().string() + ": " + name + " is \"" + text +
                                 "\" in the metadata, expected numbers");
      at = next;
    }
    return found;
  }

  std::shared_ptr<Open> open_;
};

// The likeliest token.
inline int64_t likeliest(std::span<float> logits) { return std::ranges::max_element(logits) - logits.begin(); }

// Options of an answer in token ids.
struct TokenOptions {
  size_t max_new_tokens = 512;
  // Gives a token id, from finite logits, which it may change.
  std::function<int64_t(std::span<float>)> choose = likeliest;
  Cancel cancel = {};
};

// What a model has read: the KV cache of one text. One thread at a time uses it. It generates one answer at a time.
// Generation that is cancelled leaves the tokens of whole steps, and goes on.
class TokenCache {
 public:
  // Makes an empty cache. With `goes_back` it keeps copies of a hybrid model's states, so that keep() goes back to the
  // end of a prompt and files of save() serve prompts that begin alike. Other models can always go back.
  explicit TokenCache(const Model& model, bool goes_back = false)
      : model_(model), pasts_(model.open_->pasts), goes_back_(goes_back && has_states()) {
    shares_ = model.metadata("past_present_share_buffer") == "true";
    for (const Past& past : pasts_) {
      cache_.push_back(allocate(past, 0));
      spare_.push_back(shares_ && past.is_state() ? allocate(past, 0) : Ort::Value(nullptr));
    }
    const std::lock_guard lock(open().runs_gate);
    model.check_open();  // close comes after this and ends the run, or has come
    open().runs.insert(&run_);
  }

  // Reads a file of save() or of `quantmoe generate --save-state`.
  static std::unique_ptr<TokenCache> load(const Model& model, const std::filesystem::path& path,
                                          bool goes_back = false) {
    auto made = std::make_unique<TokenCache>(model, goes_back);
    StateFile file(path, model.metadata("identity").value_or(""), made->pasts_);
    const size_t length = file.tokens().size();
    if (length > model.context_length())
      throw std::runtime_error(path.string() + ": has " + std::to_string(length) + " tokens, the model's context has " +
                               std::to_string(model.context_length()));
    made->shares_ ? made->reserve(length) : made->replace(length, 0);
    for (size_t i = 0; i < made->pasts_.size(); ++i)
      file.load_into(made->pasts_[i], static_cast<int64_t>(length), made->cache_[i]);
    made->states_ = file.load_ends(static_cast<int64_t>(length));
    made->read_ = file.tokens();
    return made;
  }

  ~TokenCache() {
    const std::lock_guard lock(open().runs_gate);
    open().runs.erase(&run_);
  }
  TokenCache(const TokenCache&) = delete;
  TokenCache& operator=(const TokenCache&) = delete;

  // The tokens that were read.
  const Ids& tokens() const { return read_; }

  // Goes back to the tokens with which a text begins, or as near before their end as states allow. Returns the number
  // of tokens kept, at most all of the text except the last, whose logits are needed.
  size_t keep(const Ids& ids) {
    model_.check_open();
    const size_t most = ids.empty() ? 0 : ids.size() - 1;
    size_t same = 0;
    while (same < std::min(most, read_.size()) && read_[same] == ids[same]) ++same;
    if (same < read_.size() && has_states()) {
      const auto after = states_.upper_bound(static_cast<int64_t>(same));
      same = after == states_.begin() ? 0 : static_cast<size_t>(std::prev(after)->first);
    }
    rewind(same);
    unread_.clear();
    ++answers_;
    return same;
  }

  // Reads ids after all that was read and said before, and gives the tokens of the answer as they come. A token that
  // ends the answer is the last one. The stream ends with the cache and with the next answer.
  Stream<int64_t> generate(const Ids& ids, TokenOptions options = {}) {
    model_.check_open();
    Ids next = unread_;
    next.insert(next.end(), ids.begin(), ids.end());
    if (next.empty()) throw std::invalid_argument("the prompt has no tokens");
    const size_t total = read_.size() + next.size(), context = model_.context_length();
    if (options.max_new_tokens > 0 && total >= context)
      throw std::invalid_argument(std::to_string(total) +
                                  " tokens and 1 for the answer do not fit into the model's context of " +
                                  std::to_string(context) + " tokens");
    size_t left = std::min(options.max_new_tokens, context - std::min(context, total));
    return Stream<int64_t>([this, options, next, left, answer = ++answers_]() mutable -> std::optional<int64_t> {
      if (left == 0) return std::nullopt;
      if (answer != answers_) throw std::logic_error("another answer was begun");
      const size_t steps = std::exchange(left, 0);
      std::vector<float> logits = read(next, options.cancel);
      const int64_t id = options.choose(logits);
      next = {id};
      const Ids& stop = model_.stop_tokens();
      if (std::ranges::find(stop, id) == stop.end())  // what follows an answer begins with the token that ends it
        unread_ = next, left = steps - 1;
      return id;
    });
  }

  // Writes the tokens that were read, as `quantmoe generate --save-state` does. The file has its name when all is
  // there.
  void save(const std::filesystem::path& path) {
    model_.check_open();
    save_state(path, model_.metadata("identity").value_or(""), read_, pasts_, cache_, states_);
  }

 private:
  static constexpr size_t kChunk = 512;     // prompt tokens of a step
  static constexpr size_t kTail = 8;        // tokens before a prompt's end, to whose states a hybrid model can go back
  static constexpr size_t kMostStates = 4;  // states are large

  Model::Open& open() const { return *model_.open_; }

  bool has_states() const {
    return std::ranges::any_of(pasts_, [](const Past& past) { return past.is_state(); });
  }

  static Ort::Value allocate(const Past& past, size_t slots) {
    Ort::AllocatorWithDefaultOptions allocator;
    const Ids shape = past.shape_of(static_cast<int64_t>(slots));
    return Ort::Value::CreateTensor(allocator, shape.data(), shape.size(), past.type);
  }

  // Reads ids, and returns the logits after the last of them.
  std::vector<float> read(Ids ids, const Cancel& cancel) {
    const size_t total = read_.size() + ids.size(), limit = open().short_context;
    if (!read_.empty() && read_.size() <= limit && total > limit) {
      ids.insert(ids.begin(), read_.begin(),
                 read_.end());  // keys in the cache have the rotary frequencies of short texts
      rewind(0);
    }
    reserve(total);
    const Ids before = std::exchange(unread_, ids);
    // A hybrid model's prompt ends twice: for the same prompt again, and for one with another end.
    const bool copies = goes_back_ && ids.size() > 1;
    const size_t tail = copies && ids.size() > kTail ? ids.size() - kTail : ids.size();
    std::vector<float> logits;
    try {
      for (size_t at = 0, end; at < ids.size(); at = end) {
        const size_t least = total > limit && at == 0 && read_.empty() ? std::min(limit + 1, ids.size()) : 0;
        end = std::min(std::max(at + kChunk, least), at < tail ? tail : ids.size());
        logits = step({ids.begin() + at, ids.begin() + end}, end == ids.size(), cancel);
        unread_.assign(ids.begin() + end, ids.end());
        if (copies && (end == tail || end == ids.size())) keep_states();
      }
    } catch (const Ort::Exception&) {
      unread_ = before;  // an id outside the vocabulary, for example
      throw;
    }
    return logits;
  }

  // Runs the model once. Returns the logits after the last token, if they are wanted.
  std::vector<float> step(Ids ids, bool wanted, const Cancel& cancel) {
    const std::shared_lock lock(open().gate);
    // In this order: a model that is closed or an answer that is cancelled from now on ends the run.
    run_.UnsetTerminate();
    cancel.set(&run_);
    const std::unique_ptr<const Cancel, void (*)(const Cancel*)> after(&cancel,
                                                                       [](const Cancel* c) { c->set(nullptr); });
    model_.check_open();
    cancel.check();
    Ids mask(read_.size() + ids.size(), 1), positions(ids.size());
    std::iota(positions.begin(), positions.end(), read_.size());
    const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    const auto row = [&](Ids& values) {
      const int64_t shape[] = {1, static_cast<int64_t>(values.size())};
      return Ort::Value::CreateTensor<int64_t>(memory, values.data(), values.size(), shape, 2);
    };
    Ort::IoBinding binding(*open().session);
    binding.BindInput("input_ids", row(ids));
    binding.BindInput("attention_mask", row(mask));
    binding.BindInput("position_ids", row(positions));
    for (size_t i = 0; i < pasts_.size(); ++i) {
      binding.BindInput(pasts_[i].name.c_str(), cache_[i]);
      if (shares_)
        binding.BindOutput(pasts_[i].present.c_str(), spare_[i] ? spare_[i] : cache_[i]);
      else
        binding.BindOutput(pasts_[i].present.c_str(), memory);
    }
    binding.BindOutput("logits", memory);
    try {
      open().session->Run(run_, binding);
    } catch (const Ort::Exception&) {
      model_.check_open();
      cancel.check();
      throw;
    }
    std::vector<Ort::Value> results = binding.GetOutputValues();
    std::vector<float> logits;
    if (wanted) logits = last_logits(results.back());
    for (size_t i = 0; i < pasts_.size(); ++i)
      if (!shares_)
        cache_[i] = std::move(results[i]);
      else if (spare_[i])
        std::swap(cache_[i], spare_[i]);
    read_.insert(read_.end(), ids.begin(), ids.end());
    return logits;
  }

  // The numbers at the last position of logits [1, sequence, vocabulary].
  static std::vector<float> last_logits(const Ort::Value& value) {
    const auto info = value.GetTensorTypeAndShapeInfo();
    const size_t size = static_cast<size_t>(info.GetShape().back()), from = info.GetElementCount() - size;
    std::vector<float> found(size);
    const auto copy = [&](const auto* numbers) {
      std::transform(numbers + from, numbers + from + size, found.begin(), [](auto number) {
        if constexpr (std::is_same_v<decltype(number), float>)
          return number;
        else
          return number.ToFloat();
      });
    };
    switch (info.GetElementType()) {
      case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
        copy(value.GetTensorData<float>());
        break;
      case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
        copy(value.GetTensorData<Ort::Float16_t>());
        break;
      case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
        copy(value.GetTensorData<Ort::BFloat16_t>());
        break;
      default:
        throw std::runtime_error("logits have an unknown type, expected f32, f16 or bf16");
    }
    if (!std::ranges::all_of(found, [](float logit) { return std::isfinite(logit); }))
      throw std::runtime_error("logits are not finite");
    return found;
  }

  void rewind(size_t length) {
    if (length == read_.size()) return;
    if (!shares_) replace(length, length);
    if (length > 0 && has_states()) {
      auto state = states_.at(static_cast<int64_t>(length)).begin();
      for (size_t i = 0; i < pasts_.size(); ++i)
        if (pasts_[i].is_state()) {
          const Pieces pieces(pasts_[i], cache_[i], 0);
          std::copy(state->begin(), state->end(), pieces.data);
          ++state;
        }
    }
    read_.resize(length);
    states_.erase(states_.upper_bound(static_cast<int64_t>(length)), states_.end());
  }

  // Makes room for so many tokens. It doubles, so that a token's copies cost little.
  void reserve(size_t tokens) {
    if (!shares_ || tokens <= capacity_) return;
    const size_t slots = std::min(model_.context_length(), std::max({tokens, 2 * capacity_, size_t{256}}));
    replace(slots, read_.size());
    capacity_ = slots;
  }

  // Makes keys and values tensors of so many slots, with the first tokens of the old ones.
  void replace(size_t slots, size_t length) {
    for (size_t i = 0; i < pasts_.size(); ++i) {
      const Past& past = pasts_[i];
      if (past.is_state() && shares_) continue;
      Ort::Value made = allocate(past, slots);
      const int64_t tokens = static_cast<int64_t>(length);
      const Pieces from(past, cache_[i], tokens), to(past, made, tokens);
      for (int64_t piece = 0; piece < from.count; ++piece)
        std::copy_n(from.data + piece * from.stride, from.bytes, to.data + piece * to.stride);
      cache_[i] = std::move(made);
    }
  }

  void keep_states() {
    states_[static_cast<int64_t>(read_.size())] = states_of(pasts_, cache_);
    while (states_.size() > kMostStates) states_.erase(states_.begin());
  }

  const Model model_;
  const std::vector<Past>& pasts_;
  bool goes_back_, shares_;  // keys and values are written in place
  Ort::RunOptions run_;
  Ids read_, unread_;  // tokens of the text that no step has read
  Ends states_;
  std::vector<Ort::Value> cache_, spare_;  // a step reads a state from one and writes it into the other
  size_t capacity_ = 0, answers_ = 0;
};

}  // namespace quantmoe
