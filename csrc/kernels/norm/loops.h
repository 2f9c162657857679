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

// x - mean, and 0 after the first `count` lanes.
CHUNKRT_LANES Floats centred(const float* input, std::size_t count, Floats mean) {
  if (count >= kLanes) return load(input) - mean;
  return keep(lanes_between(0, static_cast<int>(count)), load(input, count) - mean);
}

void layer_norm_row(const LayerNormArgs& args, std::size_t row) {
  const float* input = args.input + row * args.width;
  float* out = args.out + row * args.width;
  const auto width = static_cast<float>(args.width);
  Floats values = all(0.0f), squares = all(0.0f);
  for (std::size_t i = 0; i < args.width; i += kLanes) values = values + load(input + i, args.width - i);
  const Floats mean = all(sum(values) / width);
  for (std::size_t i = 0; i < args.width; i += kLanes) {
    const Floats d = centred(input + i, args.width - i, mean);
    squares = squares + d * d;
  }
  const Floats inverse = all(1.0f / square_root(sum(squares) / width + args.epsilon));
  for (std::size_t i = 0; i < args.width; i += kLanes) {
    const std::size_t count = args.width - i;
    const Floats scaled = (load(input + i, count) - mean) * inverse * load(args.weight + i, count);
    store(out + i, scaled + load(args.bias + i, count), count);
  }
}

}  // namespace

void CHUNKRT_NAME(layer_norm_f32_f32)(const LayerNormArgs& args, std::size_t row_begin, std::size_t row_end) {
  for (std::size_t row = row_begin; row < row_end; ++row) layer_norm_row(args, row);
}

void CHUNKRT_NAME(rms_norm_f32_f32)(const RmsNormArgs& args, std::size_t row_begin, std::size_t row_end) {
  for (std::size_t row = row_begin; row < row_end; ++row) norm_row(args, row);
}

}  // namespace chunkrt
