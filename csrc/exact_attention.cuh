// exact_attention.cuh: attention of exact mode on a GPU: one thread block for several queries that read the same keys.
//
// The queries are the heads of one group and, in a sequence of several rows, also of neighboring rows; keys and values
// are read once for all of them. Scores are stored, because weights can be computed only after the largest score is
// known. Keys are then processed in the contract's blocks. A query uses only its own keys, whatever its neighbors use.
#pragma once

#include "exact_elements.cuh"

namespace slimx {

constexpr int kAttendThreads = 128;
constexpr int kQueries = 16;                              // queries of a thread block
constexpr int kKeys = 32;                                 // keys in shared memory at a time
constexpr int kDepth = 128;                               // elements of a query and of a key in shared memory at a time
constexpr int kValueColumns = 128;                        // elements of a value in shared memory at a time
constexpr int kOwnQueries = 2, kOwnKeys = 2;              // scores that a thread computes
constexpr int kMixQueries = 4, kMixColumns = 4;           // elements of the result that a thread computes
constexpr int kQueryThreads = kAttendThreads / kQueries;  // threads that compute a query's largest score
static_assert(kQueries / kOwnQueries * (kKeys / kOwnKeys) == kAttendThreads, "every thread has its scores");
static_assert(kQueries / kMixQueries * (kValueColumns / kMixColumns) == kAttendThreads, "and its part of the result");
static_assert(kDepth % SLIMX_LANES == 0 && SLIMX_KEY_BLOCK % kKeys == 0, "parts are whole lanes and blocks");

constexpr int kQueryPitch = kDepth + 4, kWeightPitch = SLIMX_KEY_BLOCK + 4;

// Queries of one thread block that share a list of keys.
struct Shared {
  const int32_t* index;  // their keys, in the longest of their lists
  int64_t longest;
  int count;
};

// Buffers in shared memory; keys, values and lanes use the same memory one after the other.
struct AttendRoom {
  alignas(16) float query[kQueries][kQueryPitch];
  union {
    alignas(16) float key[kKeys][kQueryPitch];
    alignas(16) float value[kKeys][kValueColumns];
    alignas(16) float lanes[kQueries][SLIMX_LANES];
  };
  alignas(16) float weight[kQueries][kWeightPitch];
  float most[kQueries], sum[kQueries], found[kAttendThreads];
  float* scores[kQueries];
  int64_t length[kQueries];
};

// Loads one unit as floats. `n`: elements of the row from `from` on; missing ones are zeros.
template <class T>
static __device__ __forceinline__ void stage_unit(const T* from, int64_t n, bool there, float* to) {
  const Words words = there && n > 0 ? load_unit(from, n, aligned(from, kUnit<T>)) : Words{};
  widen_unit(words, static_cast<const T*>(nullptr), to);
}

// Loads kKeys rows of `table` [*][groups][width], those that the list names from key `first` on: `columns` elements
// from `column` on, as floats, with zeros past the end of the list.
template <class T, int kColumns, int kPitch>
static __device__ __forceinline__ void stage_keys(const T* table, int64_t groups, int64_t group, int64_t width,
                                                  int64_t column, int64_t first, const Shared& own,
                                                  float (*to)[kPitch]) {
  constexpr int kUnits = kColumns / kUnit<T>;
  for (int u = int(threadIdx.x); u < kKeys * kUnits; u += kAttendThreads) {
    const int at = u / kUnits, i = u % kUnits * kUnit<T>;
    const bool there = first + at < own.longest;
    const int64_t slot = there ? own.index[first + at] : 0;
    stage_unit(table + (slot * groups + group) * width + column + i, width - column - i, there, &to[at][i]);
  }
}

// Computes the scores of all queries with keys [first, first + kKeys), with the lanes of a thread's queries and keys in
// registers.
template <class T>
static __device__ __forceinline__ void score_keys(const SlimxExactAttention& a, const Shared& own, const T* query,
                                                  int64_t group, int64_t first, int64_t row_queries, AttendRoom& room) {
  constexpr int kKeyThreads = kKeys / kOwnKeys, kUnits = kDepth / kUnit<T>;
  const int q = int(threadIdx.x) / kKeyThreads * kOwnQueries, k = int(threadIdx.x) % kKeyThreads;
  const T* key = static_cast<const T*>(a.key);
  float lanes[kOwnQueries][kOwnKeys][SLIMX_LANES] = {};
  for (int64_t depth = 0; depth < a.d; depth += kDepth) {
    __syncthreads();
    const bool queries_change = first == 0 || a.d > kDepth;
    for (int u = int(threadIdx.x); queries_change && u < kQueries * kUnits; u += kAttendThreads) {
      const int at = u / kUnits, i = u % kUnits * kUnit<T>;
      const int64_t offset = at / row_queries * a.heads * a.d + at % row_queries * a.d;
      stage_unit(query + offset + depth + i, a.d - depth - i, at < own.count, &room.query[at][i]);
    }
    stage_keys<T, kDepth>(key, a.groups, group, a.d, depth, first, own, room.key);
    __syncthreads();
    const int64_t left = a.d - depth;
#pragma unroll 1
    for (int i = 0; i < kDepth && i < left; i += SLIMX_LANES) {
#pragma unroll
      for (int l = 0; l < SLIMX_LANES; l += 4) {
        Floats by[kOwnKeys];
#pragma unroll
        for (int c = 0; c < kOwnKeys; ++c) by[c] = load_floats(&room.key[k + c * kKeyThreads][i + l]);
#pragma unroll
        for (int r = 0; r < kOwnQueries; ++r) {
          const Floats x = load_floats(&room.query[q + r][i + l]);
#pragma unroll
          for (int c = 0; c < kOwnKeys; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e)
              if (i + l + e < left) lanes[r][c][l + e] = multiply_add(x.at[e], by[c].at[e], lanes[r][c][l + e]);
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kOwnQueries; ++r)
#pragma unroll
    for (int c = 0; c < kOwnKeys; ++c) {
      const int64_t j = first + k + c * kKeyThreads;
      if (q + r < own.count && j < room.length[q + r]) room.scores[q + r][j] = fold(lanes[r][c]) * a.scale;
    }
}

// Computes room.most, the largest score of each query, its sink included.
static __device__ __forceinline__ void find_largest(const Shared& own, const float* sinks, int64_t row_queries,
                                                    AttendRoom& room) {
  const int q = int(threadIdx.x) / kQueryThreads;
  float most = -__builtin_inff();
  const auto take = [&most](float x) { most = x > most || x != x ? x : most; };
  if (q < own.count)
    for (int64_t j = int(threadIdx.x) % kQueryThreads; j < room.length[q]; j += kQueryThreads) take(room.scores[q][j]);
  __syncthreads();
  room.found[threadIdx.x] = most;
  __syncthreads();
  if (int(threadIdx.x) < own.count) {
    most = -__builtin_inff();
    for (int t = 0; t < kQueryThreads; ++t) take(room.found[int(threadIdx.x) * kQueryThreads + t]);
    const float sink = sinks ? sinks[int(threadIdx.x) % row_queries] : 0.0f;
    if (sinks) most = sink > most ? sink : most;
    room.most[threadIdx.x] = most;
    room.sum[threadIdx.x] = sinks ? exact_exp(sink - most) : 0.0f;
  }
  __syncthreads();
}

// Computes room.weight for the keys of the block that starts at `start`; with `summed`, adds them to room.sum.
static __device__ __forceinline__ void weigh_keys(const Shared& own, int64_t start, bool summed, AttendRoom& room) {
  __syncthreads();
  for (int at = int(threadIdx.x); at < kQueries * SLIMX_KEY_BLOCK; at += kAttendThreads) {
    const int q = at / SLIMX_KEY_BLOCK, j = at % SLIMX_KEY_BLOCK;
    const bool there = q < own.count && start + j < room.length[q];
    room.weight[q][j] = there ? exact_exp(room.scores[q][start + j] - room.most[q]) : 0.0f;
  }
  __syncthreads();
  if (!summed) return;
  for (int at = int(threadIdx.x); at < kQueries * SLIMX_LANES; at += kAttendThreads) {
    const int q = at / SLIMX_LANES, lane = at % SLIMX_LANES;
    float sum = 0;
    for (int j = lane; j < SLIMX_KEY_BLOCK; j += SLIMX_LANES) sum = sum + room.weight[q][j];  // zeros past the end
    room.lanes[q][lane] = sum;
  }
  __syncthreads();
  if (int(threadIdx.x) < own.count && start < room.length[threadIdx.x])
    room.sum[threadIdx.x] = room.sum[threadIdx.x] + fold(room.lanes[threadIdx.x]);
}

// Computes a thread's part of weights times values for the keys of a block.
template <class T>
static __device__ __forceinline__ void mix_values(const SlimxExactAttention& a, const Shared& own, int64_t group,
                                                  int64_t start, int64_t column, int q, int c, AttendRoom& room,
                                                  float (&part)[kMixQueries][kMixColumns]) {
  const T* value = static_cast<const T*>(a.value);
  for (int64_t first = start; first < start + SLIMX_KEY_BLOCK && first < own.longest; first += kKeys) {
    __syncthreads();
    stage_keys<T, kValueColumns>(value, a.groups, group, a.dv, column, first, own, room.value);
    __syncthreads();
    int64_t left[kMixQueries];  // number of keys in this part that belong to each query
#pragma unroll
    for (int r = 0; r < kMixQueries; ++r) left[r] = room.length[q + r] - first;
    for (int j = 0; j < kKeys; ++j) {
      const Floats by = load_floats(&room.value[j][c]);
#pragma unroll
      for (int r = 0; r < kMixQueries; ++r) {
        const float weight = room.weight[q + r][first - start + j];
#pragma unroll
        for (int e = 0; e < kMixColumns; ++e)
          if (j < left[r]) part[r][e] = multiply_add(weight, by.at[e], part[r][e]);
      }
    }
  }
}

// Computes attention for queries from (row, head) on. `rows`: maximum number of rows in a thread block. `row_queries`:
// heads of each row.
template <class T>
__global__ void __launch_bounds__(kAttendThreads, 3)
    exact_attend(SlimxExactAttention a, float* scores, int64_t longest, int64_t rows, int64_t row_queries) {
  __shared__ AttendRoom room;
  const int64_t shared_by = a.heads / a.groups, parts = (shared_by + row_queries - 1) / row_queries;
  const int64_t group = blockIdx.y / parts, part_of = blockIdx.y % parts;
  const int64_t head = group * shared_by + part_of * row_queries;
  const int64_t heads =
      shared_by - part_of * row_queries < row_queries ? shared_by - part_of * row_queries : row_queries;
  const int64_t end = (blockIdx.x + 1) * rows < a.rows ? (blockIdx.x + 1) * rows : a.rows;
  for (int64_t row = blockIdx.x * rows, after; row < end; row = after) {
    for (after = row + 1; after < end && a.begin[after] == a.begin[row];) ++after;
    Shared own = {a.index + a.begin[row], 0, int((after - row) * heads)};
    for (int64_t r = row; r < after; ++r) own.longest = a.length[r] > own.longest ? a.length[r] : own.longest;
    __syncthreads();
    if (threadIdx.x < kQueries) {
      const int64_t of = row + int(threadIdx.x) / heads;
      room.length[threadIdx.x] = int(threadIdx.x) < own.count ? a.length[of] : 0;
      room.scores[threadIdx.x] = scores + (of * a.heads + head + int(threadIdx.x) % heads) * longest;
    }
    __syncthreads();
    const T* query = static_cast<const T*>(a.query) + (row * a.heads + head) * a.d;
    for (int64_t first = 0; first < own.longest; first += kKeys) score_keys(a, own, query, group, first, heads, room);
    __syncthreads();
    find_largest(own, a.sinks ? a.sinks + head : nullptr, heads, room);

    constexpr int kColumnThreads = kValueColumns / kMixColumns;
    const int q = int(threadIdx.x) / kColumnThreads * kMixQueries, c = int(threadIdx.x) % kColumnThreads * kMixColumns;
    for (int64_t column = 0; column < a.dv; column += kValueColumns) {
      float mixed[kMixQueries][kMixColumns] = {};
      for (int64_t start = 0; start < own.longest; start += SLIMX_KEY_BLOCK) {
        weigh_keys(own, start, column == 0, room);
        float part[kMixQueries][kMixColumns] = {};
        mix_values<T>(a, own, group, start, column, q, c, room, part);
#pragma unroll
        for (int r = 0; r < kMixQueries; ++r)
#pragma unroll
          for (int e = 0; e < kMixColumns; ++e)
            if (start < room.length[q + r]) mixed[r][e] = mixed[r][e] + part[r][e];
      }
      __syncthreads();
#pragma unroll
      for (int r = 0; r < kMixQueries; ++r) {
        if (q + r >= own.count) continue;
        const int64_t at = (row + (q + r) / heads) * a.heads + head + (q + r) % heads;
        T* out = static_cast<T*>(a.out) + at * a.dv + column;
#pragma unroll
        for (int e = 0; e < kMixColumns; ++e)
          if (column + c + e < a.dv) put(out + c + e, divide(mixed[r][e], room.sum[q + r]));
      }
    }
  }
}

}  // namespace slimx
