// The processor's own tables and states, its exceptions, and the messages to the host.
#include <stdarg.h>

#include "kernel.h"

// ---- messages ------------------------------------------------------------------------------------
// Bochs prints what is written to port 0xe9. Between the marks, which the script on the host takes
// out, is what the program wrote.
enum { message_port = 0xe9, shutdown_port = 0x8900, mark = 0x10 };

void write_host(int stream, const char* bytes, uint64_t count) {
  static int last_stream;
  if (stream != last_stream) {
    write_port(message_port, mark);
    write_port(message_port, (uint8_t)('0' + stream));
    last_stream = stream;
  }
  for (uint64_t index = 0; index < count; ++index) {
    write_port(message_port, (uint8_t)bytes[index]);
    if (bytes[index] == mark) write_port(message_port, mark);
  }
}

static void say_number(uint64_t value, unsigned base) {
  char digits[24];
  unsigned at = sizeof digits;
  do {
    digits[--at] = "0123456789abcdef"[value % base];
    value /= base;
  } while (value != 0);
  write_host(2, digits + at, sizeof digits - at);
}

void say(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  for (; *format != 0; ++format) {
    if (*format != '%') {
      write_host(2, format, 1);
      continue;
    }
    ++format;
    if (*format == 's') {
      const char* text = va_arg(arguments, const char*);
      write_host(2, text, strlen(text));
    } else {
      say_number(va_arg(arguments, uint64_t), *format == 'x' ? 16 : 10);
    }
  }
  va_end(arguments);
}

void finish(int code) {
  // The time stamp counts instructions.
  const uint64_t instructions = read_time_stamp();
  write_host(2, "", 0);  // no marks within the numbers
  write_port(message_port, mark);
  write_port(message_port, 'x');
  say_number((uint64_t)code & 0xff, 10);
  write_port(message_port, ' ');
  say_number(instructions, 10);
  write_port(message_port, '\n');
  for (const char* letter = "Shutdown"; *letter != 0; ++letter) {
    write_port(shutdown_port, (uint8_t)*letter);
  }
  for (;;) __asm__ volatile("hlt");
}

// ---- tables --------------------------------------------------------------------------------------
typedef struct {
  uint16_t limit;
  uint64_t base;
} __attribute__((packed)) TablePointer;

// SYSCALL and SYSRET want the segments in this order.
static uint64_t segments[8] = {
    0,
    0x00af9b000000ffff,  // 0x08: the kernel's code
    0x00cf93000000ffff,  // 0x10: the kernel's data
    0x00cffb000000ffff,  // 0x18: 32-bit programs' code, there are none
    0x00cff3000000ffff,  // 0x20: the program's data
    0x00affb000000ffff,  // 0x28: the program's code
};
static struct {
  uint32_t reserved;
  uint64_t stacks[13];
  uint16_t reserved_too, io_map;
} __attribute__((packed)) task;
static uint64_t gates[33][2];

// ---- exceptions ----------------------------------------------------------------------------------
typedef struct {
  uint64_t ax, cx, dx, bx, bp, si, di, r8, r9, r10, r11, r12, r13, r14, r15;
  uint64_t number, error, ip, cs, flags, sp, ss;
} Frame;

static const char* const exception_names[32] = {
    "#DE: division",       "#DB: debug",          "NMI",
    "#BP: breakpoint",     "#OF: overflow",       "#BR: bounds",
    "#UD: no such instruction on this processor", "#NM: state not available",
    "#DF: double fault",   "coprocessor",         "#TS: task",
    "#NP: segment",        "#SS: stack",          "#GP: protection",
    "#PF: page",           "reserved",            "#MF: x87",
    "#AC: alignment",      "#MC: machine check",  "#XM: vector arithmetic",
    "#VE: virtualisation", "#CP: control flow"};

/// What a shell reports for the signal that Linux would send.
static int exit_code(uint64_t number) {
  switch (number) {
    case 6:
    case 7: return 128 + 4;
    case 0:
    case 16:
    case 19: return 128 + 8;
    case 1:
    case 3: return 128 + 5;
    default: return 128 + 11;
  }
}

void use_kernel_stack(uint64_t top) {
  kernel_stack = top;
  task.stacks[0] = top;
}

void start_clock(void) {
  // Interrupt controllers: the first one's lines are exceptions 32 to 39; only the clock's is on.
  static const uint8_t settings[][2] = {{0x20, 0x11}, {0x21, 32}, {0x21, 4}, {0x21, 1}, {0x21, 0xfe},
                                        {0xa0, 0x11}, {0xa1, 40}, {0xa1, 2}, {0xa1, 1}, {0xa1, 0xff},
                                        // The clock: 1193182 Hz by 11932, every 10 ms.
                                        {0x43, 0x34}, {0x40, 11932 & 0xff}, {0x40, 11932 >> 8}};
  for (unsigned index = 0; index < sizeof settings / sizeof *settings; ++index) {
    write_port(settings[index][0], settings[index][1]);
  }
}

void exception(Frame* frame) {
  if (frame->number == 32) {
    write_port(0x20, 0x20);  // the interrupt is answered
    let_others_run();
    return;
  }
  uint64_t address;
  __asm__ volatile("mov %%cr2, %0" : "=r"(address));
  if (frame->number == 14) {
    const int access = (frame->error & 16) != 0  ? protection_execute
                       : (frame->error & 2) != 0 ? protection_write
                                                 : protection_read;
    if (provide_page(address, access)) return;
  }
  const char* name = frame->number < 32 ? exception_names[frame->number] : 0;
  say("\nemulator: the %s ended by exception %s (error code %x)\n",
      (frame->cs & 3) == 3 ? "program" : "emulator's kernel", name != 0 ? name : "unknown",
      frame->error);
  if (frame->number == 14) {
    say("emulator: address %x, %s\n", address,
        (frame->error & 16) != 0  ? "executed"
        : (frame->error & 2) != 0 ? "written"
                                  : "read");
  }
  say("emulator: rip %x:", frame->ip);
  for (uint64_t at = frame->ip; at < frame->ip + 16; ++at) {
    if (at < PROGRAM_END && !can_access(at, 1, protection_read)) break;
    const uint8_t byte = *(const uint8_t*)at;
    say(byte < 16 ? " 0%x" : " %x", (uint64_t)byte);
  }
  say("\nemulator: rsp %x rbp %x rax %x rbx %x rcx %x rdx %x rsi %x rdi %x\n", frame->sp, frame->bp,
      frame->ax, frame->bx, frame->cx, frame->dx, frame->si, frame->di);
  say("emulator: r8 %x r9 %x r10 %x r11 %x r12 %x r13 %x r14 %x r15 %x\n", frame->r8, frame->r9,
      frame->r10, frame->r11, frame->r12, frame->r13, frame->r14, frame->r15);
  finish(exit_code(frame->number));
}

// ---- starting ------------------------------------------------------------------------------------
extern const uint8_t exception_entries[];
void system_call_entry(void);
uint64_t enabled_states;

static void load_tables(void) {
  const uint64_t task_at = (uint64_t)&task;
  task.io_map = sizeof task;
  segments[6] = (sizeof task - 1) | (task_at & 0xffffff) << 16 | 0x890000000000ull |
                (task_at >> 24 & 0xff) << 56;
  segments[7] = task_at >> 32;
  for (unsigned number = 0; number < 33; ++number) {
    const uint64_t entry = (uint64_t)(exception_entries + 16 * number);
    gates[number][0] = (entry & 0xffff) | 0x8 << 16 | 0x8e0000000000ull | (entry >> 16 & 0xffff) << 48;
    gates[number][1] = entry >> 32;
  }
  const TablePointer segment_table = {sizeof segments - 1, (uint64_t)segments};
  const TablePointer gate_table = {sizeof gates - 1, (uint64_t)gates};
  __asm__ volatile(
      "lgdt %0\n lidt %1\n"
      "push $8\n lea 1f(%%rip), %%rax\n push %%rax\n lretq\n"
      "1: mov $0x10, %%eax\n mov %%eax, %%ss\n"
      "mov $0x23, %%eax\n mov %%eax, %%ds\n mov %%eax, %%es\n"
      "xor %%eax, %%eax\n mov %%eax, %%fs\n mov %%eax, %%gs\n"
      "mov $0x30, %%eax\n ltr %%ax"
      :
      : "m"(segment_table), "m"(gate_table)
      : "rax", "memory");
}

void set_up_processor(void) {
  load_tables();
  write_model_register(0xc0000081, 0x18ull << 48 | 0x08ull << 32);  // STAR
  write_model_register(0xc0000082, (uint64_t)&system_call_entry);   // LSTAR
  write_model_register(0xc0000084, 0x47700);                        // flags that SYSCALL clears

  uint64_t control;
  __asm__ volatile("mov %%cr4, %0" : "=r"(control));
  const bool has_states = (ask_cpuid(1, 0).c >> 26 & 1) != 0;
  if (has_states) control |= 1 << 18;                           // OSXSAVE
  if ((ask_cpuid(7, 0).b & 1) != 0) control |= 1 << 16;         // FSGSBASE
  __asm__ volatile("mov %0, %%cr4" : : "r"(control) : "memory");
  if (has_states) {
    // x87, SSE, AVX, AVX-512, tiles: all that a Linux of today enables and a program may ask about.
    const uint64_t wanted = 0x600e7;
    const CpuidAnswer answer = ask_cpuid(0xd, 0);
    enabled_states = (answer.a | (uint64_t)answer.d << 32) & wanted;
    __asm__ volatile("xsetbv" : : "c"(0), "a"((uint32_t)enabled_states), "d"(0));
  }
  __asm__ volatile("fninit");
  const uint32_t vector_control = 0x1f80;
  __asm__ volatile("ldmxcsr %0" : : "m"(vector_control));
}
