// The kernel's parameters.
#pragma once
struct Scale {
  float* y;
  long long n;
  float by;
};
