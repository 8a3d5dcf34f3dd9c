// reshard_cpu.cpp: the reshard kernels on the CPU: cut the pieces into tiles, one tile per thread at a time.
#include <algorithm>
#include <new>
#include <vector>

#include "reshard.h"
#include "words.h"

using namespace slimx;

static_assert(sizeof(SlimxPiece) == 128, "the record is read by slimx/reshard/kernel.py");

namespace {

// Enough work to pay for taking a tile from the shared counter, small enough to balance threads over a bucket.
constexpr int64_t kTileBytes = 256 << 10;
// Tiles taken at once: a plan of many small pieces would otherwise spend its time on that counter.
constexpr int kBatch = 4;

// ---- one tile -------------------------------------------------------------------------------------------------------

// Fewer than four bytes, all in the word that holds offset `pos` of the tensor.
template <bool kCopy>
uint64_t part_of_word(const uint8_t* src, uint8_t* dst, int64_t bytes, uint64_t pos) {
  uint32_t word = 0;
  for (int64_t k = 0; k < bytes; ++k) {
    if (kCopy) dst[k] = src[k];
    word |= uint32_t(src[k]) << (8 * ((pos + k) & 3));
  }
  return uint64_t(word) * slimx_multiplier(uint32_t(pos >> 2));
}

template <bool kCopy>
uint64_t rectangle(const SlimxPiece& p, uint8_t* bucket, Words words) {
  const int64_t row_bytes = p.cols * p.item;
  const int64_t rows_ahead = (kAhead + row_bytes - 1) / row_bytes;
  const int64_t ahead = row_bytes > kAhead ? kAhead : rows_ahead * p.src_ld;
  uint64_t sum = 0;
  for (int64_t r = 0; r < p.rows; ++r) {
    const uint8_t* src = reinterpret_cast<const uint8_t*>(p.src) + r * p.src_ld;
    const auto to = [&](int64_t offset) { return kCopy ? bucket + p.dst + r * p.dst_ld + offset : nullptr; };
    const uint64_t pos = p.pos + r * p.pos_ld;
    const int64_t head = std::min<int64_t>(row_bytes, -pos & 3);  // up to the tensor's next word boundary
    const int64_t whole = (row_bytes - head) >> 2, tail = head + 4 * whole;
    if (head) sum += part_of_word<kCopy>(src, to(0), head, pos);
    sum += words(src + head, to(head), whole, uint32_t((pos + head) >> 2), ahead);
    if (tail < row_bytes) sum += part_of_word<kCopy>(src + tail, to(tail), row_bytes - tail, pos + tail);
  }
  return sum;
}

// The loop to run, or nullptr where the processor lacks it.
template <bool kCopy>
Words words_for(SlimxIsa isa) {
  if (!slimx_has_isa(isa)) return nullptr;
#if defined(__x86_64__)
  const SlimxIsa best = slimx_has_isa(SLIMX_ISA_AVX512) ? SLIMX_ISA_AVX512
                        : slimx_has_isa(SLIMX_ISA_AVX2) ? SLIMX_ISA_AVX2
                                                        : SLIMX_ISA_SCALAR;
  const SlimxIsa chosen = isa == SLIMX_ISA_BEST ? best : isa;
  if (chosen == SLIMX_ISA_AVX512) return words_avx512<kCopy>;
  if (chosen == SLIMX_ISA_AVX2) return words_avx2<kCopy>;
#endif
  return words_scalar<kCopy>;
}

// ---- all tiles ------------------------------------------------------------------------------------------------------

// Appends rows [row, row + rows) and elements [col, col + cols) of each as a piece of their own.
void append(std::vector<SlimxPiece>& tiles, const SlimxPiece& p, int64_t row, int64_t rows, int64_t col, int64_t cols) {
  SlimxPiece tile = p;
  tile.src += row * p.src_ld + col * p.item;
  tile.dst += row * p.dst_ld + col * p.item;
  tile.pos += row * p.pos_ld + col * p.item;
  tile.rows = rows;
  tile.cols = cols;
  tiles.push_back(tile);
}

void cut(std::vector<SlimxPiece>& tiles, SlimxPiece p, bool copy) {
  if (p.rows == 0 || p.cols == 0) return;
  const int64_t row_bytes = p.cols * p.item;
  const bool one_run = p.src_ld == row_bytes && p.pos_ld == row_bytes && (!copy || p.dst_ld == row_bytes);
  if (one_run) {
    p.cols *= p.rows;
    p.rows = 1;
  }
  const int64_t cols = std::min(p.cols, kTileBytes / p.item);
  const int64_t rows = std::max<int64_t>(1, kTileBytes / (cols * p.item));
  for (int64_t row = 0; row < p.rows; row += rows)
    for (int64_t col = 0; col < p.cols; col += cols)
      append(tiles, p, row, std::min(rows, p.rows - row), col, std::min(cols, p.cols - col));
}

template <bool kCopy>
SlimxStatus run(const SlimxPiece* pieces, int64_t n, uint8_t* bucket, uint64_t* sums, SlimxIsa isa, int threads) {
  const Words words = words_for<kCopy>(isa);
  if (!words) return SLIMX_NO_SUCH_ISA;
  std::vector<SlimxPiece> tiles;
  try {
    for (int64_t k = 0; k < n; ++k) cut(tiles, pieces[k], kCopy);
  } catch (const std::bad_alloc&) {
    return SLIMX_NO_MEMORY;
  }
  const int64_t count = int64_t(tiles.size());
  const int team = int(std::clamp<int64_t>(count / kBatch, 1, threads));
#pragma omp parallel for schedule(dynamic, kBatch) num_threads(team)
  for (int64_t t = 0; t < count; ++t) {
    const uint64_t sum = rectangle<kCopy>(tiles[t], bucket, words);
    finish_stores();
#pragma omp atomic
    sums[tiles[t].tensor] += sum;
  }
  return SLIMX_OK;
}

}  // namespace

int slimx_abi(void) { return SLIMX_ABI; }

int slimx_has_isa(SlimxIsa isa) {
#if defined(__x86_64__)
  if (isa == SLIMX_ISA_AVX512) return __builtin_cpu_supports("avx512f") != 0;
  if (isa == SLIMX_ISA_AVX2) return __builtin_cpu_supports("avx2") != 0;
#endif
  return isa == SLIMX_ISA_BEST || isa == SLIMX_ISA_SCALAR;
}

void slimx_seed(const int64_t* bytes, int64_t n, uint64_t* sums) {
  for (int64_t k = 0; k < n; ++k) {
    uint64_t z = uint64_t(bytes[k]) + 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    sums[k] += z ^ (z >> 31);
  }
}

SlimxStatus slimx_pack(const SlimxPiece* pieces, int64_t n, uint8_t* bucket, uint64_t* sums, uint32_t* /* flags */,
                       const float* /* triton_scales */, SlimxIsa isa, int threads) {
  return run<true>(pieces, n, bucket, sums, isa, threads);
}

SlimxStatus slimx_checksum(const SlimxPiece* pieces, int64_t n, uint64_t* sums, SlimxIsa isa, int threads) {
  return run<false>(pieces, n, nullptr, sums, isa, threads);
}
