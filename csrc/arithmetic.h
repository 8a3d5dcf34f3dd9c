// arithmetic.h: the arithmetic of a thread, whatever the program has set: rounding to nearest, exceptions masked.
#pragma once

#include "intrinsics.h"

namespace slimx {

// Until the end of the scope: denormals as they are, or, where kFlush, as zeros of their sign.
template <bool kFlush>
class Arithmetic {
#if defined(__x86_64__)
 public:
  Arithmetic() : saved_(_mm_getcsr()) { _mm_setcsr(kFlush ? 0x9FC0 : 0x1F80); }
  ~Arithmetic() { _mm_setcsr(saved_); }

 private:
  const unsigned saved_;
#else
 public:
  Arithmetic() {}
#endif
};

using IeeeArithmetic = Arithmetic<false>;

}  // namespace slimx
