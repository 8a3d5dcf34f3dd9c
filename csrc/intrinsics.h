// intrinsics.h: includes the x86-64 intrinsics.
#pragma once

#if defined(__x86_64__)
// GCC 12 emits a warning for its own AVX-512 header (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif
