// quantize.h: tiles of block-quantized tensors: quantizing and dequantizing.
//
// A band is a row of blocks. Quantizing reads a band twice, the second time from the cache: first for the largest
// magnitude of each block, then for the codes. All loops run along whole rows, across blocks, in the order of memory.
#pragma once

#include "int4.h"
#include "tile.h"

namespace slimx {

// Returns the number of columns of a row, from c on and before `stop`, that belong to the block of column c.
SLIMX_INLINE int64_t columns_of_block(int64_t c, int64_t stop, int64_t block_cols) {
  return std::min(stop, (c / block_cols + 1) * block_cols) - c;
}

// T: the type of a source element. Scale: uint32_t (fp32, as bits) for FP8, uint8_t (E8M0) for MXFP8.
template <class T, class Scale>
struct Band {
  alignas(64) T most[kChunk];  // largest magnitude of each column
  alignas(64) uint8_t codes[kChunk];
  uint32_t amax[kBlocks];  // largest magnitude of each block, as bits
  SlimxScale scales[kBlocks];
  Scale written[kBlocks];
  Corrections corrections[kBlocks];
};

// Minimum number of elements of a block for which a table of corrections saves time.
constexpr int64_t kCorrectable = 4096;

// Prefetches the row that is read two rows later, because the processor's own prefetch starts anew on every row.
SLIMX_INLINE void prefetch_row(const SlimxPiece& p, int64_t r, int64_t offset, int64_t bytes) {
  const uint8_t* later = source_row(p, r + 2) + offset;
  for (int64_t k = 0; k < bytes; k += 64) __builtin_prefetch(later + k, 0, 2);
}

// Computes band.amax of rows [start, stop).
template <class T, class Scale>
SLIMX_INLINE void find_amax(const SlimxPiece& p, int64_t start, int64_t stop, Band<T, Scale>& band) {
  std::fill_n(band.amax, (p.cols + p.block_cols - 1) / p.block_cols, 0u);
  for (int64_t first = 0; first < p.cols; first += kChunk) {
    const int64_t last = std::min(first + kChunk, p.cols);
    const T* most = band.most;
    if (stop - start == 1) {
      most = reinterpret_cast<const T*>(source_row(p, start)) + first;
    } else {
      std::fill_n(band.most, last - first, T(0));
      for (int64_t r = start; r < stop; ++r) {
        prefetch_row(p, r, first * sizeof(T), (last - first) * sizeof(T));
        fold_magnitudes(reinterpret_cast<const T*>(source_row(p, r)) + first, last - first, band.most);
      }
    }
    for (int64_t c = first, n; c < last; c += n) {
      n = columns_of_block(c, last, p.block_cols);
      uint32_t& amax = band.amax[c / p.block_cols];
      amax = std::max(amax, largest(most + (c - first), n));
    }
  }
}

template <class T>
SLIMX_INLINE SlimxScale choose_scale(const SlimxPiece& p, uint32_t amax, const float* triton_scales,
                                     uint32_t* written) {
  SlimxScale s;
  if (p.rule == SLIMX_RULE_TRITON)
    s = {triton_scales[2 * amax], triton_scales[2 * amax + 1], 0};
  else
    s = slimx_scale(p.rule, element(T(amax)), sizeof(T));
  *written = slimx_bits(s.scale);
  return s;
}

template <class T>
SLIMX_INLINE SlimxScale choose_scale(const SlimxPiece&, uint32_t amax, const float*, uint8_t* written) {
  *written = slimx_mxfp8_exponent(element(T(amax)));
  return {slimx_from_e8m0(*written), slimx_mxfp8_inverse(*written), 0};
}

template <class Isa, class T>
SLIMX_INLINE void encode_run(const T* x, int64_t n, float inverse, const Corrections& corrections, uint8_t* codes) {
  if constexpr (Isa::kCorrects && sizeof(T) == 2) {
    if (corrections.usable) return encode_corrected(x, n, inverse, corrections, codes);
  }
  Isa::encode(x, n, inverse, codes);
}

// Computes the codes of rows [start, stop). A block that contains a value that is not finite becomes NaN as a whole.
template <class Isa, class T, class Scale>
SLIMX_INLINE uint64_t write_codes(const SlimxPiece& p, uint8_t* bucket, int64_t start, int64_t stop,
                                  Band<T, Scale>& band) {
  uint64_t sum = 0;
  for (int64_t r = start; r < stop; ++r) {
    const T* row = reinterpret_cast<const T*>(source_row(p, r));
    for (int64_t first = 0; first < p.cols; first += kChunk) {
      const int64_t last = std::min(first + kChunk, p.cols);
      for (int64_t c = first, n; c < last; c += n) {
        n = columns_of_block(c, last, p.block_cols);
        const int64_t block = c / p.block_cols;
        uint8_t* codes = band.codes + (c - first);
        encode_run<Isa>(row + c, n, band.scales[block].inverse, band.corrections[block], codes);
        if (band.scales[block].doubled) double_codes(codes, n);
        if (band.amax[block] >= kInfinite<T>) std::fill_n(codes, n, uint8_t(SLIMX_NAN_E4M3));
      }
      uint8_t* to = bucket + p.dst + r * p.dst_ld + first;
      sum += put<Isa, true>(band.codes, to, last - first, p.pos + r * p.pos_ld + first).sum;
    }
  }
  return sum;
}

template <class Isa, class T, class Scale>
SLIMX_INLINE Share quantize_tile(const SlimxPiece& p, uint8_t* bucket, const float* triton_scales) {
  Band<T, Scale> band;
  const int64_t blocks = (p.cols + p.block_cols - 1) / p.block_cols;
  Share share;
  for (int64_t start = 0; start < p.rows; start += p.block_rows) {
    const int64_t stop = std::min(start + p.block_rows, p.rows), row = start / p.block_rows;
    find_amax(p, start, stop, band);
    for (int64_t b = 0; b < blocks; ++b) {
      const bool finite = band.amax[b] < kInfinite<T>;
      band.scales[b] = choose_scale<T>(p, finite ? band.amax[b] : 0, triton_scales, &band.written[b]);
      if constexpr (Isa::kCorrects && sizeof(T) == 2) {
        band.corrections[b].usable = false;
        if ((stop - start) * p.block_cols >= kCorrectable)
          make_corrections(band.scales[b].inverse, band.corrections[b]);
      }
      if (finite) continue;
      band.written[b] = Scale(sizeof(Scale) == 1 ? SLIMX_NAN_E8M0 : SLIMX_NAN_FP32);
      share.nonfinite = true;
    }
    const uint8_t* written = reinterpret_cast<const uint8_t*>(band.written);
    share.scales += put<Isa, true>(written, bucket + p.scale + row * p.scale_ld, blocks * sizeof(Scale),
                                   p.scale_pos + row * p.scale_pos_ld)
                        .sum;
    share.values += write_codes<Isa>(p, bucket, start, stop, band);
  }
  return share;
}

// T: type of a source element. A tile has at most kBlocks groups in a row.
template <class Isa, class T>
SLIMX_INLINE Share quantize_int4_tile(const SlimxPiece& p, uint8_t* bucket) {
  alignas(64) uint8_t codes[kBlocks * SLIMX_INT4_GROUP / 2];
  uint16_t scales[kBlocks];
  const int64_t groups = p.cols / SLIMX_INT4_GROUP;
  Share share;
  for (int64_t r = 0; r < p.rows; ++r) {
    prefetch_row(p, r, 0, p.cols * sizeof(T));
    const T* row = reinterpret_cast<const T*>(source_row(p, r));
    for (int64_t g = 0; g < groups; ++g)
      share.nonfinite |=
          slimx_int4_group<T>(row + g * SLIMX_INT4_GROUP, codes + g * (SLIMX_INT4_GROUP / 2), scales + g, nullptr) != 0;
    share.values += put<Isa, true>(codes, bucket + p.dst + r * p.dst_ld, p.cols / 2, p.pos + r * p.pos_ld).sum;
    share.scales += put<Isa, true>(reinterpret_cast<const uint8_t*>(scales), bucket + p.scale + r * p.scale_ld,
                                   groups * int64_t(sizeof(uint16_t)), p.scale_pos + r * p.scale_pos_ld)
                        .sum;
  }
  return share;
}

// T: type of a destination element.
template <class Isa, class T>
SLIMX_INLINE Share dequantize_tile(const SlimxPiece& p, uint8_t* bucket) {
  alignas(64) T out[kChunk];
  Summed all;
  for (int64_t r = 0; r < p.rows; ++r) {
    const uint8_t* scales = reinterpret_cast<const uint8_t*>(p.scale) + r / p.block_rows * p.scale_ld;
    for (int64_t first = 0; first < p.cols; first += kChunk) {
      const int64_t last = std::min(first + kChunk, p.cols), at = first * int64_t(sizeof(T));
      for (int64_t c = first, n; c < last; c += n) {
        n = columns_of_block(c, last, p.block_cols);
        const int64_t block = c / p.block_cols;
        const float scale = p.op == SLIMX_DEQUANTIZE_MXFP8 ? slimx_from_e8m0(scales[block])
                                                           : reinterpret_cast<const float*>(scales)[block];
        decode(source_row(p, r) + c, n, scale, out + (c - first));
      }
      all.add(put<Isa, true, sizeof(T)>(reinterpret_cast<uint8_t*>(out), bucket + p.dst + r * p.dst_ld + at,
                                        (last - first) * sizeof(T), p.pos + r * p.pos_ld + at));
    }
  }
  return {all.sum, 0, all.most >= kInfinite<T>};
}

}  // namespace slimx
