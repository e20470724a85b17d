// The matrix units of x86 (AMX): eight tiles, each of up to 16 rows of 64 bytes, and sums += one tile times another.
//
// Intrinsics name tiles by text, which a template has not; hence the instructions themselves. As the compiler knows no
// tiles, these stay in their order, and memory is what it was told to be before each.

#pragma once

#include <cstdint>

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BW__) && \
    defined(__AVX512BF16__) && defined(__AVX512VBMI2__) && defined(__linux__)
#define HAS_TILE_UNITS 1

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "vector.h"

constexpr int64_t TILE_BYTES = 1024, TILE_LINE = 64, TILE_LINES = 16;

// Linux saves the tiles of a process that has asked for it, and ends others at their first use.
inline bool has_tile_units() {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool granted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return granted;
}

// How many rows a tile has, and bytes a row. Setting shapes clears all tiles.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int64_t tile_rows, int64_t bytes) {
        rows[tile] = (uint8_t)tile_rows;
        row_bytes[tile] = (uint16_t)bytes;
    }
    void use() const { asm volatile("ldtilecfg %0" ::"m"(*this)); }
};

// A thread that is done with tiles says so: it would pay for them at each switch, and its core in other ways.
struct TileUse {
    ~TileUse() { asm volatile("tilerelease"); }
};

template <int T> INLINE void tile_clear() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }

template <int T> INLINE void tile_load(const void* p, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
}

template <int T> INLINE void tile_store(void* p, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
}

// Row i of sums, column j += the products of the pairs in row i of `rows` and of those in column j of `columns`.
template <int SUMS, int ROWS, int COLUMNS> INLINE void tile_add_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ROWS), "i"(COLUMNS));
}

// The same of signed bytes, four at a time; those of columns may be unsigned.
template <int SUMS, int ROWS, int COLUMNS, bool SIGNED_COLUMNS> INLINE void tile_add_bytes() {
    if constexpr (SIGNED_COLUMNS)
        asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ROWS), "i"(COLUMNS));
    else
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ROWS), "i"(COLUMNS));
}

// Sixteen vectors of sixteen words, as a matrix, turned.
INLINE void transpose(__m512i v[16]) {
    __m512i pairs[16];
    unroll<8>([&](auto i) LAMBDA {
        pairs[2 * i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
    });
    unroll<4>([&](auto i) LAMBDA {
        v[4 * i] = _mm512_unpacklo_epi64(pairs[4 * i], pairs[4 * i + 2]);
        v[4 * i + 1] = _mm512_unpackhi_epi64(pairs[4 * i], pairs[4 * i + 2]);
        v[4 * i + 2] = _mm512_unpacklo_epi64(pairs[4 * i + 1], pairs[4 * i + 3]);
        v[4 * i + 3] = _mm512_unpackhi_epi64(pairs[4 * i + 1], pairs[4 * i + 3]);
    });
    // v[4 i + j] holds, in its quarter q, column 4 q + j of rows 4 i to 4 i + 3.
    unroll<4>([&](auto j) LAMBDA {
        pairs[j] = _mm512_shuffle_i32x4(v[j], v[4 + j], 0x88);
        pairs[4 + j] = _mm512_shuffle_i32x4(v[j], v[4 + j], 0xDD);
        pairs[8 + j] = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0x88);
        pairs[12 + j] = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0xDD);
    });
    unroll<4>([&](auto j) LAMBDA {
        v[j] = _mm512_shuffle_i32x4(pairs[j], pairs[8 + j], 0x88);
        v[8 + j] = _mm512_shuffle_i32x4(pairs[j], pairs[8 + j], 0xDD);
        v[4 + j] = _mm512_shuffle_i32x4(pairs[4 + j], pairs[12 + j], 0x88);
        v[12 + j] = _mm512_shuffle_i32x4(pairs[4 + j], pairs[12 + j], 0xDD);
    });
}
#endif
