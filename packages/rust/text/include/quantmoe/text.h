// Token ids, text, chat template and sampling of an exported folder. Texts are UTF-8, without a zero byte at the end.
//
// A function that fails returns a null pointer, alone or as `data`; qm_text_error() then says why. An empty result is
// not null. Any number of threads may use a tokenizer. A stream or a sampler is used by one thread at a time.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct qm_tokenizer qm_tokenizer;
typedef struct qm_text_stream qm_text_stream;

// Free both by qm_text_free and qm_ids_free.
typedef struct qm_text {
  char* data;
  size_t size;
} qm_text;

typedef struct qm_ids {
  int64_t* data;
  size_t size;
} qm_ids;

// Why the last function of this thread failed.
const char* qm_text_error(void);

// Reads the tokenizer.json of a folder. Truncation and padding are off.
qm_tokenizer* qm_tokenizer_open(const char* folder);
void qm_tokenizer_free(qm_tokenizer* tokenizer);

// special: with the special tokens at the begin and end of a text.
qm_ids qm_tokenizer_encode(const qm_tokenizer* tokenizer, const char* text, size_t size, int special);

// special: with the special tokens among the ids.
qm_text qm_tokenizer_decode(const qm_tokenizer* tokenizer, const int64_t* ids, size_t size, int special);

// The text of tokens as they come: whole characters, and never the begin of a stop string. It begins after some tokens,
// whose text is not given, except a last character that they only begin. The tokenizer may be freed before the stream.
qm_text_stream* qm_text_stream_new(const qm_tokenizer* tokenizer, const int64_t* after, size_t size,
                                   const char* const* stop, size_t stops);

// The text that one more token completes, and the text held back after the last token.
qm_text qm_text_stream_push(qm_text_stream* stream, int64_t id);
qm_text qm_text_stream_end(qm_text_stream* stream);

// Not 0 when a stop string came; nothing after it is given.
int qm_text_stream_stopped(const qm_text_stream* stream);
void qm_text_stream_free(qm_text_stream* stream);

// How tokens are chosen, with transformers' names and order. top_k 0: all. Without has_seed, another seed each time.
typedef struct qm_sampling {
  double temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
  uint64_t top_k, seed;
  int has_seed;
} qm_sampling;

typedef struct qm_sampler qm_sampler;

// What a folder's generation_config.json recommends; without the file, the likeliest token. 0 is failure.
int qm_sampling_open(const char* folder, qm_sampling* sampling);

// Chooses the tokens of one answer. Logits are finite; penalties change them. -1 is failure.
qm_sampler* qm_sampler_new(const qm_sampling* sampling, const int64_t* prompt, size_t size);
int64_t qm_sampler_choose(qm_sampler* sampler, float* logits, size_t size);
void qm_sampler_free(qm_sampler* sampler);

typedef struct qm_template qm_template;

// Reads a folder's chat template: the default one of chat_template.jinja and additional_chat_templates, else of
// tokenizer_config.json. Any number of threads may use it.
qm_template* qm_template_open(const char* folder);

// The last of a conversation's messages with all that the template writes around it: from the end of the answer before
// it, or from the begin, to where its answer begins. Without a system prompt, system is null.
qm_text qm_template_turn(const qm_template* chat_template, const char* system, const char* const* messages,
                         size_t count);
void qm_template_free(qm_template* chat_template);

void qm_text_free(qm_text text);
void qm_ids_free(qm_ids ids);

#ifdef __cplusplus
}
#endif
