// Reads one case from stdin and writes what KleidiAI makes of it to stdout; generate.py has the arrays' order.
#include "kleidiai.h"

#include <cstdio>
#include <cstdlib>

namespace {

template <class T>
std::vector<T> read_values(int64_t count) {
  std::vector<T> values(count);
  if (std::fread(values.data(), sizeof(T), count, stdin) != static_cast<size_t>(count)) std::abort();
  return values;
}

template <class T>
void write_values(const std::vector<T>& values) {
  std::fwrite(values.data(), sizeof(T), values.size(), stdout);
}

}  // namespace

int main() {
  using namespace quantmoe::arm;
  const std::vector<int64_t> sizes = read_values<int64_t>(5);
  const int64_t m = sizes[4];
  Rhs rhs{static_cast<int>(sizes[0]), sizes[1], sizes[2], sizes[3], {}, {}, {}, {}};
  rhs.codes = read_values<uint8_t>(rhs.n * rhs.k);
  if (rhs.group > 0)
    rhs.scales_bf16 = read_values<uint16_t>(rhs.n * (rhs.k / rhs.group));
  else
    rhs.scales_f32 = read_values<float>(rhs.n);
  rhs.bias = read_values<float>(rhs.n);
  const std::vector<float> x = read_values<float>(m * rhs.k);

  const std::vector<uint8_t> packed = kleidi_pack(rhs);
  write_values(std::vector<int64_t>{static_cast<int64_t>(packed.size())});
  write_values(packed);
  const std::vector<uint8_t> rows = kleidi_quantize(x.data(), m, rhs.k, 1);  // a row: ceil(K, 32) codes, -z, step
  write_values(rows);
  for (bool i8mm : {false, true}) {
    const std::vector<uint8_t> lhs = kleidi_quantize(x.data(), m, rhs.k, i8mm ? 4 : 1);
    std::vector<float> y(m * rhs.n);
    kleidi_matmul(rhs, i8mm, m, lhs.data(), packed.data(), y.data());
    write_values(y);
  }
}
