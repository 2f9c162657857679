// The first lanes of vectors of halves and bytes, by way of a buffer, for instruction sets without masks for
// such elements.
#pragma once

namespace chunkrt {
namespace {

// Copies up to 16 elements without a call.
template <typename Element>
CHUNKRT_LANES void copy(Element* to, const Element* from, std::size_t count) {
  std::size_t i = 0;
  if (count & 16) std::memcpy(to, from, 16 * sizeof(Element)), i = 16;
  if (count & 8) std::memcpy(to + i, from + i, 8 * sizeof(Element)), i += 8;
  if (count & 4) std::memcpy(to + i, from + i, 4 * sizeof(Element)), i += 4;
  if (count & 2) std::memcpy(to + i, from + i, 2 * sizeof(Element)), i += 2;
  if (count & 1) to[i] = from[i];
}

CHUNKRT_LANES Floats load_halves(const std::uint16_t* from, Rest rest) {
  std::uint16_t buffer[16] = {};
  copy(buffer, from, rest.count());
  return load_halves(buffer);
}
CHUNKRT_LANES Floats load_bytes(const std::int8_t* from, Rest rest) {
  std::int8_t buffer[16] = {};
  copy(buffer, from, rest.count());
  return load_bytes(buffer);
}
CHUNKRT_LANES void store_halves(std::uint16_t* to, Floats x, Rest rest) {
  std::uint16_t buffer[16];
  store_halves(buffer, x);
  copy(to, buffer, rest.count());
}
CHUNKRT_LANES void store_bytes(std::int8_t* to, Ints x, Rest rest) {
  std::int8_t buffer[16];
  store_bytes(buffer, x);
  copy(to, buffer, rest.count());
}

}  // namespace
}  // namespace chunkrt
