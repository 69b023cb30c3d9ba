// A kernel that runs one static program on an emulated PC, and answers the system calls that such a
// program's C library makes. It knows one process, its threads, and no signals.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// No tables of addresses to fill: the kernel is linked to where it runs.
#pragma GCC visibility push(hidden)

enum {
  page_size = 4096,
  sector_size = 512,
};

// All of RAM, as the kernel sees it.
#define RAM_BASE 0xffff800000000000ull
#define PROGRAM_END 0x0000800000000000ull

// What Linux calls them.
enum { protection_read = 1, protection_write = 2, protection_execute = 4 };
enum {
  error_no_entry = 2,
  error_bad_file = 9,
  error_again = 11,
  error_no_memory = 12,
  error_access = 13,
  error_fault = 14,
  error_invalid = 22,
  error_no_terminal = 25,
  error_range = 34,
  error_no_call = 38,
  error_timed_out = 110,
};

// ---- the machine ---------------------------------------------------------------------------------
static inline void write_port(uint16_t port, uint8_t value) {
  __asm__ volatile("outb %0, %1" : : "a"(value), "Nd"(port));
}
static inline uint8_t read_port(uint16_t port) {
  uint8_t value;
  __asm__ volatile("inb %1, %0" : "=a"(value) : "Nd"(port));
  return value;
}
static inline void write_model_register(uint32_t number, uint64_t value) {
  __asm__ volatile("wrmsr" : : "c"(number), "a"((uint32_t)value), "d"((uint32_t)(value >> 32)));
}
static inline uint64_t read_time_stamp(void) {
  uint32_t low, high;
  __asm__ volatile("rdtsc" : "=a"(low), "=d"(high));
  return ((uint64_t)high << 32) | low;
}
typedef struct {
  uint32_t a, b, c, d;
} CpuidAnswer;
static inline CpuidAnswer ask_cpuid(uint32_t leaf, uint32_t subleaf) {
  CpuidAnswer answer = {0, 0, 0, 0};
  __asm__ volatile("cpuid"
                   : "=a"(answer.a), "=b"(answer.b), "=c"(answer.c), "=d"(answer.d)
                   : "a"(leaf), "c"(subleaf));
  return answer;
}

void set_up_processor(void);
/// The XCR0 that set_up_processor() chose: every state of programs that the processor has.
extern uint64_t enabled_states;
/// Where system calls and exceptions of programs put their stack.
void use_kernel_stack(uint64_t top);
extern uint64_t kernel_stack;
/// Interrupts the program every 10 ms of emulated time, so that let_others_run().
void start_clock(void);
void enter_program(uint64_t instruction_pointer, uint64_t stack_pointer) __attribute__((noreturn));

// ---- messages ------------------------------------------------------------------------------------
/// Writes to the program's standard output (1) or error (2) on the host.
void write_host(int stream, const char* bytes, uint64_t count);
/// To standard error: %s a string, %x and %u a uint64_t.
void say(const char* format, ...);
/// Ends the emulation: the program's exit code.
void finish(int code) __attribute__((noreturn));

// ---- memory --------------------------------------------------------------------------------------
void set_up_memory(uint64_t ram_bytes);
/// Gives the program [address, address + length), whole pages, zero; lazily. False: no memory.
bool map_pages(uint64_t address, uint64_t length, int protection);
void unmap_pages(uint64_t address, uint64_t length);
/// Makes pages zero again, without giving them back.
void discard_pages(uint64_t address, uint64_t length);
/// False: not all of it is mapped.
bool protect_pages(uint64_t address, uint64_t length, int protection);
/// A free range below the last one. 0: none.
uint64_t find_free_range(uint64_t length);
/// Whether the program may access all of [address, address + length); it then can the kernel too.
bool can_access(uint64_t address, uint64_t length, int protection);
/// Makes a page that the program may use present. False: it may not.
bool provide_page(uint64_t address, int access);

// ---- threads -------------------------------------------------------------------------------------
void set_up_threads(void);
/// Switches to the next thread that can run, if there is one.
void let_others_run(void);
uint64_t clone_thread(uint64_t flags, uint64_t stack, uint64_t parent_id_at, uint64_t child_id_at,
                      uint64_t thread_pointer);
void end_thread(int code) __attribute__((noreturn));
uint64_t thread_id(void);
/// set_tid_address(): what end_thread() clears.
void set_clear_id_at(uint64_t address);
/// arch_prctl(): the FS base.
void set_thread_pointer(uint64_t value);
uint64_t wait_or_wake(uint64_t address, uint64_t operation, uint64_t value, uint64_t timeout_at);
/// Of emulated time.
uint64_t nanoseconds(void);

// ---- the disk ------------------------------------------------------------------------------------
/// Reads whole sectors to kernel memory.
void read_disk(uint64_t first_sector, uint64_t count, void* to);

// ---- the program ---------------------------------------------------------------------------------
void run_program(void) __attribute__((noreturn));
/// A file of the host's that was put on the disk, whole in memory.
typedef struct {
  const char* name;
  const uint8_t* bytes;
  uint64_t size;
} File;
const File* find_file(const char* name);
extern uint64_t program_break_start;
extern const char* program_name;

uint64_t system_call(uint64_t number, uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e,
                     uint64_t f);

void* memcpy(void* to, const void* from, size_t count);
void* memset(void* to, int value, size_t count);
size_t strlen(const char* text);
int strcmp(const char* a, const char* b);
