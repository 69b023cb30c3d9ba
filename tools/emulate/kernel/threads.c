// Threads of the one program, on the one processor: they take turns where they wait, and by the
// clock. The kernel itself is never interrupted.
#include "kernel.h"

#define FAILED(error) ((uint64_t)-(int64_t)(error))

enum { thread_limit = 64, stack_bytes = 8192, states_bytes = 12288 };
enum { tile_states = 0x60000 };  // in XCR0 and what XSAVE stores

// What system_call_entry pushes.
typedef struct {
  uint64_t r10, r9, r8, dx, si, di, flags, ip, bx, bp, r12, r13, r14, r15, sp;
} CallFrame;

typedef enum { unused, ready, waiting } ThreadState;
typedef struct {
  ThreadState state;
  uint64_t stack;  // the kernel's, while others run
  uint64_t thread_pointer, clear_id_at;
  uint64_t waits_at, deadline;  // 0: no deadline
  bool woken;
} Thread;

static Thread threads[thread_limit];
static uint64_t current, thread_count;
static uint8_t stacks[thread_limit][stack_bytes] __attribute__((aligned(64)));
static uint8_t states[thread_limit][states_bytes] __attribute__((aligned(64)));

void switch_stacks(uint64_t* keep, uint64_t other);
void start_thread(void);

uint64_t nanoseconds(void) {
  // The emulated processor does 100 million instructions in a second of its own time; emulate.py
  // tells Bochs so. Time is then the same in every run.
  return read_time_stamp() * 10;
}

static uint64_t stack_top(uint64_t thread) { return (uint64_t)(stacks[thread] + stack_bytes); }

static void save_states(uint64_t thread) {
  __asm__ volatile("xsave64 %0"
                   : "+m"(states[thread])
                   : "a"((uint32_t)enabled_states), "d"(0)
                   : "memory");
}
static void restore_states(uint64_t thread) {
  __asm__ volatile("xrstor64 %0"
                   :
                   : "m"(states[thread]), "a"((uint32_t)enabled_states), "d"(0)
                   : "memory");
}

void set_up_threads(void) {
  threads[0].state = ready;
  thread_count = 1;
  use_kernel_stack(stack_top(0));
}

uint64_t thread_id(void) { return current + 1; }
void set_clear_id_at(uint64_t address) { threads[current].clear_id_at = address; }
void set_thread_pointer(uint64_t value) {
  threads[current].thread_pointer = value;
  write_model_register(0xc0000100, value);
}

/// Leaves this thread for another; returns when it is this one's turn again.
static void switch_to(uint64_t next) {
  const uint64_t last = current;
  if (next == last) return;
  save_states(last);
  current = next;
  use_kernel_stack(stack_top(next));
  write_model_register(0xc0000100, threads[next].thread_pointer);
  restore_states(next);
  switch_stacks(&threads[last].stack, threads[next].stack);
}

/// The next thread that can run, after this one; this one where no other can. thread_limit: none.
static uint64_t find_next(void) {
  for (;;) {
    bool someone_sleeps = false;
    for (uint64_t step = 1; step <= thread_limit; ++step) {
      const uint64_t index = (current + step) % thread_limit;
      Thread* thread = &threads[index];
      if (thread->state == waiting && thread->deadline != 0) {
        someone_sleeps = true;
        if (nanoseconds() >= thread->deadline) thread->state = ready;
      }
      if (thread->state == ready) return index;
    }
    if (!someone_sleeps) return thread_limit;
  }
}

void let_others_run(void) {
  const uint64_t next = find_next();
  if (next < thread_limit) switch_to(next);
}

/// Runs others until this thread can go on.
static void wait_here(void) {
  const uint64_t next = find_next();
  if (next == thread_limit) {
    say("\nemulator: every thread of the program waits for another\n");
    finish(124);
  }
  switch_to(next);
}

uint64_t clone_thread(uint64_t flags, uint64_t stack, uint64_t parent_id_at, uint64_t child_id_at,
                      uint64_t thread_pointer) {
  enum { shares_memory = 0x100, is_thread = 0x10000, sets_pointer = 0x80000 };
  enum { sets_parent_id = 0x100000, clears_id = 0x200000, sets_child_id = 0x1000000 };
  if ((flags & shares_memory) == 0 || (flags & is_thread) == 0) {
    say("emulator: there is one process only\n");
    return FAILED(error_no_call);
  }
  uint64_t index = 0;
  while (index < thread_limit && threads[index].state != unused) ++index;
  if (index == thread_limit || enabled_states == 0) return FAILED(error_again);
  const uint64_t id = index + 1;
  if ((flags & sets_parent_id) != 0) {
    if (!can_access(parent_id_at, 4, protection_write)) return FAILED(error_fault);
    *(uint32_t*)parent_id_at = (uint32_t)id;
  }
  if ((flags & sets_child_id) != 0) {
    if (!can_access(child_id_at, 4, protection_write)) return FAILED(error_fault);
    *(uint32_t*)child_id_at = (uint32_t)id;
  }
  Thread* thread = &threads[index];
  memset(thread, 0, sizeof *thread);
  thread->thread_pointer =
      (flags & sets_pointer) != 0 ? thread_pointer : threads[current].thread_pointer;
  thread->clear_id_at = (flags & clears_id) != 0 ? child_id_at : 0;

  // It leaves the system call as this thread will, on a stack of its own.
  CallFrame* frame = (CallFrame*)(stack_top(index) - sizeof(CallFrame));
  *frame = *(const CallFrame*)(stack_top(current) - sizeof(CallFrame));
  frame->sp = stack;
  uint64_t* switched = (uint64_t*)frame - 7;  // what switch_stacks() pops
  memset(switched, 0, 6 * sizeof(uint64_t));
  switched[6] = (uint64_t)&start_thread;
  thread->stack = (uint64_t)switched;

  // Vectors are this thread's; tiles are clear and not configured, as Linux leaves them.
  memset(states[index], 0, states_bytes);
  save_states(current);
  memcpy(states[index], states[current], states_bytes);
  enum { header = 512 };
  *(uint64_t*)(states[index] + header) &= ~(uint64_t)tile_states;

  thread->state = ready;
  if (++thread_count == 2) start_clock();
  return id;
}

static uint64_t wake(uint64_t address, uint64_t count) {
  uint64_t woken = 0;
  for (uint64_t index = 0; index < thread_limit && woken < count; ++index) {
    Thread* thread = &threads[index];
    if (thread->state != waiting || thread->waits_at != address) continue;
    thread->state = ready;
    thread->woken = true;
    ++woken;
  }
  return woken;
}

void end_thread(int code) {
  if (--thread_count == 0) finish(code);
  const uint64_t id_at = threads[current].clear_id_at;
  if (id_at != 0 && can_access(id_at, 4, protection_write)) {
    *(uint32_t*)id_at = 0;
    wake(id_at, 1);
  }
  threads[current].state = unused;
  for (;;) wait_here();
}

uint64_t wait_or_wake(uint64_t address, uint64_t operation, uint64_t value, uint64_t timeout_at) {
  enum { wait = 0, wake_some = 1, requeue = 3, compare_and_requeue = 4, wait_bits = 9, wake_bits = 10 };
  if (!can_access(address, 4, protection_read)) return FAILED(error_fault);
  switch (operation & 127) {
    case wake_some:
    case wake_bits: return wake(address, (uint32_t)value);
    case requeue:
    case compare_and_requeue: return wake(address, ~0ull);  // a thread may wake for nothing
    case wait:
    case wait_bits: break;
    default: return FAILED(error_no_call);
  }
  if (*(const uint32_t*)address != (uint32_t)value) return FAILED(error_again);
  Thread* thread = &threads[current];
  thread->deadline = 0;
  if (timeout_at != 0) {
    if (!can_access(timeout_at, 16, protection_read)) return FAILED(error_fault);
    const uint64_t* timeout = (const uint64_t*)timeout_at;
    thread->deadline = timeout[0] * 1000000000 + timeout[1] + 1;
    if ((operation & 127) == wait) thread->deadline += nanoseconds();  // the other's is a date
  }
  thread->waits_at = address;
  thread->woken = false;
  thread->state = waiting;
  wait_here();
  return thread->woken ? 0 : FAILED(error_timed_out);
}
