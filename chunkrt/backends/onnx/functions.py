"""The operators of chunkrt's own domain and of plug-ins, defined as functions in standard ONNX.

Every model that uses one of these functions contains it, so any ONNX runtime can run the model and Netron can expand
the operator. The functions use RotaryEmbedding and Attention, which are standard since opset 23.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import onnx
import onnx_ir as ir

from chunkrt.errors import ModelError, UnsupportedModelError
from chunkrt.graph.linear_attention import LINEAR_ATTENTION_OP, find_variant
from chunkrt.graph.operators import find_operator
from chunkrt.graph.plan import DOMAIN

LINEARS = """
<domain: "chunkrt", opset_import: ["": 23]>
FloatLinear (x, weight) => (y)
{
    # a linear that no scheme quantises
    y = MatMul (x, weight)
}

<domain: "chunkrt", opset_import: ["": 23]>
QuantizeRows (x) => (q, row_scale)
{
    # int8 a row: q = round(x * 127 / max|x|); a row of zeros stays zero
    last = Constant <value_ints = [-1]> ()
    limit = Constant <value_float = 127.0> ()
    tiny = Constant <value_float = 1e-30> ()
    magnitude = Abs (x)
    row_max = ReduceMax (magnitude, last)
    divisor = Max (row_max, tiny)
    multiplier = Div (limit, divisor)
    scaled = Mul (x, multiplier)
    q = Round (scaled)
    row_scale = Div (row_max, limit)
}

<domain: "chunkrt", opset_import: ["": 23]>
TakeOutliers (x) => (outliers, rest)
{
    # values of more than 8 times their row's mean magnitude
    last = Constant <value_ints = [-1]> ()
    ratio = Constant <value_float = 8.0> ()
    zero = Constant <value_float = 0.0> ()
    magnitude = Abs (x)
    mean = ReduceMean (magnitude, last)
    limit = Mul (mean, ratio)
    is_outlier = Greater (magnitude, limit)
    outliers = Where (is_outlier, x, zero)
    rest = Where (is_outlier, zero, x)
}

<domain: "chunkrt", opset_import: ["": 23, "chunkrt": 1]>
DynamicLinear (x, weight, weight_scale) => (y)
{
    # the products of integers are summed in float32, exact up to 2^24
    outliers, rest = chunkrt.TakeOutliers (x)
    q, row_scale = chunkrt.QuantizeRows (rest)
    weight_float = CastLike (weight, x)
    accumulated = MatMul (q, weight_float)
    by_rows = Mul (accumulated, row_scale)
    of_outliers = MatMul (outliers, weight_float)
    sum = Add (by_rows, of_outliers)
    y = Mul (sum, weight_scale)
}

<domain: "chunkrt", opset_import: ["": 23, "chunkrt": 1]>
BlockLinear (x, weight, block_scale, block_minimum) => (y)
{
    # weight uint8 [K, N] of 0 to 15; scale and minimum [K / 32, N]. A minimum is multiplied by its block's sum of x
    outliers, rest = chunkrt.TakeOutliers (x)
    q, row_scale = chunkrt.QuantizeRows (rest)
    scaled_weight = DequantizeLinear <axis = 0, block_size = 32> (weight, block_scale)
    from_q = chunkrt.MultiplyBlocks (q, scaled_weight, block_minimum)
    by_rows = Mul (from_q, row_scale)
    of_outliers = chunkrt.MultiplyBlocks (outliers, scaled_weight, block_minimum)
    y = Add (by_rows, of_outliers)
}

<domain: "chunkrt", opset_import: ["": 23]>
MultiplyBlocks (x, scaled_weight, block_minimum) => (y)
{
    product = MatMul (x, scaled_weight)
    by_block = Constant <value_ints = [0, -1, 32]> ()
    blocks = Reshape (x, by_block)
    last = Constant <value_ints = [-1]> ()
    sums = ReduceSum <keepdims = 0> (blocks, last)
    of_minima = MatMul (sums, block_minimum)
    y = Add (product, of_minima)
}

<domain: "chunkrt", opset_import: ["": 23]>
ShadowLinear (x, weight, step, weight_scale) => (y)
{
    # the part of x that exceeds the range of an 8-bit grid, times the weight in float
    levels = Constant <value_float = 127.0> ()
    minus_levels = Constant <value_float = -127.0> ()
    zero = Constant <value_float = 0.0> ()
    quotient = Div (x, step)
    q = Round (quotient)
    magnitude = Abs (q)
    is_within = LessOrEqual (magnitude, levels)
    kept = Clip (q, minus_levels, levels)
    kept_value = Mul (kept, step)
    rest = Sub (x, kept_value)
    excess = Where (is_within, zero, rest)
    weight_float = CastLike (weight, x)
    dequantised = Mul (weight_float, weight_scale)
    y = MatMul (excess, dequantised)
}

<domain: "chunkrt", opset_import: ["": 23]>
InBestGroups <num_groups, top_groups, best_of_group> (values) => (kept)
{
    # the values of experts [T, E]; those outside of the best groups become less than all others
    one = Constant <value_ints = [1]> ()
    last = Constant <value_ints = [-1]> ()
    copied = Constant <value_ints = [0]> ()
    groups_scalar = Constant <value_int: int = @num_groups> ()
    num_groups = Reshape (groups_scalar, one)
    by_group = Concat <axis = 0> (copied, num_groups, last)
    groups = Reshape (values, by_group)
    best_scalar = Constant <value_int: int = @best_of_group> ()
    num_best = Reshape (best_scalar, one)
    best, best_places = TopK <axis = -1> (groups, num_best)
    ranks = ReduceSum <keepdims = 0> (best, last)
    open_scalar = Constant <value_int: int = @top_groups> ()
    num_open = Reshape (open_scalar, one)
    open_ranks, open_groups = TopK <axis = -1> (ranks, num_open)
    large = Constant <value_float = 1e9> ()
    zeros = Sub (ranks, ranks)
    closed = Sub (zeros, large)
    opened = Sub (open_ranks, open_ranks)
    penalties = ScatterElements <axis = -1> (closed, open_groups, opened)
    penalty_of_group = Unsqueeze (penalties, last)
    kept_groups = Add (groups, penalty_of_group)
    all_experts = Concat <axis = 0> (copied, last)
    kept = Reshape (kept_groups, all_experts)
}

<domain: "chunkrt", opset_import: ["": 23, "chunkrt": 1]>
Route <top_k, norm_topk_prob, use_sigmoid, norm_epsilon, num_groups, top_groups, best_of_group>
    (router_logits, selection_bias) => (weights)
{
    # every row's weights of all experts [T, E]: the scores of the picked ones (of equals the first), 0 of the others
    one = Constant <value_ints = [1]> ()
    last = Constant <value_ints = [-1]> ()
    probabilities = Softmax <axis = -1> (router_logits)
    squashed = Sigmoid (router_logits)
    is_squashed_int = Constant <value_int: int = @use_sigmoid> ()
    is_squashed = Cast <to = 9> (is_squashed_int)
    scores = Where (is_squashed, squashed, probabilities)
    biased = Add (scores, selection_bias)
    values = chunkrt.InBestGroups <num_groups: int = @num_groups, top_groups: int = @top_groups,
                                   best_of_group: int = @best_of_group> (biased)
    count_scalar = Constant <value_int: int = @top_k> ()
    count = Reshape (count_scalar, one)
    largest, indices = TopK <axis = -1> (values, count)
    picked = GatherElements <axis = -1> (scores, indices)
    sums = ReduceSum (picked, last)
    epsilon = Constant <value_float: float = @norm_epsilon> ()
    divisors = Add (sums, epsilon)
    normalised = Div (picked, divisors)
    is_normalised_int = Constant <value_int: int = @norm_topk_prob> ()
    is_normalised = Cast <to = 9> (is_normalised_int)
    kept = Where (is_normalised, normalised, picked)
    nothing = Sub (probabilities, probabilities)
    weights = ScatterElements <axis = -1> (nothing, indices, kept)
}

<domain: "chunkrt", opset_import: ["": 23, "chunkrt": 1]>
RoutedExperts <top_k, norm_topk_prob, use_sigmoid, norm_epsilon, swiglu_alpha, swiglu_limit, uses_gelu,
    num_groups, top_groups, best_of_group>
    (hidden, router_logits, gate_up, down, selection_bias, gate_up_bias, down_bias) => (output)
{
    # all experts of all rows [E, T, H]
    zero = Constant <value_ints = [0]> ()
    rows = Unsqueeze (hidden, zero)
    gate_up_products = MatMul (rows, gate_up)
    both = chunkrt.AddOfExperts (gate_up_products, gate_up_bias)
    gated = chunkrt.SplitActivate <swiglu_alpha: float = @swiglu_alpha, swiglu_limit: float = @swiglu_limit,
                                   uses_gelu: int = @uses_gelu> (both)
    down_products = MatMul (gated, down)
    results = chunkrt.AddOfExperts (down_products, down_bias)
    weights = chunkrt.Route <top_k: int = @top_k, norm_topk_prob: int = @norm_topk_prob,
                             use_sigmoid: int = @use_sigmoid, norm_epsilon: float = @norm_epsilon,
                             num_groups: int = @num_groups, top_groups: int = @top_groups,
                             best_of_group: int = @best_of_group>
                            (router_logits, selection_bias)
    output = chunkrt.SumExperts (results, weights)
}

<domain: "chunkrt", opset_import: ["": 23, "chunkrt": 1]>
DynamicRoutedExperts <top_k, norm_topk_prob, use_sigmoid, norm_epsilon, swiglu_alpha, swiglu_limit, uses_gelu,
    num_groups, top_groups, best_of_group>
    (hidden, router_logits, gate_up, down, selection_bias, gate_up_bias, down_bias, gate_up_scale, down_scale)
    => (output)
{
    # as above; the scales are [E, 1, N]
    zero = Constant <value_ints = [0]> ()
    rows = Unsqueeze (hidden, zero)
    gate_up_products = chunkrt.DynamicLinear (rows, gate_up, gate_up_scale)
    both = chunkrt.AddOfExperts (gate_up_products, gate_up_bias)
    gated = chunkrt.SplitActivate <swiglu_alpha: float = @swiglu_alpha, swiglu_limit: float = @swiglu_limit,
                                   uses_gelu: int = @uses_gelu> (both)
    down_products = chunkrt.DynamicLinear (gated, down, down_scale)
    results = chunkrt.AddOfExperts (down_products, down_bias)
    weights = chunkrt.Route <top_k: int = @top_k, norm_topk_prob: int = @norm_topk_prob,
                             use_sigmoid: int = @use_sigmoid, norm_epsilon: float = @norm_epsilon,
                             num_groups: int = @num_groups, top_groups: int = @top_groups,
                             best_of_group: int = @best_of_group>
                            (router_logits, selection_bias)
    output = chunkrt.SumExperts (results, weights)
}

<domain: "chunkrt", opset_import: ["": 23]>
SplitActivate <swiglu_alpha, swiglu_limit, uses_gelu> (both) => (gated)
{
    # a limit of 0 gives silu(gate) * up; any other limit clamps both, and adds 1 to up
    gate, up = Split <axis = -1, num_outputs = 2> (both)
    none = Constant <value_float = 0.0> ()
    largest = Constant <value_float = 3.4028234e38> ()
    limit = Constant <value_float: float = @swiglu_limit> ()
    alpha = Constant <value_float: float = @swiglu_alpha> ()
    is_clamped = Greater (limit, none)
    bound = Where (is_clamped, limit, largest)
    minus_bound = Neg (bound)
    offset = Cast <to = 1> (is_clamped)
    kept_gate = Min (gate, bound)
    kept_up = Clip (up, minus_bound, bound)
    angle = Mul (kept_gate, alpha)
    squashed = Sigmoid (angle)
    swish = Mul (kept_gate, squashed)
    gelu = Gelu <approximate = "tanh"> (gate)
    is_gelu_int = Constant <value_int: int = @uses_gelu> ()
    is_gelu = Cast <to = 9> (is_gelu_int)
    active = Where (is_gelu, gelu, swish)
    factor = Add (kept_up, offset)
    gated = Mul (active, factor)
}

<domain: "chunkrt", opset_import: ["": 23]>
AddOfExperts (products, bias) => (sums)
{
    # products [E, T, N]; a bias [E, N], or a single zero
    before_last = Constant <value_ints = [-2]> ()
    rows = Unsqueeze (bias, before_last)
    sums = Add (products, rows)
}

<domain: "chunkrt", opset_import: ["": 23]>
SumExperts (results, weights) => (output)
{
    # results [E, T, H], weights [T, E]
    zero = Constant <value_ints = [0]> ()
    last = Constant <value_ints = [-1]> ()
    by_expert = Transpose <perm = [1, 0]> (weights)
    weight_columns = Unsqueeze (by_expert, last)
    weighted = Mul (results, weight_columns)
    output = ReduceSum <keepdims = 0> (weighted, zero)
}
"""

SHARED = "shared"
"""Overload of attention over caches that another node fills."""
DUAL_CHUNKS = "dual_chunks"
"""Overload of dual chunk attention, which has no function."""

_TEXT = """
<ir_version: 10, opset_import: ["": 23]>
placeholder (float[1] x) => (float[1] y) { y = Identity(x) }

<domain: "chunkrt", opset_import: ["": 23, "chunkrt": 1]>
CachedAttention <num_heads, num_kv_heads, head_dim, rotary_dim, scale, window>
    (qkv, position, rope_position, cos, sin, past_key, past_value) => (output, present_key, present_value)
{
    q, k, v = chunkrt.SplitHeads <num_heads: int = @num_heads, num_kv_heads: int = @num_kv_heads,
                                  head_dim: int = @head_dim> (qkv)
    row_positions, key_positions, table_offset = chunkrt.FindPlaces (qkv, position, rope_position)
    q_roped = chunkrt.Rope <rotary_dim: int = @rotary_dim> (q, cos, sin, row_positions, table_offset)
    k_roped = chunkrt.Rope <rotary_dim: int = @rotary_dim> (k, cos, sin, row_positions, table_offset)
    visible = chunkrt.FindVisible <window: int = @window> (row_positions, key_positions)
    zero = Constant <value_ints = [0]> ()
    past_k = Unsqueeze (past_key, zero)
    past_v = Unsqueeze (past_value, zero)
    attended, all_k, all_v = Attention <scale: float = @scale> (q_roped, k_roped, v, visible, past_k, past_v)
    present_key = Squeeze (all_k, zero)
    present_value = Squeeze (all_v, zero)
    output = chunkrt.JoinHeads (attended)
}

<domain: "chunkrt", opset_import: ["": 23, "chunkrt": 1]>
RawKeyAttention <num_heads, num_kv_heads, head_dim, rotary_dim, scale, window>
    (qkv, position, rope_position, cos, sin, past_key, past_value) => (output, present_key, present_value)
{
    # the cache holds keys as they were projected; each is rotated for the place where it stands now
    q, k, v = chunkrt.SplitHeads <num_heads: int = @num_heads, num_kv_heads: int = @num_kv_heads,
                                  head_dim: int = @head_dim> (qkv)
    row_positions, key_positions, table_offset = chunkrt.FindPlaces (qkv, position, rope_position)
    q_roped = chunkrt.Rope <rotary_dim: int = @rotary_dim> (q, cos, sin, row_positions, table_offset)
    zero = Constant <value_ints = [0]> ()
    past_k = Unsqueeze (past_key, zero)
    past_v = Unsqueeze (past_value, zero)
    all_k = Concat <axis = 2> (past_k, k)
    all_v = Concat <axis = 2> (past_v, v)
    k_roped = chunkrt.Rope <rotary_dim: int = @rotary_dim> (all_k, cos, sin, key_positions, table_offset)
    visible = chunkrt.FindVisible <window: int = @window> (row_positions, key_positions)
    attended = Attention <scale: float = @scale> (q_roped, k_roped, all_v, visible)
    present_key = Squeeze (all_k, zero)
    present_value = Squeeze (all_v, zero)
    output = chunkrt.JoinHeads (attended)
}

<domain: "chunkrt", opset_import: ["": 23, "chunkrt": 1], overload: "shared">
CachedAttention <num_heads, num_kv_heads, head_dim, rotary_dim, scale, window>
    (q, position, rope_position, cos, sin, key, value) => (output)
{
    # the caches belong to another node, and contain the rows of this chunk
    heads = chunkrt.SplitQueries <head_dim: int = @head_dim> (q)
    row_positions, key_positions, table_offset = chunkrt.FindPlaces (q, position, rope_position)
    q_roped = chunkrt.Rope <rotary_dim: int = @rotary_dim> (heads, cos, sin, row_positions, table_offset)
    visible = chunkrt.FindVisible <window: int = @window> (row_positions, key_positions)
    zero = Constant <value_ints = [0]> ()
    all_k = Unsqueeze (key, zero)
    all_v = Unsqueeze (value, zero)
    attended = Attention <scale: float = @scale> (q_roped, all_k, all_v, visible)
    output = chunkrt.JoinHeads (attended)
}

<domain: "chunkrt", opset_import: ["": 23, "chunkrt": 1], overload: "shared">
RawKeyAttention <num_heads, num_kv_heads, head_dim, rotary_dim, scale, window>
    (q, position, rope_position, cos, sin, key, value) => (output)
{
    heads = chunkrt.SplitQueries <head_dim: int = @head_dim> (q)
    row_positions, key_positions, table_offset = chunkrt.FindPlaces (q, position, rope_position)
    q_roped = chunkrt.Rope <rotary_dim: int = @rotary_dim> (heads, cos, sin, row_positions, table_offset)
    zero = Constant <value_ints = [0]> ()
    all_k = Unsqueeze (key, zero)
    all_v = Unsqueeze (value, zero)
    k_roped = chunkrt.Rope <rotary_dim: int = @rotary_dim> (all_k, cos, sin, key_positions, table_offset)
    visible = chunkrt.FindVisible <window: int = @window> (row_positions, key_positions)
    attended = Attention <scale: float = @scale> (q_roped, k_roped, all_v, visible)
    output = chunkrt.JoinHeads (attended)
}

<domain: "chunkrt", opset_import: ["": 23]>
SplitQueries <head_dim> (q) => (heads)
{
    # [T, Nq D] to heads [1, Nq, T, D]
    any_dim = Constant <value_ints = [0, -1]> ()
    zero = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    dim_scalar = Constant <value_int: int = @head_dim> ()
    dim = Reshape (dim_scalar, one)
    by_head = Concat <axis = 0> (any_dim, dim)
    rows = Reshape (q, by_head)
    by_heads = Transpose <perm = [1, 0, 2]> (rows)
    heads = Unsqueeze (by_heads, zero)
}

<domain: "chunkrt", opset_import: ["": 23]>
SplitHeads <num_heads, num_kv_heads, head_dim> (qkv) => (q, k, v)
{
    # [T, (Nq + 2 Nkv) D] to heads [1, N, T, D]
    any_dim = Constant <value_ints = [0, -1]> ()
    zero = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    dim_scalar = Constant <value_int: int = @head_dim> ()
    dim = Reshape (dim_scalar, one)
    by_head = Concat <axis = 0> (any_dim, dim)
    rows = Reshape (qkv, by_head)
    heads = Transpose <perm = [1, 0, 2]> (rows)
    batch = Unsqueeze (heads, zero)
    num_q_scalar = Constant <value_int: int = @num_heads> ()
    num_kv_scalar = Constant <value_int: int = @num_kv_heads> ()
    num_q = Reshape (num_q_scalar, one)
    num_kv = Reshape (num_kv_scalar, one)
    counts = Concat <axis = 0> (num_q, num_kv, num_kv)
    q, k, v = Split <axis = 1> (batch, counts)
}

<domain: "chunkrt", opset_import: ["": 23]>
FindPlaces (qkv, position, rope_position) => (row_positions, key_positions, table_offset)
{
    # row t stands at position + t, keys from 0 on; in the tables all are table_offset further
    zero = Constant <value_ints = [0]> ()
    qkv_shape = Shape (qkv)
    num_rows = Gather (qkv_shape, zero)
    start = Squeeze (position, zero)
    end_1d = Add (position, num_rows)
    end = Squeeze (end_1d, zero)
    first = Constant <value_int = 0> ()
    step = Constant <value_int = 1> ()
    row_positions = Range (start, end, step)
    key_positions = Range (first, end, step)
    table_offset = Sub (rope_position, position)
}

<domain: "chunkrt", opset_import: ["": 23]>
Rope <rotary_dim> (heads, cos, sin, positions, table_offset) => (roped)
{
    zero = Constant <value_ints = [0]> ()
    table_rows = Add (positions, table_offset)
    position_ids = Unsqueeze (table_rows, zero)
    roped = RotaryEmbedding <rotary_embedding_dim: int = @rotary_dim> (heads, cos, sin, position_ids)
}

<domain: "chunkrt", opset_import: ["": 23]>
FindVisible <window> (row_positions, key_positions) => (visible)
{
    # row t sees keys 0 .. position + t, of them the last `window` if that is not 0
    minus_one = Constant <value_ints = [-1]> ()
    none = Constant <value_int = 0> ()
    limits = Unsqueeze (row_positions, minus_one)
    is_past = LessOrEqual (key_positions, limits)
    window_size = Constant <value_int: int = @window> ()
    window_starts = Sub (limits, window_size)
    is_recent = Greater (key_positions, window_starts)
    has_no_window = Equal (window_size, none)
    is_in_window = Or (is_recent, has_no_window)
    visible = And (is_past, is_in_window)
}

<domain: "chunkrt", opset_import: ["": 23]>
JoinHeads (heads) => (rows)
{
    # [1, N, T, D] to [T, N D]
    by_row = Transpose <perm = [0, 2, 1, 3]> (heads)
    flat = Constant <value_ints = [0, 0, -1]> ()
    merged = Reshape (by_row, flat)
    zero = Constant <value_ints = [0]> ()
    rows = Squeeze (merged, zero)
}

<domain: "chunkrt", opset_import: ["": 23]>
GatherShare <first, all_rows> (table, indices) => (output)
{
    # rows of one rank's share of a table; rows of other ranks are zeros
    zero = Constant <value_ints = [0]> ()
    zero_float = Constant <value_float = 0.0> ()
    last_axis = Constant <value_ints = [-1]> ()
    start = Constant <value_int: int = @first> ()
    shape = Shape (table)
    height = Gather (shape, zero)
    local = Sub (indices, start)
    is_after = GreaterOrEqual (local, zero)
    is_before = Less (local, height)
    is_here = And (is_after, is_before)
    place = Where (is_here, local, zero)
    rows = Gather <axis = 0> (table, place)
    column = Unsqueeze (is_here, last_axis)
    output = Where (column, rows, zero_float)
}

<domain: "chunkrt", opset_import: ["": 23]>
AddPositions (hidden, table, position) => (output)
{
    zero = Constant <value_ints = [0]> ()
    count = Shape <start = 0, end = 1> (hidden)
    end = Add (position, count)
    rows = Slice (table, position, end, zero)
    output = Add (hidden, rows)
}

<domain: "chunkrt", opset_import: ["": 23]>
QuickGelu (x) => (output)
{
    alpha = Constant <value_float = 1.702> ()
    angle = Mul (x, alpha)
    gate = Sigmoid (angle)
    output = Mul (x, gate)
}

<domain: "chunkrt", opset_import: ["": 23]>
Xielu (x, parameters) => (output)
{
    # Elu with alpha = 1 is expm1 for negative values
    positive_factor, negative_factor, linear_factor, limit = Split <axis = 0, num_outputs = 4> (parameters)
    zero = Constant <value_float = 0.0> ()
    linear = Mul (x, linear_factor)
    square = Mul (x, x)
    positive = Mul (square, positive_factor)
    bounded = Min (x, limit)
    decayed = Elu (bounded)
    bent = Sub (decayed, x)
    negative = Mul (bent, negative_factor)
    is_positive = Greater (x, zero)
    curved = Where (is_positive, positive, negative)
    output = Add (curved, linear)
}

<domain: "chunkrt", opset_import: ["": 23]>
SelectiveScan (x, step, bc, rates, skip, state) => (output, new_state)
{
    b, c = Split <axis = 1, num_outputs = 2> (bc)
    stepped = Mul (step, x)
    new_state, reads = Scan <num_scan_inputs = 4, body = row
        (float[n, d] s, float[d] dt, float[d] u, float[n] b_t, float[n] c_t) => (float[n, d] new_s, float[d] y)
    {
        first = Constant <value_ints = [0]> ()
        second = Constant <value_ints = [1]> ()
        dt_row = Unsqueeze (dt, first)
        angle = Mul (dt_row, rates)
        decay = Exp (angle)
        decayed = Mul (s, decay)
        u_row = Unsqueeze (u, first)
        b_column = Unsqueeze (b_t, second)
        written = Mul (b_column, u_row)
        new_s = Add (decayed, written)
        c_row = Unsqueeze (c_t, first)
        read = MatMul (c_row, new_s)
        y = Squeeze (read, first)
    }> (state, step, stepped, b, c)
    skipped = Mul (x, skip)
    output = Add (reads, skipped)
}

<domain: "chunkrt", opset_import: ["": 23]>
HeadNorm <epsilon> (x, weight) => (output)
{
    # the first n heads of a row, each normalised and multiplied by its own row of weight [n, D]
    any_dim = Constant <value_ints = [0, -1]> ()
    zero = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    weight_shape = Shape (weight)
    num_heads = Gather (weight_shape, zero)
    dim = Gather (weight_shape, one)
    by_head = Concat <axis = 0> (any_dim, dim)
    heads = Reshape (x, by_head)
    heads_shape = Shape (heads)
    all_heads = Gather (heads_shape, one)
    first = Slice (heads, zero, num_heads, one)
    rest = Slice (heads, num_heads, all_heads, one)
    ones = ConstantOfShape <value = float[1] {1.0}> (dim)
    normalised = RMSNormalization <axis = -1, epsilon: float = @epsilon> (first, ones)
    weighted = Mul (normalised, weight)
    joined = Concat <axis = 1> (weighted, rest)
    flat = Constant <value_ints = [0, -1]> ()
    output = Reshape (joined, flat)
}

<domain: "chunkrt", opset_import: ["": 23]>
CausalConvolution (x, weight, bias, state) => (y, new_state)
{
    # x [T, C], weight [C, 1, K]; the state [C, K - 1] holds the columns before row 0
    columns = Transpose <perm = [1, 0]> (x)
    window = Concat <axis = 1> (state, columns)

    # row t sees columns t .. t + K - 1
    zero = Constant <value_int = 0> ()
    step = Constant <value_int = 1> ()
    two = Constant <value_int = 2> ()
    one = Constant <value_ints = [1]> ()
    last = Constant <value_ints = [-1]> ()
    x_shape = Shape (x)
    weight_shape = Shape (weight)
    num_rows = Gather (x_shape, zero)
    num_taps = Gather (weight_shape, two)
    rows_flat = Range (zero, num_rows, step)
    rows = Unsqueeze (rows_flat, one)
    taps = Range (zero, num_taps, step)
    places = Add (rows, taps)
    seen = Gather <axis = 1> (window, places)
    products = Mul (seen, weight)
    sums = ReduceSum <keepdims = 0> (products, last)
    by_row = Transpose <perm = [1, 0]> (sums)
    y = Add (by_row, bias)
    first_kept = Unsqueeze (num_rows, zero)
    end = Constant <value_ints = [9223372036854775807]> ()
    new_state = Slice (window, first_kept, end, one)
}
"""


_ATTENTION = """
<ir_version: 10, opset_import: ["": 23]>
placeholder (float[1] x) => (float[1] y) {{ y = Identity(x) }}

<domain: "chunkrt", opset_import: ["": 23, "chunkrt": 1], overload: "{overload}">
{op} <num_heads, num_kv_heads, head_dim, rotary_dim, scale, window{attributes}>
    (qkv, position, rope_position, cos, sin, past_key, past_value{inputs}) => (output, present_key, present_value)
{{
    q, k, v = chunkrt.SplitHeads <num_heads: int = @num_heads, num_kv_heads: int = @num_kv_heads,
                                  head_dim: int = @head_dim> (qkv)
    row_positions, key_positions, table_offset = chunkrt.FindPlaces (qkv, position, rope_position)
    q_roped = chunkrt.Rope <rotary_dim: int = @rotary_dim> (q, cos, sin, row_positions, table_offset)
    zero = Constant <value_ints = [0]> ()
    past_k = Unsqueeze (past_key, zero)
    past_v = Unsqueeze (past_value, zero)
{keys}
    all_v = Concat <axis = 2> (past_v, v)
    visible = chunkrt.FindVisible <window: int = @window> (row_positions, key_positions)

    # q by the heads of keys: [1, Nkv, Nq / Nkv * T, D]
    one = Constant <value_ints = [1]> ()
    any_dim = Constant <value_ints = [-1]> ()
    dim_scalar = Constant <value_int: int = @head_dim> ()
    dim = Reshape (dim_scalar, one)
    num_q_scalar = Constant <value_int: int = @num_heads> ()
    num_q = Reshape (num_q_scalar, one)
    num_kv_scalar = Constant <value_int: int = @num_kv_heads> ()
    num_kv = Reshape (num_kv_scalar, one)
    by_key_head = Concat <axis = 0> (one, num_kv, any_dim, dim)
    grouped = Reshape (q_roped, by_key_head)
    key_columns = Transpose <perm = [0, 1, 3, 2]> (seen_k)
    products = MatMul (grouped, key_columns)
    rows_and_keys = Shape (visible)
    by_head = Concat <axis = 0> (one, num_q, rows_and_keys)
    products_by_head = Reshape (products, by_head)
    factor = Constant <value_float: float = @scale> ()
    scores = Mul (products_by_head, factor)
{cap}
    lowest = Constant <value_float = -3.4028234e38> ()
    masked = Where (visible, capped, lowest)
{softmax}
    num_keys = Gather (rows_and_keys, one)
    weights_by_key_head = Concat <axis = 0> (one, num_kv, any_dim, num_keys)
    grouped_weights = Reshape (weights, weights_by_key_head)
    sums = MatMul (grouped_weights, all_v)
    heads = Concat <axis = 0> (one, num_q, any_dim, dim)
    attended = Reshape (sums, heads)
    present_key = Squeeze (all_k, zero)
    present_value = Squeeze (all_v, zero)
    output = chunkrt.JoinHeads (attended)
}}
"""
"""Template of attention with a soft cap, sinks or both, which the standard Attention lacks or, for the cap, applies
after the mask in its first definition."""

_ATTENTION_KEYS = {
    "CachedAttention": """
    k_roped = chunkrt.Rope <rotary_dim: int = @rotary_dim> (k, cos, sin, row_positions, table_offset)
    all_k = Concat <axis = 2> (past_k, k_roped)
    seen_k = Identity (all_k)""",
    "RawKeyAttention": """
    all_k = Concat <axis = 2> (past_k, k)
    seen_k = chunkrt.Rope <rotary_dim: int = @rotary_dim> (all_k, cos, sin, key_positions, table_offset)""",
}
_SOFT_CAP = """
    limit = Constant <value_float: float = @soft_cap> ()
    shares = Div (scores, limit)
    bounded = Tanh (shares)
    capped = Mul (bounded, limit)"""
_SINKS = """
    # the sink is the score of one more key, whose value is zero
    by_row = Constant <value_ints = [1, -1, 1, 1]> ()
    of_heads = Reshape (sinks, by_row)
    last = Constant <value_ints = [-1]> ()
    maxima = ReduceMax (masked, last)
    nothing = Sub (maxima, maxima)
    column = Add (nothing, of_heads)
    with_sinks = Concat <axis = 3> (masked, column)
    all_weights = Softmax <axis = -1> (with_sinks)
    weights = Slice (all_weights, zero, last, last)"""

CAPPED, WITH_SINKS, CAPPED_WITH_SINKS = "capped", "sinks", "capped_sinks"
"""Overloads of attention: with a soft cap of scores, with sinks, and with both."""


@cache
def _attention(op: str, kind: str) -> ir.Function:
    has_cap, has_sinks = kind != WITH_SINKS, kind != CAPPED
    text = _ATTENTION.format(
        op=op,
        overload=kind,
        attributes=", soft_cap" if has_cap else "",
        inputs=", sinks" if has_sinks else "",
        keys=_ATTENTION_KEYS[op],
        cap=_SOFT_CAP if has_cap else "    capped = Identity (scores)",
        softmax=_SINKS if has_sinks else "    weights = Softmax <axis = -1> (masked)",
    )
    (function,) = ir.from_onnx_text(text).functions.values()
    return function


_LINEAR_ATTENTION = """
<ir_version: 10, opset_import: ["": 23]>
placeholder (float[1] x) => (float[1] y) {{ y = Identity(x) }}

<domain: "chunkrt", opset_import: ["": 23, "chunkrt": 1], overload: "{attn_type}">
LinearAttention <attn_type, num_k_heads, num_v_heads, head_k_dim, head_v_dim, use_qk_l2norm>
    (qkv, gate, beta, conv_weight, conv_bias, conv_state, recurrent_state{skip}) => ({outputs})
{body}
"""
"""Template of LinearAttention's functions, in which each kind is an overload of the same name."""

_OF_PLUGIN = """
<ir_version: 10, opset_import: ["": 23]>
placeholder (float[1] x) => (float[1] y) {{ y = Identity(x) }}

<domain: "{domain}", opset_import: ["": 23, "chunkrt": 1]>
{expansion}
"""
"""Template of the function that defines a plug-in's operator."""


@cache
def _functions() -> dict[tuple[str, str], ir.Function]:
    return {(f.name, f.overload): f for f in ir.from_onnx_text(_TEXT + LINEARS).functions.values()}


@cache
def _linear_attention(attn_type: str) -> ir.Function:
    variant = find_variant(attn_type)
    if not variant.expansion:
        raise KeyError(attn_type)
    outputs = ["output", "new_conv_state", "new_recurrent_state"][: 3 if variant.is_recurrent else 2]
    skip = ", skip" if variant.has_skip else ""
    text = _LINEAR_ATTENTION.format(attn_type=attn_type, skip=skip, outputs=", ".join(outputs), body=variant.expansion)
    (function,) = ir.from_onnx_text(text).functions.values()
    return function


@cache
def _of_plugin(domain: str, op: str, text: str) -> ir.Function:
    try:
        (function,) = ir.from_onnx_text(_OF_PLUGIN.format(domain=domain, expansion=text)).functions.values()
        if function.name != op:
            raise ValueError(f"it defines {function.name!r}")
        if unknown := [n.op_type for n in function.all_nodes() if not n.domain and not onnx.defs.has(n.op_type)]:
            raise ValueError(f"ONNX has no operator {unknown[0]!r}")
    except Exception as error:  # the parser raises errors of several kinds, some with bytes as text
        (said, *_) = error.args or (error,)
        what = " ".join((said.decode(errors="replace") if isinstance(said, bytes) else str(said)).split())
        raise ModelError(f"the expansion of {domain}::{op} is no ONNX function of that name: {what}") from error
    return function


def has_expansion(domain: str, op: str, overload: str = "") -> bool:
    """Return whether a function defines an operator.

    Args:
        overload: the attn_type of LinearAttention, or a kind of attention.
    """
    if domain != DOMAIN:
        row = find_operator(domain, op)
        return row is not None and bool(row.expansion)
    if op in _ATTENTION_KEYS:
        return overload in ("", CAPPED, WITH_SINKS, CAPPED_WITH_SINKS) or (op, overload) in _functions()
    if op != LINEAR_ATTENTION_OP:
        return (op, overload) in _functions()
    try:
        return bool(find_variant(overload).expansion)
    except UnsupportedModelError:
        return False


def expansion(op: str, overload: str = "", domain: str = DOMAIN) -> ir.Function:
    """Return a fresh copy of the function that defines an operator.

    Raises:
        KeyError: no function defines the operator.
        ModelError: the expansion of a plug-in's operator is no ONNX function.
    """
    if domain != DOMAIN:
        if not has_expansion(domain, op):
            raise KeyError(op)
        row = find_operator(domain, op)
        assert row is not None
        return _of_plugin(domain, op, row.expansion).clone()
    if op == LINEAR_ATTENTION_OP:
        return _linear_attention(overload).clone()
    if op in _ATTENTION_KEYS and overload in (CAPPED, WITH_SINKS, CAPPED_WITH_SINKS):
        return _attention(op, overload).clone()
    return _functions()[op, overload].clone()


def expansions(ops: Iterable[tuple[str, str, str]]) -> list[ir.Function]:
    """Return fresh copies of functions that define operators, given as (op, overload, domain), and of the functions
    that these call.
    """
    found: dict[tuple[str, str, str], ir.Function] = {}
    pending = list(ops)
    while pending:
        key = pending.pop()
        if key not in found:
            function = found[key] = expansion(*key)
            pending += [(node.op_type, node.overload, node.domain) for node in function.all_nodes() if node.domain]
    return list(found.values())
