// norm with vectors. One file for each instruction set includes this header.
#pragma once

#include "kernels/lanes/lanes.h"
#include "kernels/norm/norm.h"

namespace chunkrt {
namespace {

void norm_row(const RmsNormArgs& args, std::size_t row) {
  const float* input = args.input + row * args.width;
  float* out = args.out + row * args.width;
  Floats squares = all(0.0f);
  for (std::size_t i = 0; i < args.width; i += kLanes) {
    const Floats x = load(input + i, args.width - i);
    squares = squares + x * x;
  }
  const float mean = sum(squares) / static_cast<float>(args.width);
  const Floats inverse = all(1.0f / square_root(mean + args.epsilon));
  for (std::size_t i = 0; i < args.width; i += kLanes) {
    const std::size_t count = args.width - i;
    store(out + i, load(input + i, count) * inverse * load(args.weight + i, count), count);
  }
}

}  // namespace

void CHUNKRT_NAME(rms_norm_f32_f32)(const RmsNormArgs& args, std::size_t row_begin, std::size_t row_end) {
  for (std::size_t row = row_begin; row < row_end; ++row) norm_row(args, row);
}

}  // namespace chunkrt
