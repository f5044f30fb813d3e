#pragma once

namespace quantmoe {

#if defined(__aarch64__)
using Half = __fp16;  // GCC before 13 has no _Float16 in C++ here
#else
using Half = _Float16;
#endif

}  // namespace quantmoe
