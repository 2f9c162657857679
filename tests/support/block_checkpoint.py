"""A random checkpoint that stores some tensors in blocks of 4 bits."""

from chunkrt.checkpoints.source import TensorInfo
from chunkrt.graph.decoders import build_decoder
from chunkrt.graph.ops import trace
from chunkrt.graph.partition import Planned, partition
from chunkrt.quant.arithmetic import quantize_to_blocks
from chunkrt.testing.random_decoders import CONFIG_IN_BLOCKS, RandomCheckpoint


class BlockCheckpoint(RandomCheckpoint):
    """Random checkpoint with some tensors in Q4_1; other tensors can declare another type."""

    def __init__(self, types, config=CONFIG_IN_BLOCKS):
        super().__init__(config)
        self.types = types

    def info(self, name):
        return TensorInfo(shape=super().info(name).shape, stored_as=self.types.get(name, "F32"))

    def read_blocks(self, name):
        is_in_blocks = self.info(name).stored_as in ("Q4_0", "Q4_1")
        return quantize_to_blocks(super().read(name).T) if is_in_blocks else None

    def read(self, name):
        blocks = self.read_blocks(name)
        return blocks.dequantise() if blocks else super().read(name)

    def planned(self):
        decoder = build_decoder(self)
        return Planned(source=self, decoder=decoder, plan=partition(trace(decoder), family="llama"))
