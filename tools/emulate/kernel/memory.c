// The program's memory: 4 KiB pages, given on first use. The page tables are the only record: a page
// that the program has is marked in its entry even where there is no RAM behind it yet.
#include "kernel.h"

#define ENTRY_PRESENT 1ull
#define ENTRY_WRITABLE 2ull
#define ENTRY_PROGRAM 4ull
#define ENTRY_USED (1ull << 9)            // ours: the program has this page
#define ENTRY_PROTECTION_SHIFT 52         // ours: what it may do with it, three bits
#define ENTRY_NO_EXECUTE (1ull << 63)
#define ENTRY_FRAME 0x000ffffffffff000ull

static uint64_t* const root = (uint64_t*)(RAM_BASE + 0x400000);
static uint64_t next_frame, end_of_ram;
static uint64_t free_frames;  // a list: each frame's first word is the next one's address
static uint64_t lowest_range = 0x7f0000000000;

void set_up_memory(uint64_t ram_bytes) {
  root[0] = 0;  // boot.S needed it
  next_frame = 0x600000;
  end_of_ram = ram_bytes;
}

/// A frame of zeros. 0: none is left.
static uint64_t take_frame(void) {
  uint64_t frame = free_frames;
  if (frame != 0) {
    free_frames = *(uint64_t*)(RAM_BASE + frame);
  } else {
    if (next_frame >= end_of_ram) return 0;
    frame = next_frame;
    next_frame += page_size;
  }
  memset((void*)(RAM_BASE + frame), 0, page_size);
  return frame;
}

static void give_back_frame(uint64_t frame) {
  *(uint64_t*)(RAM_BASE + frame) = free_frames;
  free_frames = frame;
}

/// The entry of a page. Null: no table for it yet, and none wanted or no memory for one.
static uint64_t* find_entry(uint64_t address, bool create) {
  uint64_t* table = root;
  for (int shift = 39; shift > 12; shift -= 9) {
    uint64_t* entry = &table[address >> shift & 511];
    if (*entry == 0) {
      const uint64_t frame = create ? take_frame() : 0;
      if (frame == 0) return NULL;
      *entry = frame | ENTRY_PRESENT | ENTRY_WRITABLE | ENTRY_PROGRAM;
    }
    table = (uint64_t*)(RAM_BASE + (*entry & ENTRY_FRAME));
  }
  return &table[address >> 12 & 511];
}

static void forget_translation(uint64_t address) {
  __asm__ volatile("invlpg (%0)" : : "r"(address) : "memory");
}

/// Sets what may be done with a page. Only pages with RAM behind them are present.
static void set_protection(uint64_t* entry, int protection) {
  uint64_t value = (*entry & ENTRY_FRAME) | ENTRY_USED;
  value |= (uint64_t)protection << ENTRY_PROTECTION_SHIFT;
  if (protection != 0 && (value & ENTRY_FRAME) != 0) value |= ENTRY_PRESENT | ENTRY_PROGRAM;
  if ((protection & protection_write) != 0) value |= ENTRY_WRITABLE;
  if ((protection & protection_execute) == 0) value |= ENTRY_NO_EXECUTE;
  *entry = value;
}

static void clear_pages(uint64_t address, uint64_t length) {
  for (uint64_t at = address; at < address + length; at += page_size) {
    uint64_t* entry = find_entry(at, false);
    if (entry == NULL || *entry == 0) continue;
    if ((*entry & ENTRY_FRAME) != 0) give_back_frame(*entry & ENTRY_FRAME);
    *entry = 0;
    forget_translation(at);
  }
}

bool map_pages(uint64_t address, uint64_t length, int protection) {
  if (length > end_of_ram || address > PROGRAM_END - length) return false;
  clear_pages(address, length);
  for (uint64_t at = address; at < address + length; at += page_size) {
    uint64_t* entry = find_entry(at, true);
    if (entry == NULL) {
      clear_pages(address, at - address);
      return false;
    }
    set_protection(entry, protection);
  }
  return true;
}

void unmap_pages(uint64_t address, uint64_t length) {
  if (address >= PROGRAM_END || length > PROGRAM_END - address) return;
  clear_pages(address, length);
  // Addresses are plentiful: only the range given out last is given out again.
  if (address == lowest_range) lowest_range = address + length;
}

bool protect_pages(uint64_t address, uint64_t length, int protection) {
  if (address >= PROGRAM_END || length > PROGRAM_END - address) return false;
  for (uint64_t at = address; at < address + length; at += page_size) {
    uint64_t* entry = find_entry(at, false);
    if (entry == NULL || *entry == 0) return false;
    set_protection(entry, protection);
    forget_translation(at);
  }
  return true;
}

void discard_pages(uint64_t address, uint64_t length) {
  for (uint64_t at = address; at < address + length && at < PROGRAM_END; at += page_size) {
    uint64_t* entry = find_entry(at, false);
    if (entry == NULL || (*entry & ENTRY_FRAME) == 0) continue;
    give_back_frame(*entry & ENTRY_FRAME);
    *entry &= ~ENTRY_FRAME;
    set_protection(entry, (int)(*entry >> ENTRY_PROTECTION_SHIFT & 7));
    forget_translation(at);
  }
}

uint64_t find_free_range(uint64_t length) {
  if (length == 0 || length > end_of_ram) return 0;
  lowest_range -= length;
  return lowest_range;
}

bool provide_page(uint64_t address, int access) {
  if (address >= PROGRAM_END) return false;
  uint64_t* entry = find_entry(address, false);
  if (entry == NULL || *entry == 0) return false;
  const int protection = (int)(*entry >> ENTRY_PROTECTION_SHIFT & 7);
  if ((protection & access) == 0) return false;
  if ((*entry & ENTRY_PRESENT) != 0) return true;
  const uint64_t frame = take_frame();
  if (frame == 0) {
    say("\nemulator: out of memory; --memory gives the machine more\n");
    finish(128 + 9);
  }
  *entry |= frame;
  set_protection(entry, protection);
  forget_translation(address);
  return true;
}

bool can_access(uint64_t address, uint64_t length, int protection) {
  if (length == 0) return true;
  if (address >= PROGRAM_END || length > PROGRAM_END - address) return false;
  const uint64_t first = address & ~(uint64_t)(page_size - 1);
  for (uint64_t at = first; at < address + length; at += page_size) {
    if (!provide_page(at, protection)) return false;
  }
  return true;
}
