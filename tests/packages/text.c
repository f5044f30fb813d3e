/* text FOLDER TEXT: prints the text's token ids and the text of these ids, by libquantmoe_text alone. */
#include <inttypes.h>
#include <quantmoe/text.h>
#include <stdio.h>
#include <string.h>

int main(int count, char** arguments) {
  qm_tokenizer* tokenizer = count == 3 ? qm_tokenizer_open(arguments[1]) : NULL;
  if (!tokenizer) return fprintf(stderr, "%s\n", count == 3 ? qm_text_error() : "usage: text FOLDER TEXT"), 1;
  const qm_ids ids = qm_tokenizer_encode(tokenizer, arguments[2], strlen(arguments[2]), 1);
  for (size_t i = 0; i < ids.size; ++i) printf("%" PRId64 " ", ids.data[i]);
  const qm_text text = qm_tokenizer_decode(tokenizer, ids.data, ids.size, 0);
  printf("%.*s\n", (int)text.size, text.data);
  qm_text_free(text), qm_ids_free(ids), qm_tokenizer_free(tokenizer);
  return 0;
}
