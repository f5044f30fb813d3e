// Prints the tokens that a model answers to the ids 1 2 3, without a file of the library.
#include <quantmoe/token_cache.h>

#include <iostream>

int main(int, char** arguments) {
  quantmoe::Model model(arguments[1]);
  quantmoe::TokenCache cache(model);
  for (int64_t id : cache.generate({1, 2, 3}, {.max_new_tokens = 8})) std::cout << id << ' ';
  std::cout << '\n';
}
