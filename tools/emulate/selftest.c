// Whether the emulated processor does what Ladon's kernels want of it: AVX-512 with bf16, and tiles
// (AMX) of bf16 and bytes, asked for as Linux wants it. Compares with plain loops, exactly: all numbers are small.
// Build: gcc -O2 -static -mavx512f -mavx512bf16 -mamx-tile -mamx-bf16 -mamx-int8 selftest.c
#include <cpuid.h>
#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { arch_get_permission = 0x1022, arch_request_permission = 0x1023, tile_data = 18 };

static int failures;

static void report(const char* what, int good) {
  printf("%s: %s\n", good ? "ok" : "FAILED", what);
  failures += !good;
}

static float from_bf16(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

static uint16_t to_bf16(float value) {  // exact for the numbers here
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return (uint16_t)(bits >> 16);
}

// The tile instructions by hand: GCC 12 does not tell its optimiser that they touch memory.
typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes_per_row[16];
  uint8_t rows[16];
} __attribute__((packed)) TileConfiguration;
static void configure(const TileConfiguration* configuration) {
  __asm__ volatile("ldtilecfg %0" : : "m"(*configuration) : "memory");
}
#define LOAD_TILE(tile, base, stride)                                       \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile                       \
                   :                                                        \
                   : "r"(base), "r"((long)(stride))                         \
                   : "memory")
#define STORE_TILE(tile, base, stride)                                      \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)"                   \
                   :                                                        \
                   : "r"(base), "r"((long)(stride))                         \
                   : "memory")

/// c (rows x columns, f32) += a (rows x 2 pairs, bf16) b (pairs x columns x 2, bf16)
static int multiply_tiles(int rows, int columns, int pairs) {
  enum { guard = 4 };
  uint16_t a[16][40], b[16][40];
  float c[16 + guard][24], expected[16 + guard][24];
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 40; ++column) {
      a[row][column] = to_bf16((float)((row * 7 + column * 3) % 17 - 8));
      b[row][column] = to_bf16((float)((row * 5 + column * 11) % 13 - 6));
    }
  }
  for (int row = 0; row < 16 + guard; ++row) {
    for (int column = 0; column < 24; ++column) {
      c[row][column] = expected[row][column] = (float)(row - column);
    }
  }
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < columns; ++column) {
      for (int pair = 0; pair < pairs; ++pair) {
        for (int half = 0; half < 2; ++half) {
          expected[row][column] +=
              from_bf16(a[row][2 * pair + half]) * from_bf16(b[pair][2 * column + half]);
        }
      }
    }
  }
  TileConfiguration configuration;
  memset(&configuration, 0, sizeof configuration);
  configuration.palette = 1;
  configuration.rows[0] = (uint8_t)rows;
  configuration.bytes_per_row[0] = (uint16_t)(4 * columns);
  configuration.rows[1] = (uint8_t)rows;
  configuration.bytes_per_row[1] = (uint16_t)(4 * pairs);
  configuration.rows[2] = (uint8_t)pairs;
  configuration.bytes_per_row[2] = (uint16_t)(4 * columns);
  configure(&configuration);
  LOAD_TILE(0, c, sizeof c[0]);
  LOAD_TILE(1, a, sizeof a[0]);
  LOAD_TILE(2, b, sizeof b[0]);
  syscall(SYS_sched_yield);  // tiles are each thread's own
  __asm__ volatile("tdpbf16ps %tmm2, %tmm1, %tmm0");
  STORE_TILE(0, c, sizeof c[0]);
  __asm__ volatile("tilerelease");
  return memcmp(c, expected, sizeof c) == 0;  // what is around the tile included
}

/// The same with bytes in fours, each factor signed or not: c (int32) += a b.
static int multiply_byte_tiles(int rows, int columns, int fours, int signed_a, int signed_b) {
  uint8_t a[16][64], b[16][64];
  int32_t c[16][16], expected[16][16];
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 64; ++column) {
      a[row][column] = (uint8_t)(row * 37 + column * 11);
      b[row][column] = (uint8_t)(row * 59 + column * 7 + 100);
    }
    for (int column = 0; column < 16; ++column) c[row][column] = expected[row][column] = row - column;
  }
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < columns; ++column) {
      for (int index = 0; index < 4 * fours; ++index) {
        const uint8_t x = a[row][index], y = b[index / 4][4 * column + index % 4];
        expected[row][column] += (signed_a ? (int8_t)x : x) * (signed_b ? (int8_t)y : y);
      }
    }
  }
  TileConfiguration configuration, stored;
  memset(&configuration, 0, sizeof configuration);
  configuration.palette = 1;
  configuration.rows[0] = configuration.rows[1] = (uint8_t)rows;
  configuration.rows[2] = (uint8_t)fours;
  configuration.bytes_per_row[0] = configuration.bytes_per_row[2] = (uint16_t)(4 * columns);
  configuration.bytes_per_row[1] = (uint16_t)(4 * fours);
  configure(&configuration);
  LOAD_TILE(0, c, sizeof c[0]);
  LOAD_TILE(1, a, sizeof a[0]);
  LOAD_TILE(2, b, sizeof b[0]);
  if (signed_a && signed_b) __asm__ volatile("tdpbssd %tmm2, %tmm1, %tmm0");
  if (signed_a && !signed_b) __asm__ volatile("tdpbsud %tmm2, %tmm1, %tmm0");
  if (!signed_a && signed_b) __asm__ volatile("tdpbusd %tmm2, %tmm1, %tmm0");
  if (!signed_a && !signed_b) __asm__ volatile("tdpbuud %tmm2, %tmm1, %tmm0");
  STORE_TILE(0, c, sizeof c[0]);
  __asm__ volatile("sttilecfg %0" : "=m"(stored) : : "memory");
  __asm__ volatile("tilerelease");
  return memcmp(c, expected, sizeof c) == 0 && memcmp(&configuration, &stored, sizeof stored) == 0;
}

static void* multiply_in_thread(void* shape) {
  const int rows = *(const int*)shape;
  long good = 1;
  for (int turn = 0; turn < 200; ++turn) good &= multiply_tiles(rows, 17 - rows, 1 + turn % 16);
  return (void*)good;
}

static int multiply_in_threads(void) {
  static const int shapes[] = {3, 8, 16};
  pthread_t threads[3];
  int good = 1;
  for (int index = 0; index < 3; ++index) {
    if (pthread_create(&threads[index], NULL, multiply_in_thread, (void*)&shapes[index]) != 0) return 0;
  }
  for (int index = 0; index < 3; ++index) {
    void* result = NULL;
    pthread_join(threads[index], &result);
    good &= result != NULL;
  }
  return good;
}

/// Two vectors of f32 to one of bf16: the second source first.
static int round_two(void) {
  float first[16], second[16];
  uint16_t rounded[32];
  for (int index = 0; index < 16; ++index) {
    first[index] = (float)index - 8;
    second[index] = (float)(100 + index);
  }
  const __m512bh result = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(first), _mm512_loadu_ps(second));
  memcpy(rounded, &result, sizeof rounded);
  for (int index = 0; index < 16; ++index) {
    if (from_bf16(rounded[index]) != second[index]) return 0;
    if (from_bf16(rounded[16 + index]) != first[index]) return 0;
  }
  return 1;
}

static int multiply_pairs(void) {
  float sums[16], expected[16];
  uint16_t a[32], b[32];
  for (int index = 0; index < 32; ++index) {
    a[index] = to_bf16((float)(index % 7 - 3));
    b[index] = to_bf16((float)(index % 5 - 2));
  }
  for (int index = 0; index < 16; ++index) {
    expected[index] = (float)index + from_bf16(a[2 * index]) * from_bf16(b[2 * index]) +
                      from_bf16(a[2 * index + 1]) * from_bf16(b[2 * index + 1]);
    sums[index] = (float)index;
  }
  const __m512 result = _mm512_dpbf16_ps(_mm512_loadu_ps(sums), (__m512bh)_mm512_loadu_si512(a),
                                         (__m512bh)_mm512_loadu_si512(b));
  _mm512_storeu_ps(sums, result);
  return memcmp(sums, expected, sizeof sums) == 0;
}

int main(void) {
  unsigned a, b, c, d;
  char name[49] = "";
  for (unsigned leaf = 0; leaf < 3; ++leaf) {
    __cpuid(0x80000002 + leaf, a, b, c, d);
    const unsigned words[4] = {a, b, c, d};
    memcpy(name + 16 * leaf, words, 16);
  }
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  printf("processor: %s, XCR0 %x\n", name, low);
  __cpuid_count(7, 0, a, b, c, d);
  const int has_tiles = (d >> 24 & 1) && (d >> 22 & 1) && (d >> 25 & 1) && (low >> 17 & 3) == 3;
  const int has_avx512 = (b >> 16 & 1) && (low & 0xe6) == 0xe6;
  printf("AVX-512F %u, AMX-TILE %u, AMX-BF16 %u, AMX-INT8 %u\n", b >> 16 & 1, d >> 24 & 1, d >> 22 & 1,
         d >> 25 & 1);
  __cpuid_count(7, 1, a, b, c, d);
  const int has_bf16 = a >> 5 & 1;
  printf("AVX-512 BF16 %d\n", has_bf16);
  if (!has_tiles || !has_avx512 || !has_bf16) {
    printf("FAILED: this processor lacks some of them\n");
    return 1;
  }

  report("pairs of bf16 in vectors", multiply_pairs());
  report("two vectors rounded to bf16", round_two());
  unsigned long permitted = 0;
  syscall(SYS_arch_prctl, arch_get_permission, &permitted);
  report("tiles are not permitted at first", (permitted >> tile_data & 1) == 0);
  report("permission", syscall(SYS_arch_prctl, arch_request_permission, tile_data) == 0);
  syscall(SYS_arch_prctl, arch_get_permission, &permitted);
  report("tiles are permitted then", (permitted >> tile_data & 1) == 1);
  report("whole tiles", multiply_tiles(16, 16, 16));
  report("5 rows of 20 bytes", multiply_tiles(5, 5, 5));
  int good = 1;
  for (int rows = 1; rows <= 16; ++rows) {
    for (int columns = 1; columns <= 16; ++columns) {
      for (int pairs = 1; pairs <= 16; ++pairs) good &= multiply_tiles(rows, columns, pairs);
    }
  }
  report("tiles of every shape", good);
  good = 1;
  for (int kind = 0; kind < 4; ++kind) {
    good &= multiply_byte_tiles(16, 16, 16, kind & 1, kind >> 1);
    good &= multiply_byte_tiles(7, 3, 11, kind & 1, kind >> 1);
  }
  report("tiles of bytes, signed and not", good);
  report("tiles of three threads that take turns", multiply_in_threads());
  return failures != 0;
}
