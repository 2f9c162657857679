// The first lanes of vectors of halves and bytes, by way of a buffer, for instruction sets without masks for
// such elements.
#pragma once

namespace chunkrt {
namespace {

CHUNKRT_LANES Floats load_halves(const std::uint16_t* from, Rest rest) {
  std::uint16_t buffer[16] = {};
  for (std::size_t i = 0; i < rest.count(); ++i) buffer[i] = from[i];
  return load_halves(buffer);
}
CHUNKRT_LANES Floats load_bytes(const std::int8_t* from, Rest rest) {
  std::int8_t buffer[16] = {};
  for (std::size_t i = 0; i < rest.count(); ++i) buffer[i] = from[i];
  return load_bytes(buffer);
}
CHUNKRT_LANES void store_halves(std::uint16_t* to, Floats x, Rest rest) {
  std::uint16_t buffer[16];
  store_halves(buffer, x);
  for (std::size_t i = 0; i < rest.count(); ++i) to[i] = buffer[i];
}
CHUNKRT_LANES void store_bytes(std::int8_t* to, Ints x, Rest rest) {
  std::int8_t buffer[16];
  store_bytes(buffer, x);
  for (std::size_t i = 0; i < rest.count(); ++i) to[i] = buffer[i];
}

}  // namespace
}  // namespace chunkrt
