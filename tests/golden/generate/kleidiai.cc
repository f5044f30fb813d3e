// Reads one case from stdin and writes what KleidiAI makes of it to stdout; generate.py has the arrays' order.
#include "kleidiai.h"

#include <cstdio>
#include <cstdlib>

namespace {

template <class T>
std::vector<T> Read(int64_t count) {
  std::vector<T> values(count);
  if (std::fread(values.data(), sizeof(T), count, stdin) != static_cast<size_t>(count)) std::abort();
  return values;
}

template <class T>
void Write(const std::vector<T>& values) {
  std::fwrite(values.data(), sizeof(T), values.size(), stdout);
}

}  // namespace

int main() {
  using namespace quantmoe::arm;
  const std::vector<int64_t> sizes = Read<int64_t>(5);
  const int64_t m = sizes[4];
  Rhs rhs{static_cast<int>(sizes[0]), sizes[1], sizes[2], sizes[3], {}, {}, {}, {}};
  rhs.codes = Read<uint8_t>(rhs.n * rhs.k);
  if (rhs.group > 0)
    rhs.scales_bf16 = Read<uint16_t>(rhs.n * (rhs.k / rhs.group));
  else
    rhs.scales_f32 = Read<float>(rhs.n);
  rhs.bias = Read<float>(rhs.n);
  const std::vector<float> x = Read<float>(m * rhs.k);

  const std::vector<uint8_t> packed = KleidiPack(rhs);
  Write(std::vector<int64_t>{static_cast<int64_t>(packed.size())});
  Write(packed);
  const std::vector<uint8_t> rows = KleidiQuantize(x.data(), m, rhs.k, 1);  // a row: ceil(K, 32) codes, -z, step
  Write(rows);
  for (bool i8mm : {false, true}) {
    const std::vector<uint8_t> lhs = KleidiQuantize(x.data(), m, rhs.k, i8mm ? 4 : 1);
    std::vector<float> y(m * rhs.n);
    KleidiMatmul(rhs, i8mm, m, lhs.data(), packed.data(), y.data());
    Write(y);
  }
}
