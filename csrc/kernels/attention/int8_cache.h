// An int8 cache: conversion of a row of head_dim values to and from it (attention.h).
#pragma once

#include <cstddef>

#include "kernels/quantize/quantize.h"

namespace chunkrt {

// Quantises the groups of a row, and writes the integers and then the scales to `row`. `scratch` has room for
// head_dim + 3 floats.
void store_int8(const float* values, std::size_t head_dim, QuantizeFunction* quantize, std::byte* row,
                float* scratch);

// Reads a row of head_dim values, and adds `bias` unless it is nullptr.
using DequantizeFunction = void(const std::byte* row, std::size_t head_dim, const float* bias, float* out);

}  // namespace chunkrt
