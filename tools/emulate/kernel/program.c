// From the disk to a running program: what emulate.py wrote there, the program's segments, and the
// stack that a program finds when it starts.
#include "kernel.h"

// ---- the disk ------------------------------------------------------------------------------------
enum { disk_data = 0x1f0, disk_count = 0x1f2, disk_address = 0x1f3, disk_drive = 0x1f6 };
enum { disk_command = 0x1f7, disk_status = 0x1f7, command_read = 0x20 };

void read_disk(uint64_t first_sector, uint64_t count, void* to) {
  while (count > 0) {
    const uint64_t now = count < 256 ? count : 256;
    write_port(disk_count, (uint8_t)now);  // 0 says 256
    for (int byte = 0; byte < 3; ++byte) {
      write_port((uint16_t)(disk_address + byte), (uint8_t)(first_sector >> 8 * byte));
    }
    write_port(disk_drive, (uint8_t)(0xe0 | (first_sector >> 24 & 15)));
    write_port(disk_command, command_read);
    for (uint64_t sector = 0; sector < now; ++sector) {
      uint8_t status;
      do status = read_port(disk_status);
      while ((status & 0x80) != 0 || (status & 0x09) == 0);
      if ((status & 1) != 0) {
        say("emulator: the disk cannot be read\n");
        finish(125);
      }
      uint64_t words = sector_size / 2;
      __asm__ volatile("rep insw" : "+D"(to), "+c"(words) : "d"((uint16_t)disk_data) : "memory");
    }
    first_sector += now;
    count -= now;
  }
}

// ---- what is on it - -----------------------------------------------------------------------------
// Offsets are from the start of the disk. emulate.py writes the same.
typedef struct {
  char magic[8];
  uint64_t ram_bytes, disk_bytes;
  uint64_t program_offset;
  uint64_t argument_count, environment_count, strings_offset;  // strings: one after the other
  uint64_t file_count, files_offset;
} Disk;
typedef struct {
  uint64_t name_offset, data_offset, size;
} DiskFile;

enum { file_limit = 256 };
static File files[file_limit];
static uint64_t file_count;

const File* find_file(const char* name) {
  for (uint64_t index = 0; index < file_count; ++index) {
    if (strcmp(files[index].name, name) == 0) return &files[index];
  }
  return NULL;
}

/// Reads the whole disk to the end of RAM, which is then the disk's.
static const Disk* load_disk(void) {
  static Disk first[sector_size / sizeof(Disk) + 1];
  read_disk(0, 1, first);
  const uint64_t at = (first->ram_bytes - first->disk_bytes) & ~(uint64_t)(page_size - 1);
  uint8_t* image = (uint8_t*)(RAM_BASE + at);
  read_disk(0, first->disk_bytes / sector_size, image);
  set_up_memory(at);
  const Disk* disk = (const Disk*)image;
  const DiskFile* entries = (const DiskFile*)(image + disk->files_offset);
  file_count = disk->file_count < file_limit ? disk->file_count : file_limit;
  for (uint64_t index = 0; index < file_count; ++index) {
    files[index].name = (const char*)image + entries[index].name_offset;
    files[index].bytes = image + entries[index].data_offset;
    files[index].size = entries[index].size;
  }
  return disk;
}

// ---- the program ---------------------------------------------------------------------------------
typedef struct {
  uint8_t identity[16];
  uint16_t type, machine;
  uint32_t version;
  uint64_t entry, headers_offset, sections_offset;
  uint32_t flags;
  uint16_t size, header_size, header_count, section_size, section_count, names;
} Elf;
typedef struct {
  uint32_t type, flags;
  uint64_t offset, address, physical_address, file_size, memory_size, alignment;
} ElfHeader;
enum { elf_position_independent = 3, elf_load = 1, elf_interpreter = 3, elf_headers = 6 };

#define STACK_TOP 0x7fff00000000ull
#define STACK_BYTES (64ull << 20)

uint64_t program_break_start;
const char* program_name;

static void give_up(const char* why) {
  say("emulator: %s\n", why);
  finish(126);
}

static uint64_t page_down(uint64_t address) { return address & ~(uint64_t)(page_size - 1); }
static uint64_t page_up(uint64_t address) { return page_down(address + page_size - 1); }

/// Where the program's headers are in its memory.
static uint64_t load_segments(const Elf* elf, uint64_t bias) {
  const ElfHeader* headers = (const ElfHeader*)((const uint8_t*)elf + elf->headers_offset);
  uint64_t headers_at = 0;
  for (unsigned index = 0; index < elf->header_count; ++index) {
    const ElfHeader* header = &headers[index];
    if (header->type == elf_interpreter) give_up("the program is not static");
    if (header->type != elf_load) continue;
    const uint64_t start = page_down(bias + header->address);
    const uint64_t end = page_up(bias + header->address + header->memory_size);
    if (!map_pages(start, end - start, protection_read | protection_write) ||
        !can_access(start, end - start, protection_write)) {
      give_up("the program does not fit into memory");
    }
    memcpy((void*)(bias + header->address), (const uint8_t*)elf + header->offset, header->file_size);
    const int protection = ((header->flags & 4) != 0 ? protection_read : 0) |
                           ((header->flags & 2) != 0 ? protection_write : 0) |
                           ((header->flags & 1) != 0 ? protection_execute : 0);
    protect_pages(start, end - start, protection);
    if (elf->headers_offset >= header->offset &&
        elf->headers_offset < header->offset + header->file_size) {
      headers_at = bias + header->address + elf->headers_offset - header->offset;
    }
    if (end > program_break_start) program_break_start = end;
  }
  return headers_at;
}

static uint64_t put_on_stack(uint64_t* stack, const void* bytes, uint64_t count) {
  *stack -= count;
  memcpy((void*)*stack, bytes, count);
  return *stack;
}

/// The stack as Linux leaves it: argument count, arguments, environment, auxiliary vector.
static uint64_t build_stack(const Disk* disk, const Elf* elf, uint64_t bias, uint64_t headers_at) {
  if (!map_pages(STACK_TOP - STACK_BYTES, STACK_BYTES, protection_read | protection_write)) {
    give_up("no memory for the stack");
  }
  const uint64_t count = disk->argument_count + disk->environment_count;
  if (count > 500) give_up("too many arguments and environment variables");
  static uint64_t words[1 + 500 + 2 + 64];
  uint64_t stack = STACK_TOP;
  uint64_t at = 0;
  words[at++] = disk->argument_count;
  const char* text = (const char*)disk + disk->strings_offset;
  for (uint64_t index = 0; index < count; ++index) {
    if (index == disk->argument_count) words[at++] = 0;
    words[at++] = put_on_stack(&stack, text, strlen(text) + 1);
    if (index == 0) program_name = text;
    text += strlen(text) + 1;
  }
  if (disk->environment_count == 0) words[at++] = 0;
  words[at++] = 0;
  const uint64_t platform = put_on_stack(&stack, "x86_64", 7);
  const uint64_t random = put_on_stack(&stack, "sixteen numbers", 16);  // the same in every run
  // What the state of the registers takes on a signal's stack, and the frame around it.
  const uint64_t signal_stack = ask_cpuid(0xd, 0).b + 2048;
  const uint64_t auxiliary[][2] = {
      {3, headers_at},           {4, elf->header_size},
      {5, elf->header_count},    {6, page_size},
      {7, 0},                    {8, 0},
      {9, bias + elf->entry},    {11, 0},
      {12, 0},                   {13, 0},
      {14, 0},                   {15, platform},
      {16, ask_cpuid(1, 0).d},   {17, 100},
      {23, 0},                   {25, random},
      {26, (ask_cpuid(7, 0).b & 1) << 1},  // AT_HWCAP2: the program may set its FS base itself
      {31, words[1]},            {51, signal_stack},
      {0, 0},
  };
  memcpy(&words[at], auxiliary, sizeof auxiliary);
  at += sizeof auxiliary / sizeof(uint64_t);
  stack = (stack - at * sizeof(uint64_t)) & ~15ull;
  memcpy((void*)stack, words, at * sizeof(uint64_t));
  return stack;
}

void run_program(void) {
  const Disk* disk = load_disk();
  const Elf* elf = (const Elf*)((const uint8_t*)disk + disk->program_offset);
  if (elf->machine != 62) give_up("the program is not for x86-64 Linux");
  const uint64_t bias = elf->type == elf_position_independent ? 0x10000000 : 0;
  const uint64_t headers_at = load_segments(elf, bias);
  enter_program(bias + elf->entry, build_stack(disk, elf, bias, headers_at));
}

void kernel_main(void) {
  extern uint8_t bss_start[], bss_end[];
  memset(bss_start, 0, (size_t)(bss_end - bss_start));
  set_up_processor();
  set_up_threads();
  write_host(1, "", 0);
  run_program();
}

// ---- what the compiler expects -------------------------------------------------------------------
void* memcpy(void* to, const void* from, size_t count) {
  void* at = to;
  __asm__ volatile("rep movsb" : "+D"(at), "+S"(from), "+c"(count) : : "memory");
  return to;
}
void* memset(void* to, int value, size_t count) {
  void* at = to;
  __asm__ volatile("rep stosb" : "+D"(at), "+c"(count) : "a"(value) : "memory");
  return to;
}
size_t strlen(const char* text) {
  size_t length = 0;
  while (text[length] != 0) ++length;
  return length;
}
int strcmp(const char* a, const char* b) {
  while (*a != 0 && *a == *b) ++a, ++b;
  return *a - *b;
}
