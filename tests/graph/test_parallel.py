"""Linears over ranks: the shares of all ranks form the complete linear, in floats and in blocks; and invalid shares."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkrt.checkpoints.source import BLOCK_DEPTH, BlockTensor, TensorInfo
from chunkrt.errors import ConfigError, ModelError
from chunkrt.graph import ops
from chunkrt.graph.modules import Embedding, Module, Share
from chunkrt.graph.ops import trace
from chunkrt.graph.parallel import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    share_heads,
)
from chunkrt.graph.partition import partition
from chunkrt.graph.plan import ALONE, Ranks

SIZES = st.sampled_from([1, 2, 4])
FACTORS = st.integers(1, 9)
SEEDS = st.integers(0, 99)


class Tensors:
    """A checkpoint of whole numbers, so that sums are exact; [N, K] in blocks of 4 bits on request."""

    path = Path("made up")
    architecture = "made up"

    def __init__(self, seed=0, **shapes):
        rng = np.random.default_rng(seed)
        self.config = {}
        self.tensors = {name: rng.integers(-9, 10, shape).astype(np.float32) for name, shape in shapes.items()}
        self.blocks = {name: blocks(rng, *shape) for name, shape in shapes.items() if len(shape) == 2}

    def names(self):
        return list(self.tensors)

    def info(self, name):
        if name not in self.tensors:
            raise ModelError(f"there is no tensor {name}")
        return TensorInfo(shape=self.tensors[name].shape, stored_as="F32")

    def read(self, name):
        return self.tensors[name]

    def read_blocks(self, name):
        return self.blocks[name]


def blocks(rng, columns, depth):
    if depth % BLOCK_DEPTH:
        return None
    scales, minima = (rng.integers(-9, 10, (columns, depth // BLOCK_DEPTH)).astype(np.float16) for _ in range(2))
    return BlockTensor(integers=rng.integers(0, 16, (columns, depth), np.uint8), scales=scales, minima=minima)


def named(linear, name="linear"):
    """Add the linear as a module "block.linear" to a decoder, which names it."""
    block, root = Module(), Module()
    setattr(block, name, linear)
    root.block = block
    root.named()
    return linear


def on_ranks(size, make):
    return [named(make(Ranks(rank, size))) for rank in range(size)]


def weights(linears, source):
    return [linear.weight.load(source) for linear in linears]


def in_blocks(linears, source):
    """Return the same shares as `weights`, [K, N], from blocks."""
    found = [linear.weight.load_blocks(source) for linear in linears]
    assert all(linear.weight.keeps_blocks for linear in linears)
    return [blocks.dequantise().T for blocks in found]


def outputs_of(shares, widths, size):
    """Rebuild every output from the shares [.., columns] of all ranks, cut into the outputs' slices."""
    cuts = np.cumsum([width // size for width in widths])[:-1]
    parts = [np.split(share, cuts, axis=-1) for share in shares]
    return np.concatenate([np.concatenate(part, axis=-1) for part in zip(*parts, strict=True)], axis=-1)


@given(SIZES, FACTORS, FACTORS, SEEDS)
def test_columns_of_all_ranks_form_the_dense_linear(size, depth, columns, seed):
    depth, columns = BLOCK_DEPTH * depth, size * columns
    source = Tensors(seed, **{"block.linear.weight": (columns, depth), "block.linear.bias": (columns,)})
    dense = source.read("block.linear.weight").T
    linears = on_ranks(size, lambda ranks: ColumnParallelLinear(depth, columns, ranks, bias=True))
    np.testing.assert_array_equal(np.concatenate(weights(linears, source), axis=1), dense)
    biases = np.concatenate([linear.bias.load(source) for linear in linears])
    np.testing.assert_array_equal(biases, source.read("block.linear.bias"))
    whole = source.read_blocks("block.linear.weight").dequantise().T
    np.testing.assert_array_equal(np.concatenate(in_blocks(linears, source), axis=1), whole)


@given(SIZES, FACTORS, st.lists(FACTORS, min_size=1, max_size=4), st.booleans(), SEEDS)
def test_every_output_of_a_merged_linear_is_cut_separately(size, depth, widths, is_stored_whole, seed):
    depth, outputs = BLOCK_DEPTH * depth, {f"part{i}": size * width for i, width in enumerate(widths)}
    stored = {"all": sum(outputs.values())} if is_stored_whole else outputs
    source = Tensors(
        seed,
        **{f"block.{name}.weight": (width, depth) for name, width in stored.items()},
        **{f"block.{name}.bias": (width,) for name, width in stored.items()},
    )

    def make(ranks):
        return MergedColumnParallelLinear(depth, outputs, ranks, bias=True, stored_in="all" if is_stored_whole else "")

    linears = on_ranks(size, make)
    assert set(linears[0].weight.checkpoint_tensors) == {f"block.{name}.weight" for name in stored}

    def whole(read):
        return np.concatenate([read(f"block.{name}") for name in stored])

    found = outputs_of(weights(linears, source), outputs.values(), size)
    np.testing.assert_array_equal(found, whole(lambda name: source.read(f"{name}.weight")).T)
    found = outputs_of([linear.bias.load(source) for linear in linears], outputs.values(), size)
    np.testing.assert_array_equal(found, whole(lambda name: source.read(f"{name}.bias")))
    found = outputs_of(in_blocks(linears, source), outputs.values(), size)
    np.testing.assert_array_equal(found, whole(lambda name: source.read_blocks(f"{name}.weight").dequantise()).T)


@given(SIZES, FACTORS, FACTORS, SEEDS)
def test_products_of_row_shares_sum_to_the_dense_one(size, depth, columns, seed):
    depth *= size * BLOCK_DEPTH
    source = Tensors(seed, **{"block.linear.weight": (columns, depth)})
    linears = on_ranks(size, lambda ranks: RowParallelLinear(depth, columns, ranks))
    inputs = np.random.default_rng(seed).integers(-9, 10, (3, depth)).astype(np.float32)
    shares = np.split(inputs, size, axis=1)
    products = [share @ weight for share, weight in zip(shares, weights(linears, source), strict=True)]
    np.testing.assert_array_equal(sum(products), inputs @ source.read("block.linear.weight").T)
    whole = source.read_blocks("block.linear.weight").dequantise().T
    np.testing.assert_array_equal(np.concatenate(in_blocks(linears, source)), whole)


@given(SIZES, FACTORS, FACTORS, SEEDS)
def test_replicated_linear_is_complete_on_every_rank(size, depth, columns, seed):
    depth *= BLOCK_DEPTH
    source = Tensors(seed, **{"block.linear.weight": (columns, depth)})
    rows = np.random.default_rng(seed).permutation(columns)
    for linear in on_ranks(size, lambda ranks: ReplicatedLinear(depth, columns, rows=rows)):
        np.testing.assert_array_equal(linear.weight.load(source), source.read("block.linear.weight")[rows].T)
        whole = source.read_blocks("block.linear.weight").dequantise()[rows]
        np.testing.assert_array_equal(linear.weight.load_blocks(source).dequantise(), whole)


@given(SIZES, st.integers(1, 6), st.integers(1, 6), st.sampled_from([2, 10, 32]), st.booleans(), SEEDS)
def test_every_query_head_is_on_one_rank_with_its_key_head(size, groups, group, dim, is_stored_whole, seed):
    """No head of the projections is lost, duplicated or paired with another's key."""
    num_heads, hidden = groups * group, BLOCK_DEPTH
    widths = {"q_proj": num_heads * dim, "k_proj": groups * dim, "v_proj": groups * dim}
    stored = {"qkv_proj": sum(widths.values())} if is_stored_whole else widths
    shapes = {f"block.{name}.weight": (width, hidden) for name, width in stored.items()}
    biases = {f"block.{name}.bias": (width,) for name, width in stored.items()}
    source = Tensors(seed, **shapes, **biases, **{"block.linear.weight": (hidden, num_heads * dim)})
    rows = np.concatenate([source.read(name) for name in shapes])
    q, k, v = (part.reshape(-1, dim, hidden) for part in np.split(rows, np.cumsum(list(widths.values()))[:-1]))
    output = source.read("block.linear.weight").T.reshape(num_heads, dim, hidden)

    heads = [share_heads(num_heads, groups, dim, Ranks(rank, size)) for rank in range(size)]
    assert len({(share.num_heads, share.num_kv_heads) for share in heads}) == 1
    seen = []
    for rank, share in enumerate(heads):
        qkv = named(QKVParallelLinear(hidden, share, bias=True, stored_in="qkv_proj" if is_stored_whole else ""))
        o_proj = named(RowParallelLinear(num_heads * dim, hidden, Ranks(rank, size), depth=share.q_columns))
        local = qkv.weight.load(source).T.reshape(-1, dim, hidden)
        assert len(local) == share.num_heads + 2 * share.num_kv_heads
        assert len(qkv.bias.load(source)) == len(local) * dim
        local_output = o_proj.weight.load(source).reshape(-1, dim, hidden)
        for index, head in enumerate(share.query.indices):
            key = share.num_heads + index // (share.num_heads // share.num_kv_heads)
            if head == num_heads:
                assert not local[index].any()
                assert not local_output[index].any()
                continue
            seen.append(int(head))
            np.testing.assert_array_equal(local[index], q[head])
            np.testing.assert_array_equal(local[key], k[head // group])
            np.testing.assert_array_equal(local[key + share.num_kv_heads], v[head // group])
            np.testing.assert_array_equal(local_output[index], output[head])
        (blocks,) = in_blocks([qkv], source)
        whole = np.concatenate([source.read_blocks(name).dequantise() for name in shapes]).T
        columns = Share.joined([share.q_columns, share.kv_columns, share.kv_columns]).indices
        is_head = columns < whole.shape[1]
        np.testing.assert_array_equal(blocks[:, is_head], whole[:, columns[is_head]])
        assert not blocks[:, ~is_head].any()
    assert sorted(seen) == list(range(num_heads))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_projection_without_v_repeats_the_rows_of_k(size):
    """With 3 groups of heads, 2 and 4 ranks have heads of zeros."""
    hidden, dim = 32, 10
    widths = {"q_proj": 6 * dim, "k_proj": 3 * dim}
    source = Tensors(0, **{f"block.{name}.weight": (width, hidden) for name, width in widths.items()})
    q, k = (source.read(f"block.{name}.weight") for name in widths)
    for rank in range(size):
        heads = share_heads(6, 3, dim, Ranks(rank, size))
        both = named(QKVParallelLinear(hidden, heads, stored="qk")).weight.load(source).T
        alone = named(QKVParallelLinear(hidden, heads, stored="q")).weight.load(source).T
        keys = heads.kv_columns.take(k)
        np.testing.assert_array_equal(both, np.concatenate([heads.q_columns.take(q), keys, keys]))
        np.testing.assert_array_equal(alone, heads.q_columns.take(q))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size", "local"),
    [
        (8, 4, 1, (8, 4)),
        (8, 4, 2, (4, 2)),
        (8, 2, 4, (2, 1)),  # each key head on two ranks
        (9, 3, 2, (6, 2)),  # SmolLM2-135M: a group of zeros
        (9, 3, 4, (3, 1)),  # the last rank has only zeros
        (14, 2, 4, (4, 1)),  # Qwen2.5-0.5B: seven query heads on two ranks, with one of zeros
        (3, 1, 4, (1, 1)),  # more ranks than heads
    ],
)
def test_number_of_heads_on_a_rank(num_heads, num_kv_heads, size, local):
    for rank in range(size):
        share = share_heads(num_heads, num_kv_heads, 64, Ranks(rank, size))
        assert (share.num_heads, share.num_kv_heads) == local


def test_blocks_that_a_share_would_cut_are_not_kept():
    source = Tensors(**{"block.linear.weight": (3, 96)})
    for linear in on_ranks(2, lambda ranks: RowParallelLinear(96, 3, ranks)):
        assert not linear.weight.keeps_blocks
        assert linear.weight.load_blocks(source) is None
        assert linear.weight.load(source).shape == (48, 3)


@given(st.integers(1, 6), st.data())
def test_share_in_blocks_is_the_same_share(num_blocks, data):
    """The axis has blocks of 4, with padding; a share of complete blocks always has one, any other never."""
    size = 4 * num_blocks
    picked = data.draw(st.lists(st.integers(0, num_blocks), min_size=1, max_size=5))
    share = Share.of(num_blocks, np.array(picked)).spread(4)
    values = np.arange(1, size + 1)
    np.testing.assert_array_equal(share.in_blocks(4).take(values.reshape(num_blocks, 4)).ravel(), share.take(values))
    assert Share.of(size, share.indices[:-1]).in_blocks(4) is None
    assert Share.of(size, np.roll(share.indices, 1)).in_blocks(4) is None or len(set(share.indices)) == 1


@pytest.mark.parametrize(
    ("size", "num_ranks", "expected"),
    [
        (7, 3, [[0, 1, 2], [3, 4, 5], [6, 7, 7]]),
        (2, 3, [[0], [1], [2]]),
        (6, 2, [[0, 1, 2], [3, 4, 5]]),
    ],
)
def test_share_of_an_odd_axis_is_padded_at_its_end(size, num_ranks, expected):
    shares = [Share.even(size, Ranks(rank, num_ranks)) for rank in range(num_ranks)]
    assert [share.indices.tolist() for share in shares] == expected
    assert shares[0].places().tolist() == list(range(size))


@pytest.mark.parametrize(("size", "num_ranks", "length"), [(4864, 3, 1632), (1536, 5, 320), (96, 2, 48), (64, 3, 22)])
def test_share_keeps_blocks_if_that_adds_little_padding(size, num_ranks, length):
    """Blocks have 32 columns: 4864 / 3 is 1621.3, and 51 blocks are 1632; a share of 32 instead of 22 is too long."""
    assert Share.even(size, Ranks(0, num_ranks)).length == length


def test_padded_linears_compute_the_complete_product():
    """Columns of 7 and rows of 7 on 3 ranks: the sum over ranks of the products of slices is the product."""
    source = Tensors(
        **{"block.gate_proj.weight": (7, 8), "block.up_proj.weight": (7, 8), "block.linear.weight": (5, 7)}
    )
    columns = {"gate_proj": 7, "up_proj": 7}
    gates = [named(MergedColumnParallelLinear(8, columns, Ranks(rank, 3))).weight.load(source) for rank in range(3)]
    downs = [named(RowParallelLinear(7, 5, Ranks(rank, 3))).weight.load(source) for rank in range(3)]
    x = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    gate, up = (x @ source.read(f"block.{name}.weight").T for name in columns)
    expected = (gate * up) @ source.read("block.linear.weight").T
    halves = [np.split(x @ weight, 2, axis=1) for weight in gates]
    found = sum((a * b) @ down for (a, b), down in zip(halves, downs, strict=True))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


class Gathering(Module):
    """Decoder whose only linear gathers its output."""

    def __init__(self, ranks):
        super().__init__()
        self.linear = ColumnParallelLinear(8, 7, ranks, bias=True, gathers=True)
        self.embed = Embedding(5, 8)

    def forward(self, token_ids, logit_rows):
        return ops.gather_rows(self.linear(self.embed(token_ids)), logit_rows)


def test_column_parallel_output_is_gathered_if_asked():
    plan = partition(trace(Gathering(Ranks(1, 3)).named()), family="toy")
    (link,) = (subgraph for subgraph in plan.subgraphs if subgraph.device == "link")
    (node,) = link.nodes
    assert (node.op, node.attributes) == ("AllGather", {"columns": "0:7"})
    assert [plan.tensors[name].shape for name in (node.inputs[0], node.outputs[0])] == [("T", 3), ("T", 7)]
    assert not any(s.device == "link" for s in partition(trace(Gathering(ALONE).named()), family="toy").subgraphs)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0), (0, 1025), (0.0, 1), (True, 2)])
def test_invalid_rank_is_refused(rank, size):
    with pytest.raises(ConfigError, match="rank"):
        Ranks(rank, size)


def test_single_rank_reads_the_tensors_without_a_copy():
    """A checkpoint may be larger than the free memory."""
    source = Tensors(**{"block.linear.weight": (4, 6)})
    linear = named(RowParallelLinear(6, 4, ALONE))
    assert np.shares_memory(linear.weight.load(source), source.read("block.linear.weight"))
