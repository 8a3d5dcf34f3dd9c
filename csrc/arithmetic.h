// arithmetic.h: a thread's floating-point mode, independent of what the program has set: round to nearest, exceptions
// masked.
#pragma once

#include "intrinsics.h"

namespace slimx {

// Sets the mode until the end of the scope. Denormals are kept, or, with kFlush, flushed to zeros of the same sign.
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
