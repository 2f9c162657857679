// The tile operations of kernels/{gemm,block_gemm,attention}/tiles.h with AMX instructions, for the files
// that are compiled with AMX; nothing here is visible outside of these files.
#pragma once

#include <immintrin.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace chunkrt {
namespace {

// Operand of LDTILECFG.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

// Sets the rows of sums and left operands (tiles 0 to 3, 6 and 7), and the bytes of left operands' rows;
// right operands (4 and 5) have one row for every 4 of these bytes.
constexpr TileConfig tile_config(std::uint8_t rows, std::uint8_t left_bytes) {
  TileConfig config;
  for (std::size_t tile = 0; tile < 8; ++tile) {
    const bool is_left = tile >= 6, is_right = tile == 4 || tile == 5;
    config.row_bytes[tile] = is_left ? left_bytes : 64;
    config.rows[tile] = is_right ? static_cast<std::uint8_t>(left_bytes / 4) : rows;
  }
  return config;
}

// These are constants, because GCC 12 assumes that LDTILECFG reads only 8 bytes, and removes the other
// stores.
template <std::uint8_t LeftBytes>
constexpr auto kTileConfigs = [] {
  std::array<TileConfig, 17> configs{};
  for (std::uint8_t rows = 1; rows <= 16; ++rows) configs[rows] = tile_config(rows, LeftBytes);
  return configs;
}();

// Operations that do not depend on a tile's element type. Intrinsics name tiles by literal numbers.
class TileRegisters {
 public:
  TileRegisters() = default;
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
  // Releases the tiles, because a thread with tiles in use saves 8 KB at every context switch.
  ~TileRegisters() { _tile_release(); }

  template <std::uint8_t LeftBytes = 64>
  void configure(std::size_t rows) {
    _tile_loadconfig(&kTileConfigs<LeftBytes>[rows]);
  }

  template <std::size_t Tile>
  void zero() {
    static_assert(Tile < 4);
    if constexpr (Tile == 0) _tile_zero(0);
    if constexpr (Tile == 1) _tile_zero(1);
    if constexpr (Tile == 2) _tile_zero(2);
    if constexpr (Tile == 3) _tile_zero(3);
  }

  template <std::size_t Tile>
  void load(const void* rows, std::size_t stride) {
    static_assert(Tile >= 4 && Tile < 8);
    if constexpr (Tile == 4) _tile_loadd(4, rows, stride);
    if constexpr (Tile == 5) _tile_loadd(5, rows, stride);
    if constexpr (Tile == 6) _tile_loadd(6, rows, stride);
    if constexpr (Tile == 7) _tile_loadd(7, rows, stride);
  }

  template <std::size_t Tile>
  void load_sums(const void* sums, std::size_t stride) {
    static_assert(Tile < 4);
    if constexpr (Tile == 0) _tile_loadd(0, sums, stride);
    if constexpr (Tile == 1) _tile_loadd(1, sums, stride);
    if constexpr (Tile == 2) _tile_loadd(2, sums, stride);
    if constexpr (Tile == 3) _tile_loadd(3, sums, stride);
  }

  template <std::size_t Tile>
  void store(void* sums, std::size_t stride) {
    static_assert(Tile < 4);
    if constexpr (Tile == 0) _tile_stored(0, sums, stride);
    if constexpr (Tile == 1) _tile_stored(1, sums, stride);
    if constexpr (Tile == 2) _tile_stored(2, sums, stride);
    if constexpr (Tile == 3) _tile_stored(3, sums, stride);
  }

  void prefetch(const void* line) { _mm_prefetch(static_cast<const char*>(line), _MM_HINT_T1); }
};

// Tiles of int8, sums in int32.
class AmxTiles : public TileRegisters {
 public:
  template <std::size_t Sum, std::size_t Left, std::size_t Right>
  void multiply() {
    static_assert(Left == 6 + Sum / 2 && Right == 4 + Sum % 2);
    if constexpr (Sum == 0) _tile_dpbssd(0, 6, 4);
    if constexpr (Sum == 1) _tile_dpbssd(1, 6, 5);
    if constexpr (Sum == 2) _tile_dpbssd(2, 7, 4);
    if constexpr (Sum == 3) _tile_dpbssd(3, 7, 5);
  }
};

// Tiles of bfloat16, sums in float32.
class AmxBfloatTiles : public TileRegisters {
 public:
  template <std::size_t Sum, std::size_t Left, std::size_t Right>
  void multiply() {
    static_assert(Left == 6 + Sum / 2 && Right == 4 + Sum % 2);
    if constexpr (Sum == 0) _tile_dpbf16ps(0, 6, 4);
    if constexpr (Sum == 1) _tile_dpbf16ps(1, 6, 5);
    if constexpr (Sum == 2) _tile_dpbf16ps(2, 7, 4);
    if constexpr (Sum == 3) _tile_dpbf16ps(3, 7, 5);
  }
};

}  // namespace
}  // namespace chunkrt
