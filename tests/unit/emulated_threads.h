// emulated_threads.h: the threads of a CUDA thread block as fibers, which take turns on one thread of the machine in
// random order: that shuffles what the program does not order, and finds barriers that some threads never reach.
#pragma once

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
inline Index threadIdx, blockIdx, gridDim;

namespace slimx {

[[noreturn]] inline void fail(const char* what) {
  fprintf(stderr, "emulated kernel, thread %u of block %u: %s\n", threadIdx.x, blockIdx.x, what);
  abort();
}

// A fiber begins on its own stack; from then on it is left and entered by jumps, as swapcontext asks the machine's own
// kernel twice for each turn.
struct Fiber {
  ucontext_t begin;
  jmp_buf left;
  std::vector<char> stack = std::vector<char>(64 << 10);
  bool begun = false, ended = false;
};

// Where threads wait for each other.
struct Meeting {
  int arrived = 0, round = 0;
};

inline std::vector<Fiber> fibers;
inline jmp_buf scheduler;
inline void (*body)();
inline bool moved;  // whether any fiber got anywhere since all last had their turn
inline std::mt19937 dice;

inline void yield() {
  const unsigned self = threadIdx.x;
  if (!_setjmp(fibers[self].left)) _longjmp(scheduler, 1);
  threadIdx.x = self;
}

// Wait until `size` threads are here.
inline void meet(Meeting& m, int size) {
  const int round = m.round;
  if (++m.arrived == size) {
    m.arrived = 0;
    ++m.round;
    moved = true;
  }
  while (m.round == round) yield();
}

inline void enter() {
  body();
  fibers[threadIdx.x].ended = moved = true;
  _longjmp(scheduler, 1);
}

// One turn of a fiber: until it yields or ends.
inline void turn(Fiber& fiber) {
  if (_setjmp(scheduler)) return;
  if (fiber.begun) _longjmp(fiber.left, 1);
  fiber.begun = true;
  setcontext(&fiber.begin);
}

// Run `body` on each thread of a block.
inline void run_block(int threads) {
  constexpr int kWarp = 32;
  if (int(fibers.size()) < threads) fibers = std::vector<Fiber>(threads);
  for (int k = 0; k < threads; ++k) {
    Fiber& f = fibers[k];
    getcontext(&f.begin);
    f.begin.uc_stack.ss_sp = f.stack.data();
    f.begin.uc_stack.ss_size = f.stack.size();
    f.begun = f.ended = false;
    makecontext(&f.begin, enter, 0);
  }
  // Rounds that a warp sits out, so that others run ahead of it.
  std::vector<int> asleep((threads + kWarp - 1) / kWarp);
  std::vector<unsigned> order(threads);
  std::iota(order.begin(), order.end(), 0u);
  for (bool all = false; !all;) {
    std::shuffle(order.begin(), order.end(), dice);
    for (int& rounds : asleep) rounds = rounds ? rounds - 1 : dice() % 64 ? 0 : dice() % 50;
    all = true;
    moved = *std::max_element(asleep.begin(), asleep.end()) > 0;
    for (const unsigned k : order) {
      if (fibers[k].ended) continue;
      all = false;
      if (asleep[k / kWarp]) continue;
      threadIdx.x = k;
      turn(fibers[k]);
    }
    if (!all && !moved) fail("waits for threads that never come");
  }
}

}  // namespace slimx
