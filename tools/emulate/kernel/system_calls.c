// The system calls, with Linux's numbers and structures. What is not here answers ENOSYS, and says
// so once.
#include "kernel.h"

#define FAILED(error) ((uint64_t)-(int64_t)(error))

static uint64_t minimum(uint64_t a, uint64_t b) { return a < b ? a : b; }
static uint64_t page_up(uint64_t address) { return (address + page_size - 1) & ~(uint64_t)(page_size - 1); }

// ---- files ---------------------------------------------------------------------------------------
enum { first_descriptor = 3, descriptor_limit = 64 };
static struct {
  const File* file;
  uint64_t position;
} open_files[descriptor_limit];

static const File* get_file(uint64_t descriptor) {
  if (descriptor < first_descriptor || descriptor >= descriptor_limit) return NULL;
  return open_files[descriptor].file;
}

/// Copies a name out of the program's memory. False: it cannot be read.
static bool read_name(uint64_t address, char* name, uint64_t limit) {
  for (uint64_t index = 0; index < limit; ++index) {
    if (!can_access(address + index, 1, protection_read)) return false;
    name[index] = *(const char*)(address + index);
    if (name[index] == 0) return true;
  }
  return false;
}

static uint64_t open_file(uint64_t name_at, uint64_t flags) {
  char name[1024];
  if (!read_name(name_at, name, sizeof name)) return FAILED(error_fault);
  if ((flags & 3) != 0) return FAILED(error_access);  // files are read only
  const File* file = find_file(name);
  if (file == NULL) return FAILED(error_no_entry);
  for (uint64_t descriptor = first_descriptor; descriptor < descriptor_limit; ++descriptor) {
    if (open_files[descriptor].file != NULL) continue;
    open_files[descriptor].file = file;
    open_files[descriptor].position = 0;
    return descriptor;
  }
  return FAILED(error_no_memory);
}

static uint64_t read_file(uint64_t descriptor, uint64_t to, uint64_t count, uint64_t position) {
  const File* file = get_file(descriptor);
  if (file == NULL) return descriptor == 0 ? 0 : FAILED(error_bad_file);  // no standard input
  if (position >= file->size) return 0;
  count = minimum(count, file->size - position);
  if (!can_access(to, count, protection_write)) return FAILED(error_fault);
  memcpy((void*)to, file->bytes + position, count);
  return count;
}

static uint64_t seek_file(uint64_t descriptor, uint64_t offset, uint64_t from) {
  const File* file = get_file(descriptor);
  if (file == NULL) return FAILED(error_bad_file);
  if (from > 2) return FAILED(error_invalid);
  uint64_t* position = &open_files[descriptor].position;
  *position = offset + (from == 0 ? 0 : from == 1 ? *position : file->size);
  return *position;
}

static uint64_t write_stream(uint64_t descriptor, uint64_t from, uint64_t count) {
  if (descriptor != 1 && descriptor != 2) return FAILED(error_bad_file);
  if (!can_access(from, count, protection_read)) return FAILED(error_fault);
  write_host((int)descriptor, (const char*)from, count);
  return count;
}

static uint64_t write_streams(uint64_t descriptor, uint64_t parts_at, uint64_t part_count) {
  if (part_count > 1024) return FAILED(error_invalid);
  if (!can_access(parts_at, part_count * 16, protection_read)) return FAILED(error_fault);
  const uint64_t* parts = (const uint64_t*)parts_at;
  uint64_t total = 0;
  for (uint64_t index = 0; index < part_count; ++index) {
    const uint64_t written = write_stream(descriptor, parts[2 * index], parts[2 * index + 1]);
    if ((int64_t)written < 0) return written;
    total += written;
  }
  return total;
}

/// The fields of struct stat that programs look at.
static uint64_t describe_file(const File* file, uint64_t to) {
  if (!can_access(to, 144, protection_write)) return FAILED(error_fault);
  memset((void*)to, 0, 144);
  uint32_t* mode = (uint32_t*)(to + 24);
  *mode = file != NULL ? 0100444 : 0020620;  // a file; else a terminal's kind of thing
  *(uint64_t*)(to + 16) = 1;
  *(uint64_t*)(to + 48) = file != NULL ? file->size : 0;
  *(uint64_t*)(to + 56) = page_size;
  return 0;
}

static uint64_t describe_name(uint64_t descriptor, uint64_t name_at, uint64_t to) {
  char name[1024];
  if (!read_name(name_at, name, sizeof name)) return FAILED(error_fault);
  if (name[0] == 0) {  // the descriptor itself
    const File* file = get_file(descriptor);
    if (file == NULL && descriptor > 2) return FAILED(error_bad_file);
    return describe_file(file, to);
  }
  const File* file = find_file(name);
  return file == NULL ? FAILED(error_no_entry) : describe_file(file, to);
}

// ---- memory --------------------------------------------------------------------------------------
static uint64_t set_break(uint64_t wanted) {
  static uint64_t now;
  if (now == 0) now = program_break_start;
  const uint64_t limit = program_break_start + (1ull << 32);
  if (wanted < program_break_start || wanted > limit) return now;
  if (page_up(wanted) > page_up(now)) {
    const int protection = protection_read | protection_write;
    if (!map_pages(page_up(now), page_up(wanted) - page_up(now), protection)) return now;
  } else {
    unmap_pages(page_up(wanted), page_up(now) - page_up(wanted));
  }
  return now = wanted;
}

static uint64_t map_memory(uint64_t address, uint64_t length, int protection, uint64_t flags,
                           uint64_t descriptor, uint64_t offset) {
  enum { fixed = 0x10, anonymous = 0x20 };
  if (length == 0) return FAILED(error_invalid);
  if (length > PROGRAM_END / 2) return FAILED(error_no_memory);
  const uint64_t bytes = page_up(length);
  if ((flags & fixed) == 0) address = find_free_range(bytes);
  if (address == 0 || address % page_size != 0) return FAILED(error_no_memory);
  if (!map_pages(address, bytes, protection)) return FAILED(error_no_memory);
  if ((flags & anonymous) == 0) {  // a file: a copy of it
    protect_pages(address, bytes, protection_read | protection_write);
    const uint64_t got = read_file(descriptor, address, length, offset);
    protect_pages(address, bytes, protection);
    if ((int64_t)got < 0) return got;
  }
  return address;
}

// ---- the rest ------------------------------------------------------------------------------------
/// Writes a number where the program wants it.
static uint64_t give(uint64_t to, uint64_t value, uint64_t size) {
  if (!can_access(to, size, protection_write)) return FAILED(error_fault);
  memcpy((void*)to, &value, size);
  return 0;
}

static uint64_t processor_state(uint64_t what, uint64_t value) {
  enum { set_gs = 0x1001, set_fs = 0x1002, supported = 0x1021, permitted = 0x1022, request = 0x1023 };
  enum { tile_data = 18 };
  static bool tiles_permitted;
  switch (what) {
    case set_fs: set_thread_pointer(value); return 0;
    case set_gs: write_model_register(0xc0000101, value); return 0;
    case supported: return give(value, enabled_states, 8);
    case permitted:
      return give(value, tiles_permitted ? enabled_states : enabled_states & ~(1ull << tile_data), 8);
    case request:
      if (value != tile_data || (enabled_states >> tile_data & 1) == 0) return FAILED(error_invalid);
      tiles_permitted = true;
      return 0;
    default: return FAILED(error_invalid);
  }
}

static uint64_t fill_random(uint64_t to, uint64_t count) {
  static uint64_t state = 0x9e3779b97f4a7c15;  // the same numbers in every run
  if (!can_access(to, count, protection_write)) return FAILED(error_fault);
  for (uint64_t index = 0; index < count; ++index) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    ((uint8_t*)to)[index] = (uint8_t)state;
  }
  return count;
}

static uint64_t tell_time(uint64_t to, uint64_t divisor) {
  if (to == 0) return 0;
  if (!can_access(to, 16, protection_write)) return FAILED(error_fault);
  ((uint64_t*)to)[0] = nanoseconds() / 1000000000;
  ((uint64_t*)to)[1] = nanoseconds() % 1000000000 / divisor;
  return 0;
}

static uint64_t tell_system_name(uint64_t to) {
  static const char* const fields[] = {"Linux", "emulator", "6.1.0", "Ladon", "x86_64", ""};
  if (!can_access(to, 6 * 65, protection_write)) return FAILED(error_fault);
  memset((void*)to, 0, 6 * 65);
  for (int index = 0; index < 6; ++index) {
    memcpy((void*)(to + 65 * (uint64_t)index), fields[index], strlen(fields[index]));
  }
  return 0;
}

/// prlimit64(): a stack of 8 MiB, no other limits.
static uint64_t tell_limit(uint64_t what, uint64_t to) {
  if (to == 0) return 0;
  if (!can_access(to, 16, protection_write)) return FAILED(error_fault);
  ((uint64_t*)to)[0] = what == 3 ? 8u << 20 : ~0ull;
  ((uint64_t*)to)[1] = ~0ull;
  return 0;
}

static uint64_t end_by_signal(uint64_t number) {
  say("\nemulator: the program ended by signal %u\n", number);
  finish(128 + (int)number);
}

static uint64_t put_text(uint64_t to, uint64_t limit, const char* text, uint64_t count) {
  if (count > limit) return FAILED(error_range);
  if (!can_access(to, count, protection_write)) return FAILED(error_fault);
  memcpy((void*)to, text, count);
  return count;
}

static uint64_t unknown(uint64_t number) {
  static uint8_t said[64];
  if (number < 512 && (said[number / 8] >> number % 8 & 1) == 0) {
    said[number / 8] |= (uint8_t)(1 << number % 8);
    say("emulator: system call %u is not there\n", number);
  }
  return FAILED(error_no_call);
}

uint64_t system_call(uint64_t number, uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e,
                     uint64_t f) {
  switch (number) {
    case 0: {  // read
      const uint64_t count = read_file(a, b, c, a < descriptor_limit ? open_files[a].position : 0);
      if (get_file(a) != NULL && (int64_t)count > 0) open_files[a].position += count;
      return count;
    }
    case 1: return write_stream(a, b, c);
    case 2: return open_file(a, b);
    case 3:  // close
      if (get_file(a) == NULL) return a <= 2 ? 0 : FAILED(error_bad_file);
      open_files[a].file = NULL;
      return 0;
    case 5:  // fstat
      if (get_file(a) == NULL && a > 2) return FAILED(error_bad_file);
      return describe_file(get_file(a), b);
    case 8: return seek_file(a, b, c);
    case 9: return map_memory(a, b, (int)c, d, e, f);
    case 10: return protect_pages(a, page_up(b), (int)c) ? 0 : FAILED(error_no_memory);
    case 11: unmap_pages(a, page_up(b)); return 0;
    case 12: return set_break(a);
    case 13: return 0;                            // rt_sigaction: no signal ever comes
    case 14: return 0;                            // rt_sigprocmask
    case 16: return FAILED(error_no_terminal);    // ioctl
    case 17: return read_file(a, b, c, d);        // pread64
    case 20: return write_streams(a, b, c);       // writev
    case 21: return FAILED(error_no_entry);       // access
    case 24: let_others_run(); return 0;          // sched_yield
    case 28:                                      // madvise: MADV_DONTNEED is the one that shows
      if (c == 4) discard_pages(a, page_up(b));
      return 0;
    case 35: case 230: let_others_run(); return 0;  // nanosleep, clock_nanosleep: no time at all
    case 39: return 1;                            // getpid
    case 56: return clone_thread(a, b, c, d, e);
    case 60: end_thread((int)a);                  // exit
    case 62: return end_by_signal(b);             // kill
    case 63: return tell_system_name(a);
    case 79: return put_text(a, b, "/", 2);       // getcwd
    case 89: return FAILED(error_no_entry);       // readlink
    case 96: return tell_time(a, 1000);           // gettimeofday
    case 97: return tell_limit(a, b);             // getrlimit
    case 102: case 104: case 107: case 108: return 0;  // getuid and its kin
    case 131: return 0;                           // sigaltstack
    case 158: return processor_state(a, b);
    case 186: return thread_id();
    case 200: return end_by_signal(b);            // tkill
    case 202: return wait_or_wake(a, b, c, d);    // futex
    case 203: return 0;                           // sched_setaffinity
    case 204: { const uint64_t failed = give(b, 1, 8); return failed != 0 ? failed : 8; }
    case 218: set_clear_id_at(a); return thread_id();
    case 228: return tell_time(b, 1);             // clock_gettime
    case 229: return tell_time(b, 1);             // clock_getres
    case 231: finish((int)a);                     // exit_group
    case 234: return end_by_signal(c);            // tgkill
    case 257: return open_file(b, c);             // openat
    case 262: return describe_name(a, b, c);      // newfstatat
    case 267: return FAILED(error_no_entry);      // readlinkat
    case 273: return 0;                           // set_robust_list
    case 302: return tell_limit(b, d);            // prlimit64
    case 318: return fill_random(a, b);
    case 334: return FAILED(error_no_call);       // rseq: the C library does without
    case 435: return FAILED(error_no_call);       // clone3: it tries clone next
    default: return unknown(number);
  }
}
