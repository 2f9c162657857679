// Matrix tiles in plain C++: the operations that kernels/gemm/tiles.h and kernels/block_gemm/tiles.h need, in
// plain loops that refuse invalid operations like a processor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "tests/suite.h"

namespace chunkrt::testing {

class TileTwin {
 public:
  template <std::size_t LeftBytes = 64>
  void configure(std::size_t rows) {
    check(rows >= 1 && rows <= 16, "a tile has 1 to 16 rows");
    for (Tile& tile : tiles_) tile = {.rows = rows};
    for (std::size_t left : {6u, 7u}) tiles_[left].row_bytes = LeftBytes;
    for (std::size_t right : {4u, 5u}) tiles_[right].rows = LeftBytes / 4;
  }

  template <std::size_t Number>
  void zero() {
    std::memset(configured(Number).bytes, 0, sizeof(Tile::bytes));
  }

  template <std::size_t Number>
  void load(const std::int8_t* rows, std::size_t stride) {
    Tile& tile = configured(Number);
    for (std::size_t row = 0; row < tile.rows; ++row) {
      std::memcpy(tile.bytes[row], rows + row * stride, tile.row_bytes);
    }
  }

  // Adds left [rows, depth] times right [depth / 4, 16 columns, 4], both int8, to int32 [rows, 16 columns].
  template <std::size_t Sum, std::size_t Left, std::size_t Right>
  void multiply() {
    Tile &sum = configured(Sum), &left = configured(Left), &right = configured(Right);
    check(sum.rows == left.rows && right.rows == left.row_bytes / 4,
          "tiles of these rows cannot be multiplied");
    for (std::size_t row = 0; row < sum.rows; ++row) {
      std::int32_t sums[16];
      std::memcpy(sums, sum.bytes[row], sizeof(sums));
      for (std::size_t k = 0; k < left.row_bytes; ++k) {
        for (std::size_t column = 0; column < 16; ++column) {
          sums[column] += left.bytes[row][k] * right.bytes[k / 4][column * 4 + k % 4];
        }
      }
      std::memcpy(sum.bytes[row], sums, sizeof(sums));
    }
  }

  template <std::size_t Number>
  void store(std::int32_t* sums, std::size_t stride) {
    const Tile& tile = configured(Number);
    for (std::size_t row = 0; row < tile.rows; ++row) {
      std::memcpy(reinterpret_cast<std::byte*>(sums) + row * stride, tile.bytes[row], 64);
    }
  }

  void prefetch(const void*) {}

 private:
  struct Tile {
    std::size_t rows = 0, row_bytes = 64;
    std::int8_t bytes[16][64] = {};
  };

  Tile& configured(std::size_t number) {
    check(tiles_[number].rows > 0, "a tile is used before it is configured");
    return tiles_[number];
  }

  Tile tiles_[8];
};

}  // namespace chunkrt::testing
