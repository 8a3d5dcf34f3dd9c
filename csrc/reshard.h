// reshard.h: the plain C interface of the packing kernels, and the definition of the tensor checksum.
//
// THE CHECKSUM of a tensor of n bytes (row-major, contiguous, the last word padded with zero bytes) is
//
//     seed(n) + sum over its 32-bit little-endian words w_i of  w_i * B_i      (mod 2^64)
//
// where B_i = slimx_multiplier(i) is an odd 32-bit number, i counts words from the start of the tensor (mod 2^32), and
// seed is SplitMix64. The checksum depends only on the final bytes of the tensor. It is linear in the bytes: the byte
// at offset p contributes (byte << 8 * (p % 4)) * B_(p / 4). Pieces, tiles, threads and ranks can therefore each add
// their own bytes in any order, and a piece may start in the middle of a word (bf16 at an odd element, fp8 at any
// byte). The seed is added once per tensor. It distinguishes a tensor from the same tensor with zeros appended, and a
// tensor of zeros from a sum that was never computed.
//
// What it detects with certainty:
//   - any change within one word (so any changed byte): the sum changes by d * B_i with 0 < |d| < 2^32, and an odd
//     B_i is invertible mod 2^64, so the change is not 0;
//   - any exchange of two different words less than 8 GiB apart: the sum changes by (w_i - w_j) * (B_j - B_i). Neither
//     factor is 0, because B is injective over 2^31 consecutive i, and the product is below 2^64 in absolute value.
// Corruption of more words remains undetected with a probability of about 2^-64. The checksum does not protect against
// an adversary.
//
// An earlier definition, ((w_i + K0*i + S0) mod 2^32) * ((K1*i + S1) | 1), was replaced for three reasons. Its
// truncated addition is not linear in w_i, so half a word could not be summed. `| 1` gives two positions the same
// multiplier. And a multiplier affine in i does not detect changes by +d, -2d, +d at evenly spaced words, or an
// exchange of two rows with equal sums (block scales with few distinct values can have such rows); therefore the
// multiplier has mixing steps.
#pragma once

#include <stdint.h>

#include "numerics.h"

#ifdef __cplusplus
extern "C" {
#endif

// Changes with the records, the functions and the checksum, so that a stale library is refused when it is loaded.
#define SLIMX_ABI 4

// Operation on a piece's elements. A source element is a bf16 (item 2), an fp32 (item 4) or an e4m3 code (item 1).
//
// "Flags" means that the op sets SLIMX_NONFINITE for the tensor if it writes an infinite or NaN element, because it
// read one or because an fp32 was too large for bf16. A plain copy copies bytes of any type and sets no flags.
typedef enum {
  SLIMX_COPY = 0,              // elements of any size, copied as bytes
  SLIMX_COPY_CHECKED = 1,      // bf16 or fp32, copied unchanged; flags
  SLIMX_FP32_TO_BF16 = 2,      // flags
  SLIMX_BF16_TO_FP32 = 3,      // flags
  SLIMX_QUANTIZE_FP8 = 4,      // bf16 or fp32 -> e4m3 codes and fp32 scales by IEEE, TRITON, TE or UE8M0; flags
  SLIMX_QUANTIZE_MXFP8 = 5,    // bf16 or fp32 -> e4m3 codes and E8M0 scales by MXFP8, blocks of 1 x 32; flags
  SLIMX_DEQUANTIZE_FP8 = 6,    // e4m3 codes and fp32 scales -> bf16 or fp32; flags
  SLIMX_DEQUANTIZE_MXFP8 = 7,  // e4m3 codes and E8M0 scales -> bf16 or fp32, blocks of 1 x 32; flags
  SLIMX_QUANTIZE_INT4 = 8,     // bf16 or fp32 -> INT4 codes, two per byte, and bf16 scales (int4.h); flags
} SlimxOp;

// One rectangle of elements, the operation on it, and its position in its destination tensor; 128 bytes. Any number of
// pieces may make up a tensor. All ops except COPY require natural alignment: src, src_ld and src_step to `item`, dst,
// dst_ld, pos and pos_ld to `out`, and the fields of scales to their size.
typedef struct {
  uint64_t src;      // address of the first byte to read
  int64_t src_ld;    // bytes from one source row to the next
  int64_t src_step;  // bytes from one source element to the next: `item`, or more if it is transposed
  uint64_t dst;      // offset in the bucket of the first value byte to write; ignored by slimx_checksum
  int64_t dst_ld;    // bytes from one row to the next in the bucket; ignored by slimx_checksum
  uint64_t
      pos;  // offset of the first value byte in the whole destination tensor, of which the bucket may contain a part
  int64_t pos_ld;  // bytes from one row to the next in the whole destination tensor
  int64_t rows;    // source rows; 0 is allowed: an empty piece
  int64_t cols;    // source elements per row; 0 is allowed
  // Block scales are written in addition to the codes by quantizing ops, and read by dequantizing ones.
  uint64_t scale;        // first block's scale: offset in the bucket (quantize) or address (dequantize)
  int64_t scale_ld;      // bytes from one row of scales to the next, in the bucket or at the address
  uint64_t scale_pos;    // offset of the first block's scale in the whole scale tensor (quantize)
  int64_t scale_pos_ld;  // bytes from one row to the next in the whole scale tensor (quantize)
  int32_t tensor;        // index of the destination tensor in `sums` and `flags`
  int32_t scale_tensor;  // index of the scale tensor in `sums` (quantize), -1 for other ops
  // Rows and columns of a block, 0 for ops without blocks. A piece starts on a block boundary of its tensor, and a
  // block may be partial only at the tensor's own edge, so every block is in one piece. INT4 blocks are complete, 1 x
  // 32.
  int32_t block_rows;
  int32_t block_cols;
  uint8_t op;         // SlimxOp
  uint8_t rule;       // SlimxRule; NONE for ops that do not quantize
  uint8_t item;       // bytes of one source element
  uint8_t out;        // bytes of one destination element; for INT4, of a byte with two codes
  uint32_t reserved;  // must be 0
} SlimxPiece;

// Bits of a tensor's flags. Kernels set bits and never clear them.
#define SLIMX_NONFINITE 1u

typedef enum {
  SLIMX_OK = 0,
  SLIMX_NO_MEMORY = 1,
  SLIMX_NO_SUCH_ISA = 2,       // this processor does not have the requested instruction set
  SLIMX_NO_TRITON_SCALES = 3,  // a piece has the rule TRITON, but no table was passed
} SlimxStatus;

typedef enum { SLIMX_ISA_BEST = 0, SLIMX_ISA_SCALAR = 1, SLIMX_ISA_AVX2 = 2, SLIMX_ISA_AVX512 = 3 } SlimxIsa;

// Size of the table for the rule TRITON on the CPU, which a GPU wrote once: {s, 1 / s} by div.full.f32 for every finite
// bf16 amax, in the order of its bits, raised to SLIMX_LEAST_AMAX. It does not cover the amax values of fp32 sources.
#define SLIMX_TRITON_SCALES SLIMX_INF_BF16

// Bits are the same for every instruction set and every number of threads. Pieces must not overlap in the bucket, and
// bucket and sources must not overlap. The caller must check addresses and offsets: the result of a wrong one is
// undefined.

int slimx_abi(void);
int slimx_has_isa(SlimxIsa isa);  // 1 or 0

// Adds seed(bytes[k]) to sums[k]; called once per tensor, by the rank that completes its checksum.
void slimx_seed(const int64_t* bytes, int64_t n, uint64_t* sums);

// Performs each piece's op, writes the results into the bucket, adds the contributions of the written bytes to
// sums[tensor] and sums[scale_tensor], and sets flags[tensor]. `triton_scales`: [SLIMX_TRITON_SCALES][2], or NULL.
SlimxStatus slimx_pack(const SlimxPiece* pieces, int64_t n, uint8_t* bucket, uint64_t* sums, uint32_t* flags,
                       const float* triton_scales, SlimxIsa isa, int threads);

// Adds the contribution of each piece's source bytes (rows x cols elements of `item` bytes, at pos) to sums[tensor],
// whatever its op and without copying: for tensors, or parts of them, in any layout.
SlimxStatus slimx_checksum(const SlimxPiece* pieces, int64_t n, uint64_t* sums, SlimxIsa isa, int threads);

// B_i: every step is a bijection of the odd 32-bit numbers, and the first is injective over 2^31 consecutive i.
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
