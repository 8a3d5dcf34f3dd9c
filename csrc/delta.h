// delta.h: a frame: what has changed between two versions of the same bytes, and the plain C interface that makes and
// applies one on the CPU.
//
// THE FRAME of n bytes, cut into chunks of SLIMX_DELTA_CHUNK bytes (the last may be shorter), is
//
//     uint32 sizes[chunks]     bytes of each chunk's body, little-endian
//     bodies                   one after another
//
// and a chunk of m bytes, whose elements of `item` bytes make groups of eight, has one of three bodies:
//
//     0 bytes    nothing in it has changed
//     m bytes    the chunk as it is now: of a chunk whose changes would take m bytes or more
//     else       group bits    bit g % 8 of byte g / 8 says whether group g has changed; ceil(groups / 8) bytes, rest 0
//                masks         for each such group a byte, whose bit e says whether its element e has changed; never 0
//                elements      the changed ones, in order, as they are now
//
// So a version has one frame against another, and equal frames mean equal encoders. Two levels of masks, because few
// elements change: of 2% changed bf16 elements 85% of the groups have none, and both levels take 1.7% of the bytes
// where one bit for each element would take 6.3%.
#pragma once

#include <stdint.h>

#include "reshard.h"

#define SLIMX_DELTA_CHUNK 65536
#define SLIMX_DELTA_GROUP 8    // elements
#define SLIMX_DELTA_STEP 16    // bytes: the sizes of what has frames are multiples of it
#define SLIMX_DELTA_BROKEN 16  // a status: the bytes are no frame of so many bytes and such elements

SLIMX_INLINE int64_t slimx_delta_chunks(int64_t bytes) { return (bytes + SLIMX_DELTA_CHUNK - 1) / SLIMX_DELTA_CHUNK; }

#ifdef __cplusplus
extern "C" {
#endif

// Writes the frame that makes `fresh` of `base`, both of `bytes` (a multiple of SLIMX_DELTA_STEP) in elements of `item`
// (1 or 2) bytes, to `frame`, which has room for 4 * chunks + bytes. `base`: NULL for a frame that needs none, of
// nothing but whole chunks. `*length`: bytes of the frame.
SlimxStatus slimx_delta_encode(const uint8_t* base, const uint8_t* fresh, int64_t bytes, int item, uint8_t* frame,
                               int64_t* length, int threads);

// Applies a frame of `length` bytes to `base`. Every size and mask is checked before the first byte is written, and
// what another process changes in `frame` meanwhile can make neither a read nor a write leave its memory.
int slimx_delta_apply(const uint8_t* frame, int64_t length, uint8_t* base, int64_t bytes, int item, int threads);

#ifdef __cplusplus
}
#endif
