#include "program/value.h"

#include <stdexcept>
#include <utility>

namespace chunkrt {
namespace {

struct DtypeRow {
  Dtype dtype;
  std::string_view name;
  std::size_t bytes;
};

constexpr std::array kDtypes = {
    DtypeRow{Dtype::float32, "float32", 4}, DtypeRow{Dtype::float16, "float16", 2},
    DtypeRow{Dtype::int64, "int64", 8},     DtypeRow{Dtype::int32, "int32", 4},
    DtypeRow{Dtype::int8, "int8", 1},       DtypeRow{Dtype::uint8, "uint8", 1},
    DtypeRow{Dtype::uint16, "uint16", 2},
};

constexpr std::array<std::string_view, kAllSymbols.size()> kSymbolNames = {"T", "R", "P", "W"};

}  // namespace

std::size_t bytes_of(Dtype dtype) { return kDtypes[static_cast<std::size_t>(dtype)].bytes; }

std::string_view name_of(Dtype dtype) { return kDtypes[static_cast<std::size_t>(dtype)].name; }

Dtype dtype_named(std::string_view name) {
  for (const DtypeRow& row : kDtypes) {
    if (row.name == name) return row.dtype;
  }
  throw std::invalid_argument("a program cannot use values of type " + std::string(name) +
                              "; expected float32, float16, int64, int32, int8, uint8 or uint16");
}

std::string_view name_of(Symbol symbol) { return kSymbolNames[static_cast<std::size_t>(symbol)]; }

Symbol symbol_named(std::string_view name) {
  for (const Symbol symbol : kAllSymbols) {
    if (name_of(symbol) == name) return symbol;
  }
  throw std::invalid_argument("unknown dimension '" + std::string(name) + "'; expected a size, T, R, P or W");
}

std::string describe(Dtype dtype, const Shape& shape) {
  std::string text = std::string(name_of(dtype)) + " [";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += shape[i].symbol ? std::string(name_of(*shape[i].symbol)) : std::to_string(shape[i].size);
  }
  return text + "]";
}

}  // namespace chunkrt
