// Compares unpack on every instruction set with its formula, in buffers that detect out-of-bounds accesses.
#include <vector>

#include "kernels/dispatch.h"
#include "tests/guarded_buffer.h"
#include "tests/random.h"
#include "tests/tests.h"

namespace chunkrt::testing {
namespace {

void check_unpack(UnpackFunction* function, std::size_t depth, std::size_t blocks) {
  const std::size_t depth_blocks = (depth + 31) / 32, groups = (depth + 3) / 4, columns = blocks * 16;
  Random random(static_cast<std::uint32_t>(depth + blocks));
  const std::vector<std::int8_t> drawn = random.int8s(depth_blocks * 32 * columns);
  std::vector<std::uint8_t> packed(blocks * depth_blocks * kUnpackBlockBytes);
  std::vector<std::uint8_t> multipliers(blocks * depth_blocks * 16);
  for (std::size_t i = 0; i < multipliers.size(); ++i) {
    multipliers[i] = static_cast<std::uint8_t>((drawn[i] >> 4 & 15) + 1);
  }
  std::vector<std::int8_t> expected(columns * groups * 4);
  for (std::size_t k = 0; k < depth_blocks * 32; ++k) {
    for (std::size_t n = 0; n < columns; ++n) {
      const int q = drawn[k * columns + n] & 15;
      const std::size_t block = n / 16 * depth_blocks + k / 32;
      std::uint8_t& byte = packed[((block * 4 + k % 32 / 8) * 16 + n % 16) * 4 + k % 4];
      byte = static_cast<std::uint8_t>(byte | (k % 8 < 4 ? q : q << 4));
      if (k / 4 >= groups) continue;
      expected[((n / 16 * groups + k / 4) * 16 + n % 16) * 4 + k % 4] =
          static_cast<std::int8_t>((q - 8) * multipliers[block * 16 + n % 16]);
    }
  }
  const GuardedBuffer<std::uint8_t> guarded_packed(packed), guarded_multipliers(multipliers);
  for (std::size_t begin = 0; begin < blocks; ++begin) {
    for (std::size_t end = begin + 1; end <= blocks; ++end) {
      const GuardedBuffer<std::int8_t> out((end - begin) * groups * 64);
      function({.packed = guarded_packed.data(),
                .multipliers = guarded_multipliers.data(),
                .out = out.data(),
                .groups = groups},
               begin, end);
      const std::vector<std::int8_t> found = out.copy();
      for (std::size_t i = 0; i < found.size(); ++i) {
        const int wanted = expected[begin * groups * 64 + i];
        check(found[i] == wanted, [&] {
          return "depth " + std::to_string(depth) + ", blocks " + std::to_string(begin) + " to " +
                 std::to_string(end) + ": byte " + std::to_string(i) + " is " + std::to_string(found[i]) +
                 ", expected " + std::to_string(wanted);
        });
      }
    }
  }
}

}  // namespace

void test_unpack(Suite& suite) {
  suite.run_rows(unpack_s8col_u4block, "the products of q and multipliers", [](UnpackFunction* function) {
    for (const std::size_t depth : {1u, 4u, 5u, 28u, 31u, 32u, 33u, 48u, 64u, 70u, 160u}) {
      for (const std::size_t blocks : {1u, 2u, 3u}) check_unpack(function, depth, blocks);
    }
  });
}

}  // namespace chunkrt::testing
