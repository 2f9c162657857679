#include "tests/tile_traps.h"

#include <immintrin.h>
#include <signal.h>
#include <ucontext.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/isa.h"

namespace chunkrt::testing {
namespace {

// Content of TILECONFIG and TILEDATA; Intel's manual, volume 1, chapter 18.
struct Tiles {
  bool is_configured = false;
  std::uint16_t row_bytes[8];
  std::uint8_t rows[8];
  std::uint8_t data[8][16][64];
};

constexpr std::size_t kColumns = 16;  // columns of 4 bytes in a tile

Tiles tiles;
struct sigaction before;

// In the order of an instruction's register numbers.
constexpr int kRegisters[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                              REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

// The fields of an instruction with a three-byte VEX prefix that tile instructions use.
struct Decoded {
  unsigned map, prefix, vector, opcode;
  bool is_w;
  bool is_memory;
  unsigned reg, rm;       // fields of ModRM; rm only without memory
  std::uint64_t address;  // base and displacement; and the index, unless it is a stride
  std::uint64_t stride;
  std::size_t length;
};

Decoded decode(const std::uint8_t* code, const greg_t* registers) {
  Decoded decoded = {};
  const auto value = [&](unsigned number) {
    return static_cast<std::uint64_t>(registers[kRegisters[number]]);
  };
  if (code[0] != 0xc4) return decoded;
  const unsigned high_reg = code[1] & 0x80 ? 0 : 8, high_index = code[1] & 0x40 ? 0 : 8;
  const unsigned high_base = code[1] & 0x20 ? 0 : 8;
  decoded.map = code[1] & 0x1f;
  decoded.is_w = (code[2] & 0x80) != 0;
  decoded.vector = ~(code[2] >> 3) & 15u;
  decoded.prefix = code[2] & 3;
  const bool is_long = (code[2] & 4) != 0;
  decoded.opcode = code[3];
  const unsigned modrm = code[4], mode = modrm >> 6, rm = modrm & 7;
  decoded.reg = (modrm >> 3 & 7) + high_reg;
  decoded.length = 5;
  if (is_long) decoded.map = 0;  // not a tile instruction
  if (mode == 3) {
    decoded.rm = rm + high_base;
    return decoded;
  }
  decoded.is_memory = true;
  const std::uint8_t* rest = code + 5;
  if (rm == 4) {
    const unsigned sib = *rest++, index = (sib >> 3 & 7) + high_index, base = sib & 7;
    if (index != 4) decoded.stride = value(index) << (sib >> 6);
    if (base != 5 || mode != 0) decoded.address = value(base + high_base);
    if (base == 5 && mode == 0) {
      std::int32_t displacement;
      std::memcpy(&displacement, rest, 4);
      decoded.address = static_cast<std::uint64_t>(std::int64_t{displacement});
      rest += 4;
    }
  } else if (rm == 5 && mode == 0) {  // relative to the next instruction
    std::int32_t displacement;
    std::memcpy(&displacement, rest, 4);
    rest += 4;
    decoded.address =
        reinterpret_cast<std::uint64_t>(rest) + static_cast<std::uint64_t>(std::int64_t{displacement});
  } else {
    decoded.address = value(rm + high_base);
  }
  if (mode == 1) {
    decoded.address += static_cast<std::uint64_t>(std::int64_t{static_cast<std::int8_t>(*rest)});
    rest += 1;
  } else if (mode == 2) {
    std::int32_t displacement;
    std::memcpy(&displacement, rest, 4);
    decoded.address += static_cast<std::uint64_t>(std::int64_t{displacement});
    rest += 4;
  }
  decoded.length = static_cast<std::size_t>(rest - code);
  return decoded;
}

bool is_usable(unsigned tile) { return tiles.is_configured && tile < 8 && tiles.rows[tile] > 0; }

bool configure(const std::uint8_t* memory) {
  if (memory[0] != 1 || memory[1] != 0) return false;  // palette 1, from the first row on
  for (std::size_t i = 2; i < 16; ++i) {
    if (memory[i] != 0) return false;
  }
  std::uint16_t row_bytes[16];
  std::memcpy(row_bytes, memory + 16, sizeof(row_bytes));
  for (std::size_t tile = 0; tile < 16; ++tile) {
    const std::uint8_t rows = memory[48 + tile];
    if (row_bytes[tile] > 64 || rows > 16 || (rows == 0) != (row_bytes[tile] == 0)) return false;
    if (tile >= 8 && rows != 0) return false;
    if (tile < 8) tiles.row_bytes[tile] = row_bytes[tile], tiles.rows[tile] = rows;
  }
  std::memset(tiles.data, 0, sizeof(tiles.data));
  tiles.is_configured = true;
  return true;
}

bool load(unsigned tile, std::uint64_t address, std::uint64_t stride) {
  if (!is_usable(tile)) return false;
  std::memset(tiles.data[tile], 0, sizeof(tiles.data[tile]));
  for (std::size_t row = 0; row < tiles.rows[tile]; ++row) {
    std::memcpy(tiles.data[tile][row], reinterpret_cast<const void*>(address + row * stride),
                tiles.row_bytes[tile]);
  }
  return true;
}

bool store(unsigned tile, std::uint64_t address, std::uint64_t stride) {
  if (!is_usable(tile)) return false;
  for (std::size_t row = 0; row < tiles.rows[tile]; ++row) {
    std::memcpy(reinterpret_cast<void*>(address + row * stride), tiles.data[tile][row],
                tiles.row_bytes[tile]);
  }
  return true;
}

// Returns true if a product of these tiles is defined.
bool are_operands(unsigned sum, unsigned left, unsigned right) {
  if (sum == left || sum == right || left == right) return false;
  if (!is_usable(sum) || !is_usable(left) || !is_usable(right)) return false;
  return tiles.rows[sum] == tiles.rows[left] && tiles.rows[right] == tiles.row_bytes[left] / 4u &&
         tiles.row_bytes[right] == tiles.row_bytes[sum];
}

// TDPBSSD.
bool multiply(unsigned sum, unsigned left, unsigned right) {
  if (!are_operands(sum, left, right)) return false;
  const std::size_t depth = tiles.row_bytes[left] / 4u;
  for (std::size_t row = 0; row < tiles.rows[sum]; ++row) {
    std::int32_t totals[kColumns];
    std::memcpy(totals, tiles.data[sum][row], sizeof(totals));
    for (std::size_t k = 0; k < depth * 4; ++k) {
      const auto value = static_cast<std::int8_t>(tiles.data[left][row][k]);
      const std::uint8_t* const others = tiles.data[right][k / 4] + k % 4;
      for (std::size_t column = 0; column < kColumns; ++column) {
        totals[column] += value * static_cast<std::int8_t>(others[column * 4]);
      }
    }
    std::memcpy(tiles.data[sum][row], totals, tiles.row_bytes[sum]);
  }
  return true;
}

float upper_half(std::uint32_t bits) { return std::bit_cast<float>(bits & 0xffff0000u); }
float lower_half(std::uint32_t bits) { return std::bit_cast<float>(bits << 16); }

// TDPBF16PS: the first elements of all pairs and the second ones are summed separately, then these two sums,
// then the old value. Magnitudes below 2^-126 become 0, before and after each operation.
[[gnu::target("avx2,fma")]] bool multiply_bfloats(unsigned sum, unsigned left, unsigned right) {
  if (!are_operands(sum, left, right)) return false;
  constexpr unsigned kFlushed = _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON;
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(mode | kFlushed);
  const std::size_t depth = tiles.row_bytes[left] / 4u;
  for (std::size_t row = 0; row < tiles.rows[sum]; ++row) {
    float firsts[kColumns] = {}, seconds[kColumns] = {}, totals[kColumns];
    for (std::size_t k = 0; k < depth; ++k) {
      std::uint32_t pair, others[kColumns];
      std::memcpy(&pair, &tiles.data[left][row][k * 4], sizeof(pair));
      std::memcpy(others, tiles.data[right][k], sizeof(others));
      const float first = lower_half(pair), second = upper_half(pair);
      for (std::size_t column = 0; column < kColumns; ++column) {
        firsts[column] = std::fma(first, lower_half(others[column]), firsts[column]);
        seconds[column] = std::fma(second, upper_half(others[column]), seconds[column]);
      }
    }
    std::memcpy(totals, tiles.data[sum][row], sizeof(totals));
    for (std::size_t column = 0; column < kColumns; ++column) {
      totals[column] += firsts[column] + seconds[column];
    }
    std::memcpy(tiles.data[sum][row], totals, tiles.row_bytes[sum]);
  }
  _mm_setcsr(mode);
  return true;
}

// Emulates the instruction; returns false if it is not a tile instruction, or is one that a processor
// refuses.
bool run(const Decoded& decoded) {
  constexpr unsigned kNone = 0, k66 = 1, kF3 = 2, kF2 = 3;
  if (decoded.map != 2 || decoded.is_w) return false;
  switch (decoded.opcode) {
    case 0x49:
      if (decoded.prefix == kNone && decoded.is_memory) {
        return configure(reinterpret_cast<const std::uint8_t*>(decoded.address + decoded.stride));
      }
      if (decoded.prefix == kNone) return tiles.is_configured = false, true;  // TILERELEASE
      if (decoded.prefix != kF2 || decoded.is_memory || !is_usable(decoded.reg)) return false;
      std::memset(tiles.data[decoded.reg], 0, sizeof(tiles.data[0]));
      return true;
    case 0x4b:
      if (!decoded.is_memory) return false;
      if (decoded.prefix == kF3) return store(decoded.reg, decoded.address, decoded.stride);
      return (decoded.prefix == kF2 || decoded.prefix == k66) &&
             load(decoded.reg, decoded.address, decoded.stride);
    case 0x5e:
      return decoded.prefix == kF2 && !decoded.is_memory && multiply(decoded.reg, decoded.rm, decoded.vector);
    case 0x5c:
      return decoded.prefix == kF3 && !decoded.is_memory &&
             multiply_bfloats(decoded.reg, decoded.rm, decoded.vector);
    default:
      return false;
  }
}

// Emulates one tile instruction and those right after it, because a signal takes longer than any of them.
void handle(int, siginfo_t*, void* context) {
  greg_t* const registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  std::size_t num_run = 0;
  while (true) {
    const auto* const code = reinterpret_cast<const std::uint8_t*>(registers[REG_RIP]);
    const Decoded decoded = decode(code, registers);
    if (!run(decoded)) break;
    registers[REG_RIP] += static_cast<greg_t>(decoded.length);
    ++num_run;
  }
  if (num_run == 0) sigaction(SIGILL, &before, nullptr);  // a retry of the instruction, with its signal
}

}  // namespace

TileTraps::TileTraps() {
  if (is_supported(Isa::amx_bf16)) return;
  tiles = {};
  struct sigaction action = {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, &before);
}

TileTraps::~TileTraps() {
  if (!is_supported(Isa::amx_bf16)) sigaction(SIGILL, &before, nullptr);
}

}  // namespace chunkrt::testing
