// The values of a program: typed tensors whose sizes are fixed or given by a symbol.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace chunkrt {

enum class Dtype { float32, float16, int64, int32, int8, uint8, uint16 };

std::size_t bytes_of(Dtype dtype);
std::string_view name_of(Dtype dtype);
// Throws std::invalid_argument for an unknown type.
Dtype dtype_named(std::string_view name);

// T: number of tokens of the chunk. R: number of rows of logits. P: capacity of the cache in positions. W:
// number of slots of a cache that is a ring buffer.
enum class Symbol { T, R, P, W };
inline constexpr std::array kAllSymbols = {Symbol::T, Symbol::R, Symbol::P, Symbol::W};

std::string_view name_of(Symbol symbol);
Symbol symbol_named(std::string_view name);

struct Dimension {
  std::optional<Symbol> symbol;
  std::size_t size = 0;  // if it is not a symbol

  friend bool operator==(const Dimension&, const Dimension&) = default;
};

inline Dimension fixed(std::size_t size) { return {.symbol = {}, .size = size}; }
inline Dimension rows_dimension(Symbol symbol) { return {.symbol = symbol, .size = 0}; }
inline bool counts_rows(const Dimension& dimension) {
  return dimension.symbol == Symbol::T || dimension.symbol == Symbol::R;
}

using Shape = std::vector<Dimension>;

// The values of the symbols in one run, as far as the tensors of the run determine them.
using Sizes = std::array<std::optional<std::size_t>, kAllSymbols.size()>;

// Returns a readable form, such as "float32 [T, 576]".
std::string describe(Dtype dtype, const Shape& shape);

// A caller's tensor, described by a binding.
struct TensorView {
  void* data;
  std::string dtype;  // may be the name of an unsupported type
  std::vector<std::size_t> shape;
  bool is_contiguous;  // row-major, aligned and in native byte order
  bool is_writeable;
};

using ValueId = std::size_t;

enum class ValueKind { input, state, output, constant, temporary };

struct Value {
  ValueKind kind;
  std::string name = {};  // for inputs, states and outputs
  Dtype dtype;            // a cache may have other types: see builder.h
  Shape shape;
  // The index among the operands of a segment, for a state or an input without rows.
  std::optional<std::size_t> segment_place = {};
  std::size_t bytes_of_row = 0;  // in the chunk, T; 0 if the first dimension is another
  bool is_cache = false;         // a state of keys or values
  bool may_be_tiled = false;     // a cache that may be bfloat16, as uint16
  bool is_row_local = false;     // a temporary of which only the rows in work are stored
  // For a constant.
  const void* data = nullptr;
  std::shared_ptr<const void> owner = {};
  // For a temporary: the range of loops from its first write to its last read, and its offset in the arena.
  std::size_t first_loop = 0;
  std::size_t last_loop = 0;
  std::size_t arena_offset = 0;
};

}  // namespace chunkrt
