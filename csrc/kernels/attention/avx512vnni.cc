// attention with AVX-512. In bfloat16 it provides the operations around the tile products of amx_bf16.cc.
#include "kernels/attention/weigh_rows.h"

namespace chunkrt {

TileOperations tile_operations_avx512vnni() {
  TileOperations operations = tile_operations_avx2();  // packs blocks of the other caches
  operations.rope = rope;
  operations.widen = widen_f32_f16_avx512vnni;
  operations.dequantize = dequantize;
  operations.round = round_to_bfloat;
  operations.weigh = weigh_rows;
  return operations;
}

}  // namespace chunkrt
