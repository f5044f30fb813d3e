// tokens FOLDER FILE: what the headers give for the texts of a file of ids (tests/real/languages.py), a line each.
#include <quantmoe/chat.h>

#include <fstream>
#include <iostream>

static const std::string kLetters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

static std::string decode64(const std::string& text) {
  std::string found;
  uint32_t bits = 0, count = 0;
  for (const char letter : text.substr(0, text.find('='))) {
    bits = bits << 6 | static_cast<uint32_t>(kLetters.find(letter)), count += 6;
    if (count >= 8) found += static_cast<char>(bits >> (count -= 8));
  }
  return found;
}

static std::string encode64(const std::string& text) {
  std::string found;
  uint32_t bits = 0, count = 0;
  for (const char byte : text)
    for (bits = bits << 8 | static_cast<uint8_t>(byte), count += 8; count >= 6;)
      found += kLetters[bits >> (count -= 6) & 63];
  if (count) found += kLetters[bits << (6 - count) & 63];
  return found.append((4 - found.size() % 4) % 4, '=');
}

static std::string joined(const quantmoe::Ids& ids) {
  std::string text;
  for (const int64_t id : ids) text += (text.empty() ? "" : " ") + std::to_string(id);
  return text;
}

// At how many places a stream that begins there is not the rest of the text.
static int wrong(const quantmoe::TextTokenizer& tokenizer, const quantmoe::Ids& ids, const std::string& whole) {
  int wrong = 0;
  for (auto cut = ids.begin();; ++cut) {
    const quantmoe::Ids before(ids.begin(), cut);
    std::string text = tokenizer.decode(before);
    while (text.ends_with("\xef\xbf\xbd")) text.resize(text.size() - 3);
    quantmoe::TextStream stream(tokenizer, {}, before);
    for (auto id = cut; id != ids.end(); ++id) text += stream.push(*id);
    wrong += text + stream.end() != whole;
    if (cut == ids.end()) return wrong;
  }
}

int main(int, char** argv) {
  const quantmoe::TextTokenizer tokenizer(argv[1]);
  std::ifstream file(argv[2]);
  for (std::string line; std::getline(file, line);) {
    const std::string text = decode64(line.substr(0, line.find('\t')));
    const quantmoe::Ids ids = tokenizer.encode(text, true);
    const std::string whole = tokenizer.decode(ids);
    std::cout << encode64(text) << '\t' << joined(ids) << '\t' << joined(tokenizer.encode(text, false)) << '\t'
              << encode64(whole) << '\t' << wrong(tokenizer, ids, whole) << '\n';
  }
}
