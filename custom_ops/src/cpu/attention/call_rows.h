// What the operators with an input `rows` share: their threads, and the checks of a row.
#pragma once
#include <cstdint>

#include "core/attributes.h"

namespace quantmoe {

template <class Call>
int lanes_of(const Call& call) {
  return call.lanes > 1 ? call.lanes : 1;
}

// A row of `rows`: its first new token that counts, how many do, and the tokens before them.
struct CallRow {
  int64_t row, begin, count, past;

  CallRow(const int32_t* rows, int64_t row)
      : row(row), begin(rows[3 * row]), count(rows[3 * row + 1]), past(rows[3 * row + 2]) {}
  int refuse(const char* what, int64_t limit, char* err) const {
    return fail(err, QM_INVALID, "rows[%lld] is [%lld, %lld, %lld] (first token, tokens, tokens before): %s %lld",
                (long long)row, (long long)begin, (long long)count, (long long)past, what, (long long)limit);
  }
  int check_tokens(int64_t tokens, char* err) const {
    if (begin < 0 || count < 0 || past < 0) return refuse("expected numbers of at least", 0, err);
    if (begin + count > tokens) return refuse("the call's tokens are", tokens, err);
    return QM_OK;
  }
  // Of a cache with so many slots before and after the call.
  int check_slots(int64_t past_slots, int64_t slots, char* err) const {
    if (past > past_slots) return refuse("the cache before the call has slots", past_slots, err);
    if (past + count > slots) return refuse("the cache has slots", slots, err);
    return QM_OK;
  }
};

}  // namespace quantmoe
