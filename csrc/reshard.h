// reshard.h: the plain C interface of the reshard kernels, and the definition of the tensor checksum.
//
// THE CHECKSUM of a tensor of n bytes (row-major, contiguous, the last word padded with zero bytes) is
//
//     seed(n) + sum over its 32-bit little-endian words w_i of  w_i * B_i      (mod 2^64)
//
// where B_i = slimx_multiplier(i) is an odd 32-bit number, i counts words from the start of the tensor (mod 2^32), and
// seed is SplitMix64. It depends on the final bytes of the tensor alone. The sum is linear in the bytes: the byte at
// offset p adds (byte << 8 * (p % 4)) * B_(p / 4). So pieces, tiles, threads and ranks each add their own bytes in any
// order, and a piece may begin in the middle of a word (bf16 at an odd element, fp8 at any byte). The seed is added
// once per tensor; it tells a tensor from the same tensor with zeros appended, and a zero tensor from a sum that nobody
// computed.
//
// What it detects with certainty:
//   - any change within one word (so any flipped byte): the sum moves by d * B_i with 0 < |d| < 2^32, and an odd B_i is
//     invertible mod 2^64, so that is not 0;
//   - any exchange of two different words less than 8 GiB apart: the sum moves by (w_i - w_j) * (B_j - B_i). Neither
//     factor is 0, as B is injective over 2^31 consecutive i, and the product stays below 2^64 in absolute value.
// Damage to more words escapes with a probability of about 2^-64. It is no defence against an adversary.
//
// The prototype's definition, ((w_i + K0*i + S0) mod 2^32) * ((K1*i + S1) | 1), was left for three reasons. Its
// truncated addition is not linear in w_i, so half a word could not be summed. `| 1` gives two positions the same
// multiplier. And a multiplier affine in i cancels +d, -2d, +d at evenly spaced words, or two exchanged rows of equal
// sum (few-valued block scales can have such rows): hence the mixing steps.
#pragma once

#include <stdint.h>

#ifdef __CUDACC__
#define SLIMX_INLINE static __host__ __device__ __forceinline__
#else
#define SLIMX_INLINE static inline __attribute__((always_inline))
#endif

#ifdef __cplusplus
extern "C" {
#endif

// Changes with the records, the functions or the checksum, so that a stale library is refused when it is loaded.
#define SLIMX_ABI 1

// One rectangle of bytes and its place in its destination tensor. A tensor is covered by any number of them.
typedef struct {
  uint64_t src;       // address of the first byte to read
  int64_t src_ld;     // bytes from one source row to the next
  uint64_t dst;       // offset in the bucket of the first byte to write; ignored by slimx_checksum
  int64_t dst_ld;     // bytes from one row to the next in the bucket; ignored by slimx_checksum
  uint64_t pos;       // offset of the first byte in the whole destination tensor, even where the bucket holds a part
  int64_t pos_ld;     // bytes in one row of the whole destination tensor
  int64_t rows;       // 0 is allowed: an empty piece
  int64_t row_bytes;  // 0 is allowed
  int32_t tensor;     // index into `sums`
  uint32_t reserved;  // 0
} SlimxPiece;

typedef enum {
  SLIMX_OK = 0,
  SLIMX_NO_MEMORY = 1,
  SLIMX_NO_SUCH_ISA = 2,  // this processor does not have the instruction set that was asked for
} SlimxStatus;

typedef enum { SLIMX_ISA_BEST = 0, SLIMX_ISA_SCALAR = 1, SLIMX_ISA_AVX2 = 2, SLIMX_ISA_AVX512 = 3 } SlimxIsa;

// Bits are the same for every instruction set and every number of threads. Pieces must not overlap in the bucket, and
// bucket and sources must not overlap. Addresses and offsets are the caller's to check: a wrong one is undefined.

int slimx_abi(void);
int slimx_has_isa(SlimxIsa isa);  // 1 or 0

// Adds seed(bytes[k]) to sums[k]: once per tensor, by whoever completes its checksum.
void slimx_seed(const int64_t* bytes, int64_t n, uint64_t* sums);

// Copies each piece to bucket + dst, and adds its bytes' share of the checksum to sums[tensor].
SlimxStatus slimx_pack(const SlimxPiece* pieces, int64_t n, uint8_t* bucket, uint64_t* sums, SlimxIsa isa, int threads);

// The same sums without the copy: for whoever holds a tensor, or parts of it, in a layout of its own.
SlimxStatus slimx_checksum(const SlimxPiece* pieces, int64_t n, uint64_t* sums, SlimxIsa isa, int threads);

// B_i: every step maps the odd 32-bit numbers onto themselves, and the first is injective over 2^31 consecutive i.
#define SLIMX_K1 0x0BD794D6u  // 2 mod 4
#define SLIMX_S1 0xC2B2AE35u  // odd
#define SLIMX_K2 0x9E3779B1u  // odd

SLIMX_INLINE uint32_t slimx_multiplier(uint32_t i) {
  uint32_t x = i * SLIMX_K1 + SLIMX_S1;
  x = (x ^ (x >> 16)) | 1u;
  x *= SLIMX_K2;
  return (x ^ (x >> 15)) | 1u;
}

#ifdef __cplusplus
}
#endif
