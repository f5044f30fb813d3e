// Token ids in, token ids out: an exported model's session and the KV cache of a text. Needs ONNX Runtime alone.
#pragma once

#include <onnxruntime_cxx_api.h>
#include <quantmoe/saved_cache.h>
#if defined(QUANTMOE_LINKED)
#include <quantmoe/register_custom_ops.h>
#endif

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

// How the tokens of an answer are drafted. A step verifies a token and its draft tokens, so the answer has the same
// tokens in fewer steps.
struct Drafts {
  enum Kind {
    kNone,
    kNgram,  // the tokens that followed the last tokens before in the text
    kMtp     // of the layer of multi-token prediction, mtp.onnx
  };
  Kind kind = kNone;
  size_t most = 4;  // draft tokens of a step

  static Drafts ngram(size_t most = 4) { return {kNgram, most}; }
  static Drafts mtp(size_t most = 4) { return {kMtp, most}; }
};

// An exported folder that is open. Copies are the same model, and any thread may use them.
class Model {
 public:
  // Opens a folder that `quantmoe export` wrote. `configure` changes the session's options, for example threads,
  // entries or an execution provider. The environment variable QUANTMOE_ORT_LIBRARY names the library of the operators.
  // Without it the folder's copy is loaded, which is native code of whoever exported the folder. Programs that link
  // quantmoe::ort or quantmoe::ort_static have the operators, and load no file.
  explicit Model(const std::filesystem::path& folder, const std::function<void(Ort::SessionOptions&)>& configure = {},
                 Drafts drafts = {})
      : Model(folder, "model.onnx", configure, drafts) {
    if (drafts.kind != Drafts::kNone) check_drafts();
    if (drafts.kind == Drafts::kMtp) open_->drafting = Model(folder, "mtp.onnx", configure, {}).open_;
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
    if (open_->drafting) Model(open_->drafting).close();
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
    int64_t vocabulary = std::numeric_limits<int64_t>::max();  // token ids are below it
    Ids stop_tokens;
    std::vector<Past> pasts;
    Drafts drafts;
    std::shared_ptr<Open> drafting;  // the model of mtp.onnx
    int64_t num_logits = 1;          // the tokens whose logits a step gives
    Ort::Value rows{nullptr};        // what the session knows of it
    std::string hidden;              // the output of hidden states; empty: nobody drafts from them
    ONNXTensorElementDataType hidden_type;
    int64_t hidden_width = 0;
    std::atomic<bool> closing = false;
    std::shared_mutex gate;  // a step shares the session
    std::optional<Ort::Session> session;
    std::mutex runs_gate;
    std::set<Ort::RunOptions*> runs;
  };

  explicit Model(std::shared_ptr<Open> open) : open_(std::move(open)) {}

  Model(const std::filesystem::path& folder, const char* file,
        const std::function<void(Ort::SessionOptions&)>& configure, Drafts drafts)
      : open_(std::make_shared<Open>()) {
    const std::filesystem::path path = folder / file;
    if (folder.empty() || !std::filesystem::is_regular_file(path))
      throw std::runtime_error((folder.empty() ? "\"\"" : path.string()) +
                               ": missing; expected the folder of an exported model");
    static Ort::Env environment(ORT_LOGGING_LEVEL_ERROR, "quantmoe");
    Ort::SessionOptions options;
    if (configure) configure(options);
#if defined(QUANTMOE_LINKED)
    Ort::ThrowOnError(RegisterCustomOps(options, OrtGetApiBase()));  // reads the session's entries
#else
    const char* own = std::getenv("QUANTMOE_ORT_LIBRARY");
    const std::filesystem::path library = own ? std::filesystem::path(own) : folder / kLibrary;
    try {
      options.RegisterCustomOpsLibrary(library.c_str());  // reads the session's entries
    } catch (const Ort::Exception& error) {
      throw Ort::Exception(std::string(error.what()) + "; set QUANTMOE_ORT_LIBRARY to " + kLibrary +
                               ", for example the one in QuantMoE's wheel",
                           error.GetOrtErrorCode());
    }
#endif
    open_->folder = folder;
    open_->drafts = drafts;
    if (drafts.kind != Drafts::kNone) {
      open_->num_logits = static_cast<int64_t>(drafts.most + 1);  // check_drafts() has the range
      const int64_t shape[] = {1};
      const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
      open_->rows = Ort::Value::CreateTensor<int64_t>(memory, &open_->num_logits, 1, shape, 1);
      options.AddInitializer("num_logits", open_->rows);
    }
    open_->session.emplace(environment, path.c_str(), options);
    read_metadata();
  }

  // Fails unless a step gives the logits and the states after a token and each of its draft tokens.
  void check_drafts() const {
    if (open_->drafts.most < 1 || open_->drafts.most > open_->context_length)
      throw std::invalid_argument("drafts.most is " + std::to_string(open_->drafts.most) +
                                  ", expected a number from 1 to " + std::to_string(open_->context_length));
    const int64_t tokens = open_->num_logits;
    int64_t rows = tokens, window = tokens;
    for (size_t i = 0; i < open_->session->GetOutputCount(); ++i) {
      Ort::AllocatorWithDefaultOptions allocator;
      if (std::string(open_->session->GetOutputNameAllocated(i, allocator).get()) != "logits") continue;
      if (metadata("num_logits")) continue;
      const auto shape = open_->session->GetOutputTypeInfo(i).GetTensorTypeAndShapeInfo().GetShape();
      const Ids fixed = numbers("logits");
      rows = shape[1] == 1 ? 1 : fixed.empty() ? tokens : fixed[0];
    }
    for (const Past& past : open_->pasts)
      if (past.is_state()) window = past.window ? past.dims[0] : 1;
    if (open_->drafts.kind == Drafts::kMtp && metadata("short_context"))
      throw std::invalid_argument(folder().string() +
                                  ": rope_type longrope with a layer of multi-token prediction is not supported; take "
                                  "Drafts::ngram");
    std::string options;
    if (rows < tokens) options += " --logits " + std::to_string(tokens);
    if (window < tokens) options += " --state-window " + std::to_string(tokens);
    if (open_->drafts.kind == Drafts::kMtp &&
        (open_->hidden.empty() || !std::filesystem::exists(folder() / "mtp.onnx")))
      options += " --mtp";
    if (!options.empty())
      throw std::invalid_argument(folder().string() + ": " + std::to_string(open_->drafts.most) +
                                  " draft tokens need an export with" + options);
  }

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
    for (size_t i = 0; i < session.GetOutputCount(); ++i) {
      const std::string name = session.GetOutputNameAllocated(i, allocator).get();
      if (name == "logits")
        if (const int64_t size = session.GetOutputTypeInfo(i).GetTensorTypeAndShapeInfo().GetShape().back(); size > 0)
          open_->vocabulary = size;
      if (name != "hidden_states_out" && !(name == "hidden_states" && open_->drafts.kind == Drafts::kMtp)) continue;
      const auto type = session.GetOutputTypeInfo(i);
      const auto info = type.GetTensorTypeAndShapeInfo();
      open_->hidden = name, open_->hidden_type = info.GetElementType(), open_->hidden_width = info.GetShape()[2];
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
  // Makes an empty cache. With `goes_back` it keeps copies of a hybrid model's states. So keep() goes back to the end
  // of a prompt, and files of save() serve prompts that begin alike. Other models can always go back.
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
  Ids tokens() const { return {read_.begin(), read_.end() - ahead_}; }

  // The number of draft tokens of the last answer, and how many of them were right.
  size_t drafted() const { return drafted_; }
  size_t accepted() const { return accepted_; }

  // Goes back to the tokens with which a text begins, or as near before their end as states allow. Returns the number
  // of tokens kept, at most all of the text except the last, whose logits are needed.
  size_t keep(const Ids& ids) {
    model_.check_open();
    settle();
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
    for (const int64_t id : ids)
      if (id < 0 || id >= open().vocabulary)
        throw std::invalid_argument("token id " + std::to_string(id) + " is outside the vocabulary, 0 to " +
                                    std::to_string(open().vocabulary - 1));
    settle();
    Ids next = unread_;
    next.insert(next.end(), ids.begin(), ids.end());
    if (next.empty()) throw std::invalid_argument("the prompt has no tokens");
    const size_t total = read_.size() + next.size(), context = model_.context_length();
    if (options.max_new_tokens > 0 && total >= context)
      throw std::invalid_argument(std::to_string(total) +
                                  " tokens and 1 for the answer do not fit into the model's context of " +
                                  std::to_string(context) + " tokens");
    size_t left = std::min(options.max_new_tokens, context - std::min(context, total));
    begin_drafts();
    return Stream<int64_t>([this, options, next, left, most = open().drafts.most, drafts = Ids(), at = size_t{0},
                            rows = Rows(), answer = ++answers_]() mutable -> std::optional<int64_t> {
      if (left == 0) return std::nullopt;
      if (answer != answers_) throw std::logic_error("another answer was begun");
      const size_t steps = std::exchange(left, 0);
      if (at == rows.size()) {
        drafts = rows.empty() ? Ids() : draft(next.front(), std::min(most, steps - 1), options.cancel);
        rows = read(next, drafts, options.cancel), at = 0;
        drafted_ += drafts.size();
      }
      const int64_t id = options.choose(rows[at]);
      ahead_ = drafts.size() - at;
      const Ids& stop = model_.stop_tokens();
      const bool over = std::ranges::find(stop, id) != stop.end();
      // What follows an answer begins with the token that ends it.
      unread_ = over ? Ids() : Ids{id}, left = over ? 0 : steps - 1;
      if (left > 0 && at < drafts.size() && drafts[at] == id) {
        ++at, ++accepted_;
        return id;
      }
      settle();
      if (!drafts.empty()) {
        most = std::min(open().drafts.most, std::max<size_t>(1, 2 * at));
        drafts.resize(at), drafts.insert(drafts.begin(), next.front());
        hear(drafts);
      }
      next = {id}, at = rows.size();
      return id;
    });
  }

  // Writes the tokens that were read, as `quantmoe generate --save-state` does. The file has its name when all is
  // there.
  void save(const std::filesystem::path& path) {
    model_.check_open();
    settle();
    save_state(path, model_.metadata("identity").value_or(""), read_, pasts_, cache_, states_);
  }

 private:
  static constexpr size_t kChunk = 512;     // prompt tokens of a step
  static constexpr size_t kTail = 8;        // tokens before a prompt's end, to whose states a hybrid model can go back
  static constexpr size_t kMostStates = 4;  // states are large

  static constexpr size_t kPending = 256;  // tokens that the layer of multi-token prediction reads at once

  using Rows = std::vector<std::vector<float>>;  // logits of tokens

  Model::Open& open() const { return *model_.open_; }

  bool has_states() const {
    return std::ranges::any_of(pasts_, [](const Past& past) { return past.is_state(); });
  }

  static Ort::Value allocate(const Past& past, size_t slots) {
    Ort::AllocatorWithDefaultOptions allocator;
    const Ids shape = past.shape_of(static_cast<int64_t>(slots));
    return Ort::Value::CreateTensor(allocator, shape.data(), shape.size(), past.type);
  }

  // Reads ids, and returns the logits after the last of them. The logits after draft tokens follow.
  Rows read(Ids ids, const Ids& drafts, const Cancel& cancel) {
    if (!drafts.empty()) {  // they are not unread if the run fails
      ids.insert(ids.end(), drafts.begin(), drafts.end());
      reserve(read_.size() + ids.size());
      return step(ids, ids.size(), cancel);
    }
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
    Rows logits;
    try {
      for (size_t at = 0, end; at < ids.size(); at = end) {
        const size_t least = total > limit && at == 0 && read_.empty() ? std::min(limit + 1, ids.size()) : 0;
        end = std::min(std::max(at + kChunk, least), at < tail ? tail : ids.size());
        const Ids part(ids.begin() + at, ids.begin() + end);
        logits = step(part, end == ids.size(), cancel);
        hear(part);
        unread_.assign(ids.begin() + end, ids.end());
        if (copies && (end == tail || end == ids.size())) keep_states();
      }
    } catch (const Ort::Exception&) {
      unread_ = before;  // memory ran out, for example
      throw;
    }
    return logits;
  }

  // Runs the model once. Returns the logits after the last so many tokens.
  Rows step(Ids ids, size_t wanted, const Cancel& cancel) {
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
    if (!given_.empty()) {
      const int64_t shape[] = {1, static_cast<int64_t>(ids.size()), open().hidden_width};
      const auto hidden = Ort::Value::CreateTensor(memory, given_.data(), given_.size(), shape, 3, open().hidden_type);
      binding.BindInput("hidden_states", hidden);
    }
    for (size_t i = 0; i < pasts_.size(); ++i) {
      binding.BindInput(pasts_[i].name.c_str(), cache_[i]);
      if (shares_)
        binding.BindOutput(pasts_[i].present.c_str(), spare_[i] ? spare_[i] : cache_[i]);
      else
        binding.BindOutput(pasts_[i].present.c_str(), memory);
    }
    if (!open().hidden.empty()) binding.BindOutput(open().hidden.c_str(), memory);
    binding.BindOutput("logits", memory);
    try {
      open().session->Run(run_, binding);
    } catch (const Ort::Exception&) {
      model_.check_open();
      cancel.check();
      throw;
    }
    std::vector<Ort::Value> results = binding.GetOutputValues();
    const Rows logits = last_logits(results.back(), wanted);
    if (!open().hidden.empty()) {
      const Ort::Value& hidden = results[pasts_.size()];
      const size_t size = open().hidden_type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT ? 4 : 2;
      hidden_.assign(static_cast<const char*>(hidden.GetTensorRawData()), ids.size() * open().hidden_width * size);
    }
    for (size_t i = 0; i < pasts_.size(); ++i)
      if (!shares_)
        cache_[i] = std::move(results[i]);
      else if (spare_[i])
        std::swap(cache_[i], spare_[i]);
    read_.insert(read_.end(), ids.begin(), ids.end());
    step_size_ = ids.size();
    return logits;
  }

  // The numbers at the last so many positions of logits [1, sequence, vocabulary].
  static Rows last_logits(const Ort::Value& value, size_t count) {
    const auto info = value.GetTensorTypeAndShapeInfo();
    const size_t size = static_cast<size_t>(info.GetShape().back());
    const size_t from = info.GetElementCount() - count * size;
    Rows found(count, std::vector<float>(size));
    const auto copy = [&](const auto* numbers) {
      for (size_t row = 0; row < count; ++row)
        std::transform(numbers + from + row * size, numbers + from + (row + 1) * size, found[row].begin(),
                       [](auto number) {
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
    for (const std::vector<float>& row : found)
      if (!std::ranges::all_of(row, [](float logit) { return std::isfinite(logit); }))
        throw std::runtime_error("logits are not finite");
    return found;
  }

  void begin_drafts() {
    drafted_ = accepted_ = 0;
    heard_.clear(), heard_hidden_.clear(), heard_last_.clear();
    if (!open().drafting) return;
    if (!drafting_) drafting_ = std::make_unique<TokenCache>(Model(open().drafting));
    drafting_->rewind(0);
  }

  // Tokens that may follow the tokens that were read and one more.
  Ids draft(int64_t last, size_t most, const Cancel& cancel) {
    const size_t length = read_.size() + 1, limit = open().short_context;
    const size_t end = length <= limit ? std::min(limit, model_.context_length()) : model_.context_length();
    const size_t count = std::min(most, end - std::min(end, length));
    if (open().drafts.kind == Drafts::kNone || count == 0) return {};
    if (drafting_) return draft_by_layer(last, count, cancel);
    Ids text = read_;
    text.push_back(last);
    for (const size_t n : {4, 3, 2})  // what followed the longest end that was there before, at the latest place
      for (size_t at = text.size() - 1; at >= n; --at)
        if (std::equal(text.end() - n, text.end(), text.begin() + at - n))
          return {text.begin() + at, text.begin() + std::min(at + count, text.size())};
    return {};
  }

  // The layer drafts a token from the hidden state of a token and from the token after it. It drafts one more from its
  // own hidden state and its draft.
  Ids draft_by_layer(int64_t last, size_t count, const Cancel& cancel) {
    if (heard_last_.empty()) return {};
    TokenCache& layer = *drafting_;
    const size_t known = layer.read_.size() + heard_.size();
    Ids found, ids = std::exchange(heard_, {});
    ids.push_back(last);
    layer.given_ = std::exchange(heard_hidden_, {}) + heard_last_;
    while (true) {
      layer.reserve(layer.read_.size() + ids.size());
      found.push_back(likeliest(layer.step(ids, 1, cancel)[0]));
      if (found.size() == count) break;
      ids = {found.back()}, layer.given_ = layer.hidden_.substr(layer.hidden_.size() - heard_last_.size());
    }
    layer.crop(layer.read_.size() - known);
    return found;
  }

  // Takes tokens that are certain, whose hidden states are the first ones of the last step.
  void hear(const Ids& ids) {
    if (!drafting_) return;
    const size_t width = hidden_.size() / step_size_, before = (ids.size() - 1) * width;
    heard_hidden_ += heard_last_ + hidden_.substr(0, before);
    heard_.insert(heard_.end(), ids.begin() + heard_last_.empty(), ids.end());
    heard_last_ = hidden_.substr(before, width);
    if (heard_.size() < kPending) return;
    drafting_->given_ = std::exchange(heard_hidden_, {});
    drafting_->reserve(drafting_->read_.size() + heard_.size());
    drafting_->step(std::exchange(heard_, {}), 0, {});
  }

  // Takes back draft tokens that are not of the answer.
  void settle() { crop(std::exchange(ahead_, 0)); }

  // Goes back over so many of the last step's tokens.
  void crop(size_t back) {
    if (back == 0) return;
    const size_t length = read_.size() - back;
    for (size_t i = 0; i < pasts_.size(); ++i)
      if (pasts_[i].is_state()) {
        const Pieces pieces(pasts_[i], cache_[i], 0);
        std::copy_n(pieces.data - back * pieces.bytes, pieces.bytes, pieces.data);
      }
    if (!shares_) replace(length, length);
    read_.resize(length);
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
  size_t ahead_ = 0, drafted_ = 0,
         accepted_ = 0;                    // draft tokens at the end of read_ that were not given, or given last
  std::unique_ptr<TokenCache> drafting_;   // of mtp.onnx
  std::string hidden_, given_;             // hidden states of the last step, and those that the next step reads
  size_t step_size_ = 1;                   // tokens of the last step
  Ids heard_;                              // tokens that the layer of multi-token prediction has not read
  std::string heard_hidden_, heard_last_;  // the hidden states before them, and the last token's
};

}  // namespace quantmoe
