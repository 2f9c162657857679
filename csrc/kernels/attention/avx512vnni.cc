// attention with AVX-512. In bfloat16 it also provides the operations around the products of amx_bf16.cc and
// avx512bf16.cc.
#include "kernels/attention/byte_quads_avx512.h"
#include "kernels/attention/pack_bytes.h"
#include "kernels/attention/pair_products.h"
#include "kernels/attention/tiles.h"
#include "kernels/attention/weigh_rows.h"

namespace chunkrt {

TileOperations tile_operations_avx512vnni() {
  TileOperations operations = tile_operations_avx2();  // packs blocks of the other caches
  operations.rope = rope;
  operations.widen = widen_f32_f16_avx512vnni;
  operations.dequantize = dequantize;
  operations.round = round_to_bfloat;
  operations.pack_bytes = pack_bytes;
  operations.weigh = weigh_rows;
  return operations;
}

void attend_f32_bf16_cache_avx512vnni(const AttentionArgs& args, std::size_t begin, std::size_t end,
                                      float* scratch) {
  static const TileOperations operations = tile_operations_avx512vnni();
  attend_in_bfloat<PairProducts<FusedPairs>>(args, begin, end, scratch, operations);
}

void attend_f32_s8_bf16_cache_avx512vnni(const AttentionArgs& args, std::size_t begin, std::size_t end,
                                         float* scratch) {
  static const TileOperations operations = tile_operations_avx512vnni();
  attend_in_bfloat<PairProducts<FusedPairs, ByteQuads>>(args, begin, end, scratch, operations);
}

}  // namespace chunkrt
