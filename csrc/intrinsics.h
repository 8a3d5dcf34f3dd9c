// intrinsics.h: the instructions of x86-64 by name.
#pragma once

#if defined(__x86_64__)
// GCC 12 warns inside its own AVX-512 header (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif
