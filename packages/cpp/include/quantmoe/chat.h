// Text in, text out: conversations with an exported model. Needs libquantmoe_text beside ONNX Runtime.
#pragma once

#include <quantmoe/text.h>
#include <quantmoe/token_cache.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace quantmoe {

namespace detail {

template <auto kFree>
struct Free {
  template <typename T>
  void operator()(T* pointer) const {
    kFree(pointer);
  }
};
template <typename T, auto kFree>
using Owned = std::unique_ptr<T, Free<kFree>>;

template <typename T>
T found(T pointer) {
  if (!pointer) throw std::runtime_error(qm_text_error());
  return pointer;
}

inline std::string found(qm_text text) {
  const std::string copy(found(text.data), text.size);
  qm_text_free(text);
  return copy;
}

inline std::string utf8(const std::filesystem::path& path) {
  const std::u8string text = path.u8string();
  return {text.begin(), text.end()};
}

}  // namespace detail

// A folder's tokenizer.json. Any number of threads may use it.
class TextTokenizer {
 public:
  // Reads the tokenizer.json of a folder. Truncation and padding are off.
  explicit TextTokenizer(const std::filesystem::path& folder)
      : tokenizer_(detail::found(qm_tokenizer_open(detail::utf8(folder).c_str()))) {}

  // The token ids of a text. With `special` they have the special tokens at the begin and end of a text.
  Ids encode(std::string_view text, bool special) const {
    const qm_ids ids = qm_tokenizer_encode(tokenizer_.get(), text.data(), text.size(), special);
    const Ids copy(detail::found(ids.data), ids.data + ids.size);
    qm_ids_free(ids);
    return copy;
  }

  // The text of token ids. With `special` it has the special tokens among them.
  std::string decode(const Ids& ids, bool special = false) const {
    return detail::found(qm_tokenizer_decode(tokenizer_.get(), ids.data(), ids.size(), special));
  }

 private:
  friend class TextStream;
  detail::Owned<qm_tokenizer, qm_tokenizer_free> tokenizer_;
};

// The text of tokens as they come: whole characters, and never the begin of a stop string.
class TextStream {
 public:
  // Begins after some tokens. Their text is not given, except a last character that they only begin.
  explicit TextStream(const TextTokenizer& tokenizer, const std::vector<std::string>& stop = {},
                      const Ids& after = {}) {
    std::vector<const char*> strings;
    for (const std::string& text : stop) strings.push_back(text.c_str());
    stream_.reset(detail::found(
        qm_text_stream_new(tokenizer.tokenizer_.get(), after.data(), after.size(), strings.data(), strings.size())));
  }

  // The text that one more token completes. It is empty while a character or a stop string may go on.
  std::string push(int64_t id) { return detail::found(qm_text_stream_push(stream_.get(), id)); }

  // The text held back, after the last token.
  std::string end() { return detail::found(qm_text_stream_end(stream_.get())); }

  // Whether a stop string came; nothing after it is given.
  bool stopped() const { return qm_text_stream_stopped(stream_.get()); }

 private:
  detail::Owned<qm_text_stream, qm_text_stream_free> stream_;
};

// Options for choosing tokens, with transformers' defaults and order.
struct Sampling {
  double temperature = 1;  // divides the logits; 0 takes the likeliest token
  size_t top_k = 50;       // keeps so many of the likeliest tokens, and tokens as likely as the last of them; 0: all
  double top_p = 1;        // keeps the fewest of these tokens whose probabilities sum up to this number
  double min_p = 0;        // keeps the tokens that are at least this many times as likely as the likeliest token
  double repetition_penalty = 1;  // divides the logit of each token of prompt and answer; multiplies a negative logit
  double presence_penalty = 0;    // subtracted from the logit of each token of the answer
  double frequency_penalty = 0;   // subtracted as often as the token occurs in the answer
  std::optional<uint64_t> seed = {};  // of the random numbers; nothing: another one each time

  // Takes the likeliest token, without penalties.
  static Sampling greedy() { return {.temperature = 0}; }

  // What a folder's generation_config.json recommends; without the file, the likeliest token.
  static Sampling of_folder(const std::filesystem::path& folder) {
    qm_sampling of;
    detail::found(qm_sampling_open(detail::utf8(folder).c_str(), &of));
    return {of.temperature,
            static_cast<size_t>(of.top_k),
            of.top_p,
            of.min_p,
            of.repetition_penalty,
            of.presence_penalty,
            of.frequency_penalty,
            of.has_seed ? std::optional(of.seed) : std::nullopt};
  }

  // Gives the tokens of one answer.
  std::function<int64_t(std::span<float>)> sampler(const Ids& prompt) const {
    const qm_sampling of = {
        temperature,      top_p,           min_p, repetition_penalty, presence_penalty, frequency_penalty, top_k,
        seed.value_or(0), seed.has_value()};
    const std::shared_ptr<qm_sampler> made(detail::found(qm_sampler_new(&of, prompt.data(), prompt.size())),
                                           qm_sampler_free);
    return [made](std::span<float> logits) {
      const int64_t id = qm_sampler_choose(made.get(), logits.data(), logits.size());
      if (id < 0) throw std::runtime_error(qm_text_error());
      return id;
    };
  }
};

// An exported folder that is open, with its tokenizer. Copies are the same model, and any thread may use them.
class Generator : public Model {
 public:
  // Opens a folder as Model does. The tokenizer is read when it is first used.
  explicit Generator(const std::filesystem::path& folder,
                     const std::function<void(Ort::SessionOptions&)>& configure = {}, Drafts drafts = {})
      : Model(folder, configure, drafts), text_(std::make_shared<Text>(Sampling::of_folder(folder))) {}

  // How the model's makers choose tokens, from generation_config.json.
  const Sampling& sampling() const { return text_->sampling; }

  // The folder's tokenizer.
  const TextTokenizer& tokenizer() const {
    check_open();
    const std::lock_guard lock(text_->gate);
    if (!text_->tokenizer) text_->tokenizer.emplace(folder());
    return *text_->tokenizer;
  }

 private:
  struct Text {
    explicit Text(Sampling of) : sampling(std::move(of)) {}
    Sampling sampling;
    std::mutex gate;
    std::optional<TextTokenizer> tokenizer;
  };
  std::shared_ptr<Text> text_;
};

// Options of an answer.
struct Options {
  size_t max_new_tokens = 512;            // the most tokens of the answer
  std::optional<Sampling> sampling = {};  // how tokens are chosen; nothing: as the model's makers recommend
  std::vector<std::string> stop = {};     // strings that end the answer; they are not part of it
  Cancel cancel = {};                     // ends the answer within a step
};

// Tokens of an answer, and why it ended.
struct ReplyInfo {
  size_t prompt_tokens = 0;  // of the conversation before the answer
  size_t kept_tokens = 0;    // how many of these the cache had already
  size_t tokens = 0;         // of the answer
  size_t drafted = 0;        // draft tokens that were verified
  size_t accepted = 0;       // how many of these are tokens of the answer
  bool stopped = false;      // whether the model or a stop string ended the answer, and not the number of tokens
};

// A conversation with an exported model. Messages that were read stay in the KV cache. Answers are kept as their
// tokens. If the context is full, the oldest messages are dropped with their answers. A system prompt stays. A model
// without a chat template goes on from each message.
class Chat {
 public:
  // Begins a conversation, perhaps with a system prompt. `raw` ignores the model's chat template.
  explicit Chat(const Generator& model, std::optional<std::string> system = {}, bool raw = false)
      : model_(model), cache_(model), system_(std::move(system)) {
    if (model.metadata("no_chat") && !raw)
      template_.reset(detail::found(qm_template_open(detail::utf8(model.folder()).c_str())));
    raw_ = raw || (!template_ && !model.metadata("chat.begin"));
    if (system_ && (raw_ || (!template_ && !model.metadata("chat.system"))))
      throw std::runtime_error(model.folder().string() +
                               ": the model takes no system prompt; put it into the first message");
    model.tokenizer();  // fails now if there is none
  }

  // Tokens of the last answer.
  const ReplyInfo& last() const { return last_; }

  // The model's answer in pieces, as they come. The pieces that came are part of the conversation, also if you stop
  // early or cancel. The stream ends with the conversation and with the next answer.
  Stream<std::string> reply(const std::string& message, const Options& options = {}) {
    const size_t context = model_.context_length(), room = std::min(options.max_new_tokens, context / 4);
    size_t dropped = 0;
    Ids ids = ids_of(dropped, message);
    while (ids.size() + room > context && dropped < turns_.size()) ids = ids_of(++dropped, message);
    const size_t kept = cache_.keep(ids);
    const auto stream = std::make_shared<TextStream>(model_.tokenizer(), options.stop, raw_ ? ids : Ids());
    const auto choose = options.sampling.value_or(model_.sampling()).sampler(ids);
    Stream<int64_t> tokens =
        cache_.generate({ids.begin() + kept, ids.end()}, {options.max_new_tokens, choose, options.cancel});
    turns_.erase(turns_.begin(), turns_.begin() + dropped);
    turns_.push_back({message, {}});
    last_ = {ids.size(), kept};
    return Stream<std::string>(
        [this, tokens, stream, over = false]() mutable { return next_piece(tokens, *stream, over); });
  }

 private:
  struct Turn {
    std::string message;
    Ids answer;
  };

  std::optional<std::string> next_piece(Stream<int64_t>& tokens, TextStream& stream, bool& over) {
    const Ids& stop = model_.stop_tokens();
    while (!over) {
      const std::optional<int64_t> id = tokens.next();
      std::string piece;
      if (id) ++last_.tokens;
      last_.drafted = cache_.drafted(), last_.accepted = cache_.accepted();
      over = !id || std::ranges::find(stop, *id) != stop.end();
      last_.stopped = id && over;
      if (over) {
        piece = stream.end();
      } else {
        turns_.back().answer.push_back(*id);
        piece = stream.push(*id);
        over = stream.stopped();
      }
      last_.stopped |= stream.stopped();
      if (!piece.empty()) return piece;
    }
    return std::nullopt;
  }

  // The tokens of the conversation after its oldest turns, with a new message.
  Ids ids_of(size_t dropped, const std::string& message) const {
    const auto value = [&](const char* name) { return model_.metadata(name).value_or(""); };
    const TextTokenizer& tokenizer = model_.tokenizer();
    Ids ids;
    std::vector<const char*> messages;
    for (size_t i = dropped; i <= turns_.size(); ++i) {
      const bool is_new = i == turns_.size();
      const std::string& said = is_new ? message : turns_[i].message;
      messages.push_back(said.c_str());
      Ids read;
      if (template_) {
        const char* system = system_ ? system_->c_str() : nullptr;
        const std::string text =
            detail::found(qm_template_turn(template_.get(), system, messages.data(), messages.size()));
        read = tokenizer.encode(text, false);
      } else if (raw_) {
        read = tokenizer.encode(said, ids.empty());
      } else {
        const std::string before = !ids.empty() ? value("chat.next")
                                   : system_    ? value("chat.system") + *system_ + value("chat.system_end")
                                                : value("chat.begin");
        read = tokenizer.encode(before + said + value("chat.reply"), false);
      }
      ids.insert(ids.end(), read.begin(), read.end());
      if (!is_new) ids.insert(ids.end(), turns_[i].answer.begin(), turns_[i].answer.end());
    }
    return ids;
  }

  const Generator model_;
  TokenCache cache_;
  std::optional<std::string> system_;
  detail::Owned<qm_template, qm_template_free> template_;  // of a model whose turns are more than text around messages
  bool raw_;
  std::vector<Turn> turns_;
  ReplyInfo last_;
};

}  // namespace quantmoe
