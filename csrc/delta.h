// delta.h: the format of a frame, which encodes the changes between two versions of the same bytes, and the plain C
// interface that encodes and applies frames on the CPU.
//
// THE FRAME of n bytes, which are divided into chunks of SLIMX_DELTA_CHUNK bytes (the last may be shorter), is
//
//     uint32 sizes[chunks]     bytes of each chunk's body, little-endian
//     bodies                   one after another
//
// A chunk of m bytes, whose elements of `item` bytes form groups of eight, has one of three bodies:
//
//     0 bytes    nothing in the chunk has changed
//     m bytes    the chunk's new bytes, if its changes would take m bytes or more
//     else       group bits    bit g % 8 of byte g / 8 is 1 if group g has changed; ceil(groups / 8) bytes, rest 0
//                masks         one byte per changed group, whose bit e is 1 if element e has changed; never 0
//                elements      new values of the changed elements, in order
//
// A version therefore has exactly one frame relative to another, so encoders can be compared by their frames. There are
// two levels of masks because few elements change: of 2% changed bf16 elements 85% of the groups have none, and both
// levels take 1.7% of the bytes, where one bit per element would take 6.3%.
#pragma once

#include <stdint.h>

#include "reshard.h"

#define SLIMX_DELTA_CHUNK 65536
#define SLIMX_DELTA_GROUP 8    // elements in a group
#define SLIMX_DELTA_STEP 16    // framed data have a multiple of this many bytes
#define SLIMX_DELTA_BROKEN 16  // status: the bytes are not a valid frame for data of this size and element size

SLIMX_INLINE int64_t slimx_delta_chunks(int64_t bytes) { return (bytes + SLIMX_DELTA_CHUNK - 1) / SLIMX_DELTA_CHUNK; }

#ifdef __cplusplus
extern "C" {
#endif

// Writes the frame that changes `base` to `fresh`, both of `bytes` bytes (a multiple of SLIMX_DELTA_STEP) in elements
// of `item` (1 or 2) bytes, to `frame`, which must have room for 4 * chunks + bytes. `base`: NULL for a frame of full
// chunks, which can be applied to any base. `*length`: receives the bytes of the frame.
SlimxStatus slimx_delta_encode(const uint8_t* base, const uint8_t* fresh, int64_t bytes, int item, uint8_t* frame,
                               int64_t* length, int threads);

// Applies a frame of `length` bytes to `base`. Every size and mask is checked before the first byte is written. Changes
// that another process makes to `frame` meanwhile cannot cause a read or write outside the given memory.
int slimx_delta_apply(const uint8_t* frame, int64_t length, uint8_t* base, int64_t bytes, int item, int threads);

#ifdef __cplusplus
}
#endif
