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

#include "numerics.h"

#ifdef __cplusplus
extern "C" {
#endif

// Changes with the records, the functions or the checksum, so that a stale library is refused when it is loaded.
#define SLIMX_ABI 4

// What becomes of an element. A source element is a bf16 (item 2), an fp32 (item 4) or an e4m3 code (item 1).
//
// "Flags": the op sets SLIMX_NONFINITE for the tensor where an element that it writes is infinite or NaN: because one
// was read, or because an fp32 was too large for bf16. A plain copy moves bytes of any type and flags nothing.
typedef enum {
  SLIMX_COPY = 0,              // any item size, as bytes
  SLIMX_COPY_CHECKED = 1,      // bf16 or fp32: the same bytes; flags
  SLIMX_FP32_TO_BF16 = 2,      // flags
  SLIMX_BF16_TO_FP32 = 3,      // flags
  SLIMX_QUANTIZE_FP8 = 4,      // bf16 or fp32 -> e4m3 codes and fp32 scales by IEEE, TRITON, TE or UE8M0; flags
  SLIMX_QUANTIZE_MXFP8 = 5,    // bf16 or fp32 -> e4m3 codes and E8M0 scales by MXFP8, blocks of 1 x 32; flags
  SLIMX_DEQUANTIZE_FP8 = 6,    // e4m3 codes and fp32 scales -> bf16 or fp32; flags
  SLIMX_DEQUANTIZE_MXFP8 = 7,  // e4m3 codes and E8M0 scales -> bf16 or fp32, blocks of 1 x 32; flags
  SLIMX_QUANTIZE_INT4 = 8,     // bf16 or fp32 -> INT4 codes, two in a byte, and bf16 scales (int4.h); flags
} SlimxOp;

// One rectangle of elements, what becomes of it, and its place in its destination tensor; 128 bytes. A tensor is
// covered by any number of pieces. Everything but COPY wants natural alignment: src, src_ld and src_step to `item`,
// dst, dst_ld, pos and pos_ld to `out`, and scales to their size in every field.
typedef struct {
  uint64_t src;      // address of the first byte to read
  int64_t src_ld;    // bytes from one source row to the next
  int64_t src_step;  // bytes from one source element to the next: `item`, or more (a transposed source)
  uint64_t dst;      // offset in the bucket of the first value byte to write; ignored by slimx_checksum
  int64_t dst_ld;    // bytes from one row to the next in the bucket; ignored by slimx_checksum
  uint64_t pos;      // offset of the first value byte in the whole destination tensor, even where the bucket has a part
  int64_t pos_ld;    // bytes from one of the rectangle's rows to the next in that tensor
  int64_t rows;      // elements; 0 is allowed: an empty piece
  int64_t cols;      // likewise
  // Block scales are written beside the codes by the quantizing ops and read by the dequantizing ones.
  uint64_t scale;        // of this piece's first block: offset in the bucket (quantize) or address (dequantize)
  int64_t scale_ld;      // bytes there from one row of scales to the next
  uint64_t scale_pos;    // offset of that scale in the whole scale tensor (quantize)
  int64_t scale_pos_ld;  // bytes from one row of scales to the next in that tensor (quantize)
  int32_t tensor;        // index of the values into `sums` and `flags`
  int32_t scale_tensor;  // index of the scales into `sums` (quantize), -1 for other ops
  // Elements of a block, 0 where the op has none. A piece starts on a block boundary of its tensor, and a block at its
  // end may be partial only at the tensor's own edge: every block lies in one piece. Those of INT4 are whole, 1 x 32.
  int32_t block_rows;
  int32_t block_cols;
  uint8_t op;         // SlimxOp
  uint8_t rule;       // SlimxRule; NONE for ops that do not quantize
  uint8_t item;       // bytes of one source element
  uint8_t out;        // bytes of one destination element; of INT4, of two
  uint32_t reserved;  // 0
} SlimxPiece;

// Bits of a tensor's flags. Kernels only ever set them.
#define SLIMX_NONFINITE 1u

typedef enum {
  SLIMX_OK = 0,
  SLIMX_NO_MEMORY = 1,
  SLIMX_NO_SUCH_ISA = 2,       // this processor does not have the instruction set that was asked for
  SLIMX_NO_TRITON_SCALES = 3,  // a piece has the rule TRITON and no table was given
} SlimxStatus;

typedef enum { SLIMX_ISA_BEST = 0, SLIMX_ISA_SCALAR = 1, SLIMX_ISA_AVX2 = 2, SLIMX_ISA_AVX512 = 3 } SlimxIsa;

// The table for the rule TRITON on the CPU, made once by a device: {s, 1 / s} by div.full.f32 for every finite bf16
// amax, in the order of its bits, of max(amax, SLIMX_LEAST_AMAX). An fp32 source has amax values that no table holds.
#define SLIMX_TRITON_SCALES SLIMX_INF_BF16

// Bits are the same for every instruction set and every number of threads. Pieces must not overlap in the bucket, and
// bucket and sources must not overlap. Addresses and offsets are the caller's to check: a wrong one is undefined.

int slimx_abi(void);
int slimx_has_isa(SlimxIsa isa);  // 1 or 0

// Adds seed(bytes[k]) to sums[k]: once per tensor, by whoever completes its checksum.
void slimx_seed(const int64_t* bytes, int64_t n, uint64_t* sums);

// Does each piece's op into the bucket, adds the share of the bytes it writes to sums[tensor] and sums[scale_tensor],
// and sets flags[tensor]. `triton_scales`: [SLIMX_TRITON_SCALES][2], or NULL.
SlimxStatus slimx_pack(const SlimxPiece* pieces, int64_t n, uint8_t* bucket, uint64_t* sums, uint32_t* flags,
                       const float* triton_scales, SlimxIsa isa, int threads);

// The share of the source bytes as they are, of every op (rows x cols elements of `item` bytes, at pos), without a
// copy: for whoever holds a tensor, or parts of it, in a layout of its own.
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
