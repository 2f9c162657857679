// An int8 cache: conversion of a row of head_dim values to and from it (attention.h).
#pragma once

#include <cstddef>

#include "kernels/quantize/quantize.h"

namespace chunkrt {

// Rounds a row's groups, and writes the integers and then the scales to `row`. `scratch`: head_dim floats and
// 3 more.
void store_int8(const float* values, std::size_t head_dim, QuantizeFunction* quantize, std::byte* row,
                float* scratch);

// Reads a row, [head_dim], and adds `bias` unless that is nullptr.
using DequantizeFunction = void(const std::byte* row, std::size_t head_dim, const float* bias, float* out);

}  // namespace chunkrt
