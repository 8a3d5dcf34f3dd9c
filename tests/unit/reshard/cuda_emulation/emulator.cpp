// emulator.cpp: what stands behind device.cuh, and the emulated kernels as a library.
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <vector>

#include "interface.cuh"
#include "kernel.cuh"

namespace slimx {

alignas(kSlot) uint8_t memory[shared_bytes(2 * kUnits)];

namespace {

struct Copy {
  void* to;
  const void* from;
  int bytes;
};

Meeting warps[kThreads / kWarp], block;
uint32_t exchanged[kThreads];
std::vector<Copy> copies[kThreads];  // by thread: what it has staged and not waited for
int stage_end;                       // of `memory`, as the launch would have it

}  // namespace

void must_be_aligned(const void* p, int bytes) {
  if (reinterpret_cast<uintptr_t>(p) % bytes) fail("a misaligned access");
}

void later(void* to, const void* from, int bytes) {
  if (static_cast<uint8_t*>(to) + bytes > memory + stage_end) fail("a slot beyond the stage");
  memset(to, 0xEE, bytes);
  copies[threadIdx.x].push_back({to, from, bytes});
}

void wait_for_stage() {
  for (const Copy& c : copies[threadIdx.x]) memcpy(c.to, c.from, c.bytes);
  copies[threadIdx.x].clear();
}

void gather(uint32_t mine, uint32_t* all) {
  const unsigned self = threadIdx.x, warp = self / kWarp;
  exchanged[self] = mine;
  meet(warps[warp], kWarp);
  memcpy(all, exchanged + warp * kWarp, kWarp * sizeof(uint32_t));
  meet(warps[warp], kWarp);
}

}  // namespace slimx

void __syncthreads() { slimx::meet(slimx::block, slimx::kThreads); }

using namespace slimx;

namespace {
// The arguments of the kernel: fibers take none.
const SlimxPiece* pieces_;
const int64_t* first_;
int64_t n_, tiles_;
uint8_t* bucket_;
uint64_t* sums_;
uint32_t* flags_;

template <Kernel kKernel>
void kernel() {
  reshard<kKernel>(pieces_, first_, n_, tiles_, bucket_, sums_, flags_);
}

int failing_;  // the error of the next launch
}  // namespace

// ---- the CUDA library's interface, with one device whose memory is the host's ---------------------------------------

int slimx_cuda_abi(void) { return SLIMX_CUDA_ABI; }

const char* slimx_cuda_error_string(int error) { return error == 719 ? "unspecified launch failure" : "an error"; }

int slimx_cuda_devices(int* count) {
  *count = 1;
  return 0;
}

int slimx_cuda_prepare(const SlimxPiece* pieces, int64_t n, int checksum, int blocks_per_sm, int64_t* first,
                       SlimxCudaLaunch* launch) {
  const Kernel kernel = checksum ? Kernel::kChecksum : Kernel::kPack;
  int slots = 0;
  count_tiles(pieces, n, kernel, first, &slots);
  *launch = {first[n], int32_t(kernel), int32_t(std::min<int64_t>(first[n], std::max(1, blocks_per_sm))),
             shared_bytes(slots), 0};
  return 0;
}

// An address that no device could read is told by being small.
int slimx_cuda_find_unreadable(const SlimxPiece* pieces, int64_t n, int64_t* index) {
  for (*index = 0; *index < n && pieces[*index].src > 4096; ++*index) {
  }
  return 0;
}

int slimx_cuda_run(const SlimxPiece* pieces, const int64_t* first, int64_t n, const SlimxCudaLaunch* launch,
                   uint8_t* bucket, uint64_t* sums, uint32_t* flags, void* /* stream */) {
  if (failing_) return failing_;
  stage_end = launch->shared;
  pieces_ = pieces, first_ = first, n_ = n, tiles_ = launch->tiles, bucket_ = bucket, sums_ = sums, flags_ = flags;
  body = launch->kernel == int32_t(Kernel::kChecksum) ? kernel<Kernel::kChecksum> : kernel<Kernel::kPack>;
  gridDim.x = launch->blocks;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) run_block(kThreads);
  return 0;
}

int slimx_cuda_triton_scales(float* out, void* /* stream */) {
  for (blockIdx.x = 0; blockIdx.x * kThreads < SLIMX_TRITON_SCALES; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < kThreads; ++threadIdx.x) triton_scales(out);
  return 0;
}

// Device memory is memory files, which other processes open through /proc as they would a device's by its handle: they
// lose nothing when the owner frees it or dies, where a device leaves that undefined.

namespace {
struct Allocation {
  int file;  // -1: another process's
  int64_t bytes;
};

struct Handle {
  int process, file;
};

std::map<uint64_t, Allocation> allocations;

int map_file(int file, int64_t bytes, Allocation as, uint64_t* address) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) return 2;
  *address = reinterpret_cast<uint64_t>(memory);
  allocations[*address] = as;
  return 0;
}

int unmap(uint64_t address, bool own) {
  const auto found = allocations.find(address);
  if (found == allocations.end() || (found->second.file >= 0) != own) return 1;
  munmap(reinterpret_cast<void*>(address), found->second.bytes);
  if (own) close(found->second.file);
  allocations.erase(found);
  return 0;
}
}  // namespace

int slimx_cuda_allocate(int64_t bytes, uint64_t* address) {
  const int file = memfd_create("emulated device", MFD_CLOEXEC);
  if (ftruncate(file, bytes)) return 2;
  return map_file(file, bytes, {file, bytes}, address);
}

int slimx_cuda_free(uint64_t address) { return unmap(address, true); }

int slimx_cuda_export(uint64_t address, uint8_t* handle) {
  const Handle made = {getpid(), allocations.at(address).file};
  memset(handle, 0, SLIMX_CUDA_HANDLE);
  memcpy(handle, &made, sizeof made);
  return 0;
}

int slimx_cuda_open(const uint8_t* handle, uint64_t* address) {
  Handle given;
  memcpy(&given, handle, sizeof given);
  if (given.process == getpid()) return 201;  // as CUDA, which opens no handle where it was made
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", given.process, given.file);
  const int file = open(path, O_RDWR | O_CLOEXEC);
  struct stat is;
  if (file < 0 || fstat(file, &is)) return 1;
  const int error = map_file(file, is.st_size, {-1, is.st_size}, address);
  close(file);
  return error;
}

int slimx_cuda_close(uint64_t address) { return unmap(address, false); }

int slimx_cuda_copy(uint64_t to, uint64_t from, int64_t bytes, void* /* stream */) {
  if (failing_) return failing_;
  memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
  return 0;
}

// ---- for the tests --------------------------------------------------------------------------------------------------

extern "C" {

// The same seed gives the same order of threads.
void emulator_seed(int seed) { dice.seed(seed); }

// slimx::Path of a piece that is not empty.
int emulator_path(const SlimxPiece* piece) { return int(cut_of(*piece, Kernel::kPack).path); }

// The error of every launch and copy from here on, 0 for none.
void emulator_fail(int error) { failing_ = error; }

// How many allocations of other processes this one has open.
int emulator_open(void) {
  int count = 0;
  for (const auto& [address, allocation] : allocations) count += allocation.file < 0;
  return count;
}

}  // extern "C"
