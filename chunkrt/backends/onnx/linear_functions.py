"""Standard ONNX functions of linears other than plain MatMuls, and of experts; a part of `functions.py`."""

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
Route <top_k, norm_topk_prob> (router_logits) => (weights)
{
    # every row's weights of all experts [T, E]: the softmax of the picked ones (of equals the first), 0 of the others
    one = Constant <value_ints = [1]> ()
    last = Constant <value_ints = [-1]> ()
    probabilities = Softmax <axis = -1> (router_logits)
    count_scalar = Constant <value_int: int = @top_k> ()
    count = Reshape (count_scalar, one)
    largest, indices = TopK <axis = -1> (router_logits, count)
    picked = GatherElements <axis = -1> (probabilities, indices)
    sums = ReduceSum (picked, last)
    normalised = Div (picked, sums)
    is_normalised_int = Constant <value_int: int = @norm_topk_prob> ()
    is_normalised = Cast <to = 9> (is_normalised_int)
    values = Where (is_normalised, normalised, picked)
    nothing = Sub (probabilities, probabilities)
    weights = ScatterElements <axis = -1> (nothing, indices, values)
}

<domain: "chunkrt", opset_import: ["": 23, "chunkrt": 1]>
RoutedExperts <top_k, norm_topk_prob> (hidden, router_logits, gate_up, down) => (output)
{
    # all experts of all rows [E, T, H]
    zero = Constant <value_ints = [0]> ()
    rows = Unsqueeze (hidden, zero)
    both = MatMul (rows, gate_up)
    gated = chunkrt.SplitSiluMul (both)
    results = MatMul (gated, down)
    weights = chunkrt.Route <top_k: int = @top_k, norm_topk_prob: int = @norm_topk_prob> (router_logits)
    output = chunkrt.SumExperts (results, weights)
}

<domain: "chunkrt", opset_import: ["": 23, "chunkrt": 1]>
DynamicRoutedExperts <top_k, norm_topk_prob>
    (hidden, router_logits, gate_up, down, gate_up_scale, down_scale) => (output)
{
    # as above; the scales are [E, 1, N]
    zero = Constant <value_ints = [0]> ()
    rows = Unsqueeze (hidden, zero)
    both = chunkrt.DynamicLinear (rows, gate_up, gate_up_scale)
    gated = chunkrt.SplitSiluMul (both)
    results = chunkrt.DynamicLinear (gated, down, down_scale)
    weights = chunkrt.Route <top_k: int = @top_k, norm_topk_prob: int = @norm_topk_prob> (router_logits)
    output = chunkrt.SumExperts (results, weights)
}

<domain: "chunkrt", opset_import: ["": 23]>
SplitSiluMul (both) => (gated)
{
    gate, up = Split <axis = -1, num_outputs = 2> (both)
    squashed = Sigmoid (gate)
    active = Mul (gate, squashed)
    gated = Mul (active, up)
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
