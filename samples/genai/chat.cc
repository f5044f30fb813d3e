// Conversations by onnxruntime-genai: chat FOLDER [--stop TEXT]... [--users N] [--max-new-tokens N]
//
// Each line that you type is a message, except empty lines. Ctrl-C ends the answer, Ctrl-D the program. --users gives
// the message to N conversations at the same time.
#include <ort_genai.h>
#include <quantmoe/chat.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <csignal>
#include <functional>
#include <future>
#include <iomanip>
#include <iostream>

namespace {

std::atomic<bool> cancelled = false;

std::string read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

bool has_template(const std::filesystem::path& folder) {
  return exists(folder / "chat_template.jinja") ||
         read(folder / "tokenizer_config.json").find("\"chat_template\"") != std::string::npos;
}

std::string json(const std::string& text) {
  std::ostringstream json;
  json << '"' << std::hex << std::setfill('0');
  for (const char c : text)
    if (static_cast<unsigned char>(c) < 32)
      json << "\\u" << std::setw(4) << int{c};
    else
      json << (c == '"' || c == '\\' ? "\\" : "") << c;
  json << '"';
  return json.str();
}

std::string message(const std::string& role, const std::string& text) {
  return "{\"role\": " + json(role) + ", \"content\": " + json(text) + '}';
}

// Loads the model with the library that QUANTMOE_ORT_LIBRARY names. Without this variable it is the folder's, which is
// native code of whoever exported it.
std::unique_ptr<OgaModel> open(const std::filesystem::path& folder) {
  const auto config = OgaConfig::Create(absolute(folder).c_str());
  const char* named = std::getenv("QUANTMOE_ORT_LIBRARY");
  if (!named) return OgaModel::Create(*config);
  const std::filesystem::path library = std::filesystem::canonical(named), here = std::filesystem::current_path();
  const std::string options = "{\"custom_ops_library\": " + json(library.string()) + '}';
  config->Overlay(("{\"model\": {\"decoder\": {\"session_options\": " + options + "}}}").c_str());
  current_path(library.parent_path());  // else onnxruntime-genai takes none but the model's folder's
  auto model = OgaModel::Create(*config);
  current_path(here);
  return model;
}

// The answer as the next prompt has it: Qwen3's template leaves reasoning out.
std::string without_reasoning(const std::string& answer) {
  const size_t end = answer.rfind("</think>");
  const size_t begin = answer.find_first_not_of('\n', end == answer.npos ? 0 : end + 8);
  return begin == answer.npos ? "" : answer.substr(begin);
}

// The messages of one user. Any number of conversations share a model. One thread at a time uses a conversation.
class Conversation {
 public:
  Conversation(const OgaModel& model, const quantmoe::TextTokenizer& tokenizer, const std::filesystem::path& folder)
      : model_(model), tokenizer_(tokenizer), params_(OgaGeneratorParams::Create(model)) {
    generator_ = OgaGenerator::Create(model, *params_);
    if (has_template(folder)) template_ = OgaTokenizer::Create(model);
    // genai has not run an answer's last token, and cannot go back over one token alone in a cache that grows
    unread_ = params_->GetSearchBool("past_present_share_buffer") ? 1 : 2;
  }

  // Gives the answer in pieces to `say`. The pieces that came are part of the conversation.
  void reply(const std::string& text, const std::vector<std::string>& stop, size_t max_new_tokens,
             const std::function<void(const std::string&)>& say) {
    std::string messages = messages_ + (messages_.empty() ? "" : ", ") + message("user", text);
    quantmoe::Ids said;
    if (prompt_) said.assign(generator_->GetSequence(0).begin(), generator_->GetSequence(0).end());
    quantmoe::Ids ids = said;
    if (template_) {
      const OgaString prompt = template_->ApplyChatTemplate(nullptr, ('[' + messages + ']').c_str(), nullptr, true);
      ids = tokenizer_.encode(static_cast<const char*>(prompt), false);
    } else {
      const quantmoe::Ids more = tokenizer_.encode(text, said.empty());
      ids.insert(ids.end(), more.begin(), more.end());
    }
    if (const auto most = static_cast<size_t>(params_->GetSearchNumber("max_length")); ids.size() >= most)
      throw std::runtime_error(std::to_string(ids.size()) +
                               " tokens and 1 for the answer do not fit into max_length, " + std::to_string(most) +
                               " tokens: begin a new conversation, or set max_length");
    go_on(said, ids);
    quantmoe::TextStream stream(tokenizer_, stop, ids);
    std::string answer;
    const auto add = [&](const std::string& piece) { answer += piece, say(piece); };
    for (size_t i = 0; i < max_new_tokens && !generator_->IsDone() && !cancelled && !stream.stopped(); ++i) {
      generator_->GenerateNextToken();
      add(stream.push(generator_->GetNextTokens()[0]));
    }
    add(stream.end());
    messages_ = messages + ", " + message("assistant", without_reasoning(answer));
  }

 private:
  // Goes back to the tokens with which ids begin, and runs the others.
  void go_on(const quantmoe::Ids& said, const quantmoe::Ids& ids) {
    const size_t common = std::ranges::mismatch(said, ids).in1 - said.begin();
    const size_t kept =
        said.empty() ? 0 : back(std::min({common, said.size() - std::min(said.size(), unread_), ids.size() - 1}));
    generator_->AppendTokens(std::vector<int32_t>(ids.begin() + kept, ids.end()));
    generator_->SnapshotState();  // now, because all tokens are run; it does nothing in other models
    prompt_ = ids.size();
  }

  // Goes back to at most so many tokens, and returns to how many.
  size_t back(size_t most) {
    for (const size_t length : {most, prompt_})  // a hybrid model goes back to its snapshot alone
      if (length <= most) try {
          generator_->RewindTo(length);
          return length;
        } catch (const std::runtime_error&) {
        }
    generator_ = OgaGenerator::Create(model_, *params_);  // LFM2 does not go back
    return 0;
  }

  const OgaModel& model_;
  const quantmoe::TextTokenizer& tokenizer_;
  std::unique_ptr<OgaGeneratorParams> params_;
  std::unique_ptr<OgaGenerator> generator_;
  std::unique_ptr<OgaTokenizer> template_;
  std::string messages_;
  size_t prompt_ = 0, unread_;  // tokens of the last prompt; of an answer, those that the next turn runs again
};

size_t number(const std::string& name, const std::string& text) {
  size_t found = 0;
  const char* end = text.data() + text.size();
  if (std::from_chars(text.data(), end, found).ptr != end || found < 1)
    throw std::runtime_error(name + ' ' + text + ": expected a number from 1");
  return found;
}

void chat(const std::vector<std::string>& arguments) {
  std::vector<std::string> stop;
  size_t users = 1, max_new_tokens = 512;
  for (size_t i = 1; i < arguments.size(); i += 2) {
    const std::string& name = arguments[i];
    if (i + 1 == arguments.size() || (name != "--stop" && name != "--users" && name != "--max-new-tokens"))
      throw std::runtime_error(name + ": expected --stop TEXT, --users N or --max-new-tokens N");
    if (name == "--stop")
      stop.push_back(arguments[i + 1]);
    else
      (name == "--users" ? users : max_new_tokens) = number(name, arguments[i + 1]);
  }
  if (std::ranges::count(stop, "")) throw std::runtime_error("--stop is empty: expected a text");
  const std::string& folder = arguments.at(0);
  const auto model = open(folder);
  const quantmoe::TextTokenizer tokenizer(folder);
  std::vector<Conversation> conversations;
  for (size_t i = 0; i < users; ++i) conversations.emplace_back(*model, tokenizer, folder);
  std::signal(SIGINT, [](int) { cancelled = true; });
  for (std::string line; std::getline(std::cin, line);) {
    if (line.empty()) continue;
    cancelled = false;
    if (users == 1) {
      conversations[0].reply(line, stop, max_new_tokens,
                             [](const std::string& piece) { std::cout << piece << std::flush; });
      std::cout << std::endl;
      continue;
    }
    std::vector<std::future<std::string>> answers;
    for (Conversation& one : conversations)
      answers.push_back(std::async(std::launch::async, [&] {
        std::string answer;
        one.reply(line, stop, max_new_tokens, [&](const std::string& piece) { answer += piece; });
        return answer;
      }));
    for (size_t i = 0; i < users; ++i) std::cout << i + 1 << ": " << answers[i].get() << std::endl;
  }
}

}  // namespace

int main(int count, char** arguments) {
  const OgaHandle handle;
  try {
    if (count < 2) throw std::runtime_error("usage: chat FOLDER [--stop TEXT]... [--users N] [--max-new-tokens N]");
    chat({arguments + 1, arguments + count});
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
