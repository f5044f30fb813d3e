// tests PLAIN HYBRID TURNS CONTEXT NO_CHAT TEMPLATE MTP: tests of chat.h and token_cache.h with folders of the demo
// models. TURNS is the hybrid model with turns, CONTEXT has turns and a context of 64 tokens, NO_CHAT is the plain
// model with a reason and without a tokenizer, TEMPLATE is the hybrid model with a reason and a template, MTP has
// mtp.onnx.
#include <quantmoe/chat.h>

#include <chrono>
#include <iostream>
#include <thread>

using namespace quantmoe;
using namespace std::string_literals;

namespace {

int failed = 0;
#define CHECK(condition)                                                                          \
  do {                                                                                            \
    if (!(condition)) ++failed, std::cerr << __func__ << ':' << __LINE__ << ": " #condition "\n"; \
  } while (false)

template <typename Error, typename Call>
std::string refused(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

bool has(const std::string& text, const std::string& part) {
  if (text.find(part) != text.npos) return true;
  std::cerr << text << '\n';
  return false;
}

template <typename T>
std::vector<T> all(Stream<T> stream) {
  std::vector<T> found;
  for (const T& item : stream) found.push_back(item);
  return found;
}

std::string said(Stream<std::string> stream) {
  std::string text;
  for (const std::string& piece : stream) text += piece;
  return text;
}

Ids joined(Ids ids, const Ids& more) {
  ids.insert(ids.end(), more.begin(), more.end());
  return ids;
}

Ids from(const Ids& ids, size_t begin) { return {ids.begin() + begin, ids.end()}; }

Ids fresh(const Model& model, const Ids& ids, size_t count) {
  TokenCache cache(model);
  return all(cache.generate(ids, {.max_new_tokens = count}));
}

Options greedy(size_t count) { return {.max_new_tokens = count, .sampling = Sampling::greedy()}; }

const Ids kPrompt = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};

void answers_go_on(const std::string& folder) {
  const Model model(folder);
  const Ids whole = fresh(model, kPrompt, 12);
  TokenCache cache(model);
  const Ids first = all(cache.generate(kPrompt, {.max_new_tokens = 5}));
  CHECK(joined(first, all(cache.generate({}, {.max_new_tokens = 7}))) == whole);
  Ids ids;
  for (int64_t i = 0; i < 1300; ++i) ids.push_back(i * 7 % 4000 + 1);
  TokenCache other(model);
  all(other.generate({ids.begin(), ids.begin() + 100}, {.max_new_tokens = 1}));
  CHECK(other.keep(ids) == 100);
  CHECK(all(other.generate(from(ids, 100), {.max_new_tokens = 3})) == fresh(model, ids, 3));
}

void caches_go_back(const std::string& folder, bool hybrid) {
  const Model model(folder);
  TokenCache cache(model, true);
  all(cache.generate(kPrompt, {.max_new_tokens = 6}));
  const std::filesystem::path path = std::filesystem::temp_directory_path() / "quantmoe-cpp-tests.state";
  cache.save(path);
  const auto loaded = TokenCache::load(model, path, true);
  std::filesystem::remove(path);
  CHECK(loaded->tokens() == cache.tokens());
  const Ids other = joined({kPrompt.begin(), kPrompt.begin() + 5}, {30});
  const std::vector<std::pair<Ids, size_t>> texts = {
      {joined(kPrompt, {20, 21}), 12}, {kPrompt, hybrid ? 4 : 11}, {other, hybrid ? 4 : 5}};
  for (TokenCache* one : {&cache, loaded.get()})
    for (const auto& [ids, expected] : texts) {
      const size_t kept = one->keep(ids);
      CHECK(kept == expected);
      CHECK(all(one->generate(from(ids, kept), {.max_new_tokens = 6})) == fresh(model, ids, 6));
    }
}

void cancelled_answers_leave_whole_steps(const std::string& folder) {
  const Model model(folder);
  const std::filesystem::path path = std::filesystem::temp_directory_path() / "quantmoe-cpp-cancelled.state";
  Ids more;
  for (int64_t i = 0; i < 300; ++i) more.push_back(i * 11 % 4000 + 1);
  int ended = 0;
  for (int i = 0; i < 30; ++i) {
    TokenCache cache(model);
    all(cache.generate(kPrompt, {.max_new_tokens = 2}));
    const TokenOptions options = {.max_new_tokens = 4};
    std::thread canceller([i, cancel = options.cancel] {
      std::this_thread::sleep_for(std::chrono::microseconds(i * 700));
      cancel.cancel();
    });
    try {
      all(cache.generate(more, options));
    } catch (const Cancelled&) {
      ++ended;
    }
    canceller.join();
    cache.save(path);
    const auto loaded = TokenCache::load(model, path);
    CHECK(loaded->tokens() == cache.tokens());
    const Ids ids = joined(cache.tokens(), {50, 51});
    CHECK(all(loaded->generate({50, 51}, {.max_new_tokens = 4})) == fresh(model, ids, 4));
    CHECK(cache.keep(ids) == ids.size() - 2);
    CHECK(all(cache.generate({50, 51}, {.max_new_tokens = 4})) == fresh(model, ids, 4));
  }
  CHECK(ended > 0);
  std::filesystem::remove(path);
}

void savers_of_one_path_do_not_disturb_each_other(const std::string& folder) {
  const Model model(folder);
  const std::filesystem::path made = std::filesystem::temp_directory_path() / "quantmoe-cpp-savers";
  std::filesystem::create_directories(made);
  std::ofstream(made / "state.partial") << "another program's";
  std::filesystem::remove(made / "link");
  std::filesystem::create_symlink("state", made / "link");
  std::atomic<int> refusals = 0;
  std::vector<std::thread> savers;
  for (int i = 0; i < 6; ++i)
    savers.emplace_back([&] {
      TokenCache cache(model);
      all(cache.generate(kPrompt, {.max_new_tokens = 3}));
      for (int save = 0; save < 10; ++save) try {
          cache.save(made / (save % 2 ? "state" : "link"));
          TokenCache::load(model, made / "state");
        } catch (const std::exception& error) {
          ++refusals, std::cerr << error.what() << '\n';
        }
    });
  for (std::thread& saver : savers) saver.join();
  CHECK(refusals == 0);
  CHECK(std::filesystem::is_symlink(made / "link"));
  std::set<std::string> names;
  for (const auto& file : std::filesystem::directory_iterator(made)) names.insert(file.path().filename().string());
  CHECK(names == std::set<std::string>({"link", "state", "state.partial"}));
  std::filesystem::remove_all(made);
}

void a_file_that_is_no_saved_state_is_not_replaced(const std::string& folder) {
  const Model model(folder);
  const std::filesystem::path notes = std::filesystem::temp_directory_path() / "quantmoe-cpp-notes";
  const auto text_of = [&] { return std::string(std::istreambuf_iterator(std::ifstream(notes).rdbuf()), {}); };
  TokenCache cache(model);
  all(cache.generate(kPrompt, {.max_new_tokens = 2}));
  for (const std::string& text : {"my notes"s, "a text of more than eight bytes"s, "\2\0\0\0\0\0\0\0{}"s}) {
    std::ofstream(notes) << text;
    CHECK(refused<std::runtime_error>([&] { cache.save(notes); }) ==
          notes.string() + ": is there, and is no saved state: expected an earlier one, or no file");
    CHECK(text_of() == text);
  }
  CHECK(has(refused<std::runtime_error>([&] { cache.save(notes.parent_path()); }), "is no saved state"));
  std::ofstream(notes) << "";
  cache.save(notes);
  CHECK(TokenCache::load(model, notes)->tokens() == cache.tokens());
  std::filesystem::remove(notes);
}

void close_ends_answers_by_name(const std::string& folder) {
  for (int i = 0; i < 10; ++i) {
    const Generator model(folder);
    TokenCache cache(model);
    std::string found;
    std::thread answer(
        [&] { found = refused<Closed>([&] { all(cache.generate(kPrompt, {.max_new_tokens = 100000})); }); });
    std::this_thread::sleep_for(std::chrono::milliseconds(3 * i));
    model.close();
    answer.join();
    CHECK(found == "the model is closed; open it again");
    CHECK(refused<Closed>([&] { cache.keep(kPrompt); }) == found);
    CHECK(refused<Closed>([&] { cache.save("nowhere"); }) == found);
    CHECK(refused<Closed>([&] { TokenCache other(model); }) == found);
    CHECK(refused<Closed>([&] { model.tokenizer(); }) == found);
    model.close();
  }
}

void wrong_calls_are_refused(const std::string& folder) {
  const Generator model(folder, [](Ort::SessionOptions& options) { options.SetLogSeverityLevel(4); });
  TokenCache cache(model);
  CHECK(refused<std::invalid_argument>([&] { cache.generate({}); }) == "the prompt has no tokens");
  for (const int64_t id : {-1, 4096})
    CHECK(refused<std::invalid_argument>([&] { cache.generate({1, id}); }) ==
          "token id " + std::to_string(id) + " is outside the vocabulary, 0 to 4095");
  CHECK(all(cache.generate(kPrompt, {.max_new_tokens = 3})) == fresh(model, kPrompt, 3));
  Stream<int64_t> one = cache.generate({1}), other = cache.generate({1});
  CHECK(has(refused<std::logic_error>([&] { one.next(); }), "another answer was begun"));
  Chat chat(model);
  CHECK(has(refused<std::runtime_error>([&] { chat.reply("a", {.sampling = Sampling{.top_p = 1.5}}); }),
            "top_p is 1.5, expected a number above 0, at most 1"));
  CHECK(has(refused<std::runtime_error>([&] { Chat(model, "Be kind."); }),
            "takes no system prompt; put it into the first message"));
  CHECK(has(refused<std::runtime_error>([&] { model.tokenizer().encode("\xff", false); }), "not UTF-8"));
  CHECK(has(refused<std::runtime_error>([&] { model.tokenizer().decode({-1}); }), "-1: expected a token id"));
  std::vector<float> logits(8);
  const auto choose = Sampling{.repetition_penalty = 2}.sampler({-1});
  CHECK(refused<std::runtime_error>([&] { choose(logits); }) == "token id -1 is outside the vocabulary, 0 to 7");
  for (const size_t most : {size_t{0}, static_cast<size_t>(-1), size_t{1} << 40})
    CHECK(refused<std::invalid_argument>([&] { Generator(folder, {}, Drafts::ngram(most)); }) ==
          "drafts.most is " + std::to_string(most) + ", expected a number from 1 to " +
              std::to_string(model.context_length()));
}

void files_that_cannot_be_opened_are_named(const std::string& folder) {
  const Generator model(folder);
  const std::filesystem::path made = std::filesystem::temp_directory_path() / "quantmoe-cpp-files",
                              none = made / "none";
  std::filesystem::create_directories(made);
  CHECK(refused<std::runtime_error>([&] { Model(""); }) == "\"\": missing; expected the folder of an exported model");
  const std::string file = folder + "/model.onnx";
  CHECK(refused<std::runtime_error>([&] { Model{file}; }) ==
        file + "/model.onnx: missing; expected the folder of an exported model");
  CHECK(refused<std::runtime_error>([&] { TokenCache::load(model, none); }) ==
        none.string() + ": cannot be read: No such file or directory");
  CHECK(refused<std::runtime_error>([&] { TokenCache::load(model, made); }) ==
        made.string() + ": is a folder, expected a safetensors file");
  TokenCache cache(model);
  all(cache.generate({1}, {.max_new_tokens = 1}));
  CHECK(refused<std::runtime_error>([&] { cache.save(none / "state"); }) ==
        (none / "state").string() + ": cannot be written: No such file or directory");
  const char* own = std::getenv("QUANTMOE_ORT_LIBRARY");
  const std::string library = own ? own : "";
  setenv("QUANTMOE_ORT_LIBRARY", none.c_str(), 1);
  const std::string said = refused<Ort::Exception>([&] { Model{folder}; });
  library.empty() ? unsetenv("QUANTMOE_ORT_LIBRARY") : setenv("QUANTMOE_ORT_LIBRARY", library.c_str(), 1);
  CHECK(has(said, none.string()) && has(said, "; set QUANTMOE_ORT_LIBRARY to libquantmoe_ort.so, for example"));
  std::filesystem::remove_all(made);
}

void threads_share_a_model(const std::string& folder) {
  const Model model(folder, [](Ort::SessionOptions& options) { options.SetIntraOpNumThreads(1); });
  const Ids expected = fresh(model, kPrompt, 20);
  std::vector<Ids> found(8);
  std::vector<std::thread> threads;
  for (Ids& ids : found) threads.emplace_back([&] { ids = fresh(model, kPrompt, 20); });
  for (std::thread& thread : threads) thread.join();
  for (const Ids& ids : found) CHECK(ids == expected);
}

void drafts_give_the_same_tokens(const std::string& folder, Drafts drafts) {
  const Generator plain(folder), model(folder, {}, drafts);
  Ids ids = model.tokenizer().encode("And he said unto them, And he said unto them, And he said", true);
  const Ids whole = fresh(plain, ids, 60);
  TokenCache cache(model, true);
  CHECK(all(cache.generate(ids, {.max_new_tokens = 60})) == whole);
  CHECK(cache.accepted() > 0 && cache.accepted() <= cache.drafted());
  CHECK(cache.tokens() == joined(ids, {whole.begin(), whole.end() - 1}));
  for (size_t count = 1; count < 20; ++count) {  // an answer that is left within a step
    TokenCache left(model, true);
    Stream<int64_t> stream = left.generate(ids, {.max_new_tokens = 60});
    Ids found;
    while (found.size() < count) found.push_back(*stream.next());
    CHECK(left.tokens() == joined(ids, {found.begin(), found.end() - 1}));
    if (count % 2) {
      CHECK(joined(found, all(left.generate({}, {.max_new_tokens = 60 - count}))) == whole);
    } else {
      const Ids other = joined(ids, joined({found.begin(), found.end() - 1}, {20, 21}));
      const size_t kept = left.keep(other);
      CHECK(kept == other.size() - 2);
      CHECK(all(left.generate(from(other, kept), {.max_new_tokens = 6})) == fresh(plain, other, 6));
    }
  }
  const auto text = [&](const Generator& of) {
    Chat chat(of, {}, true);
    const Sampling sampling = {.temperature = 0.6, .seed = 3};
    return said(chat.reply("And it came to pass", {.max_new_tokens = 40, .sampling = sampling}));
  };
  CHECK(text(model) == text(plain));
  Chat chat(model, {}, true);
  said(chat.reply("And he said unto them, And he said", greedy(60)));
  CHECK(chat.last().accepted > 0 && chat.last().tokens > chat.last().accepted);
}

void drafts_that_a_model_cannot_verify_are_refused(const std::string& plain, const std::string& hybrid) {
  CHECK(has(refused<std::invalid_argument>([&] { Model(hybrid, {}, Drafts::ngram()); }),
            ": 4 draft tokens need an export with --state-window 5"));
  CHECK(has(refused<std::invalid_argument>([&] { Model(plain, {}, Drafts::mtp(2)); }),
            ": 2 draft tokens need an export with --mtp"));
}

void text_goes_on(const std::string& folder) {
  const Generator model(folder);
  const std::string prompt = "Then said the captain";
  Chat chat(model);
  const Ids ids = model.tokenizer().encode(prompt, true);
  const std::string text = said(chat.reply(prompt, greedy(24)));
  CHECK(text == model.tokenizer().decode(fresh(model, ids, 24)));
  CHECK(chat.last().prompt_tokens == ids.size() && chat.last().kept_tokens == 0 && chat.last().tokens == 24);
  CHECK(!chat.last().stopped);
  const std::string stop = text.substr(text.size() / 2, 6);
  Chat other(model);
  Options options = greedy(24);
  options.stop = {"never", stop};
  CHECK(said(other.reply(prompt, options)) == text.substr(0, text.find(stop)));
  CHECK(other.last().stopped);
}

void turns_are_one_prompt_of_all(const std::string& folder) {
  const Generator model(folder);
  Chat chat(model, "Be kind.");
  Ids ids;
  std::string before = "S: Be kind.\nQ: ";
  for (const std::string message : {"Who are you?", "Whence?", "Why?"}) {
    ids = joined(ids, model.tokenizer().encode(before + message + "\nA:", false));
    Ids answer = fresh(model, ids, 8);
    for (const int64_t stop : model.stop_tokens()) std::erase(answer, stop);
    CHECK(said(chat.reply(message, greedy(8))) == model.tokenizer().decode(answer));
    CHECK(chat.last().prompt_tokens == ids.size());
    CHECK(before[0] == 'S' || chat.last().kept_tokens > 0);
    ids = joined(ids, answer);
    before = "\nQ: ";
  }
}

void an_answer_that_ends_within_a_character_goes_on(const std::string& folder) {
  const Generator model(folder);
  const TextTokenizer& tokenizer = model.tokenizer();
  const Ids prompt = tokenizer.encode("Then said", true), more = tokenizer.encode(" the captain", false);
  Sampling any = {.temperature = 1000, .top_k = 0, .seed = 0};
  Ids answer;
  for (; tokenizer.decode(answer) != "\uFFFD" && any.seed < 1000; ++*any.seed) {
    TokenCache cache(model);
    answer = all(cache.generate(prompt, {1, any.sampler(prompt)}));
  }
  --*any.seed;
  Chat chat(model);
  CHECK(said(chat.reply("Then said", {.max_new_tokens = 1, .sampling = any})) == "\uFFFD");
  const Ids ids = joined(joined(prompt, answer), more);
  CHECK(said(chat.reply(" the captain", greedy(8))) == tokenizer.decode(fresh(model, ids, 8)));
  CHECK(chat.last().prompt_tokens == ids.size());
}

void a_template_is_rendered_where_there_are_no_turns(const std::string& folder) {
  const Generator model(folder);
  Chat chat(model, "Be kind.");
  Ids ids;
  for (const auto& [text, message] : std::vector<std::pair<std::string, std::string>>{
           {"Be kind.|1 Who?\nA:", "Who?"}, {"|2 Whence?\nA:", "Whence?"}, {"|3 Why?\nA:", "Why?"}}) {
    ids = joined(ids, model.tokenizer().encode(text, false));
    Ids answer = fresh(model, ids, 8);
    for (const int64_t stop : model.stop_tokens()) std::erase(answer, stop);
    CHECK(said(chat.reply(message, greedy(8))) == model.tokenizer().decode(answer));
    CHECK(chat.last().prompt_tokens == ids.size());
    ids = joined(ids, answer);
  }
}

void oldest_turns_are_dropped(const std::string& folder) {
  const Generator model(folder);
  Chat chat(model, "Be kind.");
  for (int i = 0; i < 8; ++i) {
    CHECK(!said(chat.reply("And then?", greedy(12))).empty());
    CHECK(chat.last().prompt_tokens + 12 <= 64);
  }
  std::string large;
  for (int i = 0; i < 20; ++i) large += "Then said the captain of the host. ";
  CHECK(has(refused<std::invalid_argument>([&] { chat.reply(large, greedy(12)); }),
            "do not fit into the model's context of 64 tokens"));
  CHECK(!said(chat.reply("And then?", greedy(12))).empty());
}

void a_cancelled_chat_goes_on(const std::string& folder) {
  const Generator model(folder);
  Chat chat(model);
  const Options options = greedy(1000);
  std::string text;
  CHECK(refused<Cancelled>([&] {
          for (const std::string& piece : chat.reply("Then said the captain", options))
            if ((text += piece).size() > 10) options.cancel.cancel();
        }) == "the answer was cancelled");
  CHECK(!said(chat.reply(" And", greedy(4))).empty());
  CHECK(chat.last().kept_tokens > 0);
}

void sampling_follows_its_seed(const std::string& folder) {
  const Generator model(folder);
  CHECK(model.sampling().temperature == 0.8 && model.sampling().top_k == 50 && model.sampling().top_p == 0.95);
  const auto text = [&](const Sampling& sampling) {
    Chat chat(model);
    return said(chat.reply("The old house", {.max_new_tokens = 16, .sampling = sampling}));
  };
  const std::string greedy = text(Sampling::greedy());
  CHECK(greedy == text({.top_k = 1}));
  CHECK(text({.seed = 7}) == text({.seed = 7}));
  std::set<std::string> texts;
  for (uint64_t seed = 0; seed < 8; ++seed) texts.insert(text({.seed = seed}));
  CHECK(texts.size() > 4);
  CHECK(greedy != text({.temperature = 0, .repetition_penalty = 1e6}));
}

void what_the_folder_lacks_is_named(const std::string& folder) {
  const Generator model(folder);
  CHECK(has(refused<std::runtime_error>([&] { Chat chat(model); }), "chat_template.jinja: is missing"));
  CHECK(has(refused<std::runtime_error>([&] { Chat chat(model, {}, true); }), "tokenizer.json is missing"));
}

}  // namespace

int main(int, char** argv) {
  const std::string plain = argv[1], hybrid = argv[2];
  for (const std::string& folder : {plain, hybrid}) {
    answers_go_on(folder);
    caches_go_back(folder, folder == hybrid);
    cancelled_answers_leave_whole_steps(folder);
    savers_of_one_path_do_not_disturb_each_other(folder);
    close_ends_answers_by_name(folder);
    a_cancelled_chat_goes_on(folder);
  }
  a_file_that_is_no_saved_state_is_not_replaced(plain);
  wrong_calls_are_refused(plain);
  files_that_cannot_be_opened_are_named(plain);
  threads_share_a_model(plain);
  text_goes_on(plain);
  an_answer_that_ends_within_a_character_goes_on(plain);
  sampling_follows_its_seed(plain);
  turns_are_one_prompt_of_all(argv[3]);
  oldest_turns_are_dropped(argv[4]);
  what_the_folder_lacks_is_named(argv[5]);
  a_template_is_rendered_where_there_are_no_turns(argv[6]);
  drafts_give_the_same_tokens(plain, Drafts::ngram());
  drafts_give_the_same_tokens(argv[7], Drafts::ngram(3));
  drafts_give_the_same_tokens(argv[7], Drafts::mtp());
  drafts_that_a_model_cannot_verify_are_refused(plain, hybrid);
  std::cout << (failed ? "failed\n" : "all passed\n");
  return failed != 0;
}
