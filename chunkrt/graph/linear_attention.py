"""The kinds of linear attention: properties that distinguish the values of `attn_type` of `chunkrt::LinearAttention`.

All kinds share one operator: a causal convolution over each channel, whose last inputs are state, and for some kinds a
recurrence with a state matrix for each head. A new kind is registered here with its expansion into standard ONNX, and
with each backend that will run it (`backends/recurrences.py` for the reference); the shared code does not know its
name.
"""

from __future__ import annotations

from dataclasses import dataclass

from chunkrt.errors import ConfigError, UnsupportedModelError

LINEAR_ATTENTION_OP = "LinearAttention"
"""Name of linear attention's operator in chunkrt's domain."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One kind of linear attention.

    Attributes:
        columns_per_channel: number of the input's columns for each channel of the convolution (3 if the convolution is
            multiplied by a gate before and after it).
        is_recurrent: True if each head has a state matrix.
        num_gates: number of the inputs gate and beta that are present; None if it varies.
        has_skip: True if the operator has the input skip.
        is_row_by_row: True if splitting rows into calls in another way changes no bit of a recurrent kind's results.
        expansion: the body of an ONNX function in ONNX's text form, opset 23, which may call
            `chunkrt.CausalConvolution`. Its inputs are qkv, gate, beta, conv_weight, conv_bias (a zero if the node has
            none), conv_state, recurrent_state and, if `has_skip`, skip. Its attributes are the operator's. Its outputs
            are output, new_conv_state and, for a recurrent kind, new_recurrent_state. If the expansion is empty,
            `onnxrt` refuses the kind.
    """

    columns_per_channel: int
    is_recurrent: bool
    num_gates: int | None = None
    has_skip: bool = False
    is_row_by_row: bool = False
    expansion: str = ""


_SHORT_CONV = """{
    # three columns a channel: a gate before the convolution, one after it, and the convolved input
    before, after, x = Split <axis = 1, num_outputs = 3> (qkv)
    gated = Mul (before, x)
    convolved, new_conv_state = chunkrt.CausalConvolution (gated, conv_weight, conv_bias, conv_state)
    output = Mul (after, convolved)
}"""

_HEADS = """{
    convolved, new_conv_state = chunkrt.CausalConvolution (qkv, conv_weight, conv_bias, conv_state)
    squashed = Sigmoid (convolved)
    active = Mul (convolved, squashed)

    # columns q | k | v to heads [T, heads, dim]
    one = Constant <value_ints = [1]> ()
    minus_one = Constant <value_ints = [-1]> ()
    num_k_scalar = Constant <value_int: int = @num_k_heads> ()
    num_v_scalar = Constant <value_int: int = @num_v_heads> ()
    k_dim_scalar = Constant <value_int: int = @head_k_dim> ()
    v_dim_scalar = Constant <value_int: int = @head_v_dim> ()
    num_k = Reshape (num_k_scalar, one)
    num_v = Reshape (num_v_scalar, one)
    k_dim = Reshape (k_dim_scalar, one)
    v_dim = Reshape (v_dim_scalar, one)
    all_k = Mul (num_k, k_dim)
    all_v = Mul (num_v, v_dim)
    widths = Concat <axis = 0> (all_k, all_k, all_v)
    q_flat, k_flat, v_flat = Split <axis = 1> (active, widths)
    k_heads = Concat <axis = 0> (minus_one, num_k, one, k_dim)
    v_heads = Concat <axis = 0> (minus_one, num_v, v_dim)
    q_of_k_heads = Reshape (q_flat, k_heads)
    k_of_k_heads = Reshape (k_flat, k_heads)
    v = Reshape (v_flat, v_heads)
"""
"""Start of the expansion of a recurrence: the convolution, SiLU, and the columns q | k | v as heads."""

_SHARED_HEADS = """
    # value head h goes with key head floor(h / (Hv / Hk))
    num_shared = Div (num_v, num_k)
    repeats = Concat <axis = 0> (one, one, num_shared, one)
    q_repeated = Expand (q_scaled, repeats)
    k_repeated = Expand (k_normed, repeats)
    by_v_head = Concat <axis = 0> (minus_one, num_v, k_dim)
    q = Reshape (q_repeated, by_v_head)
    k = Reshape (k_repeated, by_v_head)
"""
"""Part of an expansion that repeats the heads of q_scaled and k_normed for each value head."""

_FLAT_OUTPUT = """
    flat = Concat <axis = 0> (minus_one, all_v)
    output = Reshape (outputs, flat)
}"""

_GATED_DELTA_RULE = (
    _HEADS
    + """
    # to unit length, if asked for
    last = Constant <value_ints = [-1]> ()
    tiny = Constant <value_float = 1e-6> ()
    q_lengths2 = ReduceSumSquare <keepdims = 1> (q_of_k_heads, last)
    k_lengths2 = ReduceSumSquare <keepdims = 1> (k_of_k_heads, last)
    q_safe2 = Add (q_lengths2, tiny)
    k_safe2 = Add (k_lengths2, tiny)
    q_lengths = Sqrt (q_safe2)
    k_lengths = Sqrt (k_safe2)
    q_unit = Div (q_of_k_heads, q_lengths)
    k_unit = Div (k_of_k_heads, k_lengths)
    is_normed_int = Constant <value_int: int = @use_qk_l2norm> ()
    is_normed = Cast <to = 9> (is_normed_int)
    q_normed = Where (is_normed, q_unit, q_of_k_heads)
    k_normed = Where (is_normed, k_unit, k_of_k_heads)
    k_dim_float = CastLike (k_dim_scalar, qkv)
    root = Sqrt (k_dim_float)
    q_scaled = Div (q_normed, root)
"""
    + _SHARED_HEADS
    + """
    decay = Exp (gate)
    new_recurrent_state, outputs = Scan <num_scan_inputs = 5, body = row
        (float[h, m, n] s, float[h, m] q_t, float[h, m] k_t, float[h, n] v_t, float[h] decay_t, float[h] beta_t)
        => (float[h, m, n] new_s, float[h, n] o_t)
    {
        first = Constant <value_ints = [1]> ()
        second = Constant <value_ints = [2]> ()
        both = Constant <value_ints = [1, 2]> ()
        decay_b = Unsqueeze (decay_t, both)
        decayed = Mul (s, decay_b)
        k_row = Unsqueeze (k_t, first)
        recalled = MatMul (k_row, decayed)
        v_row = Unsqueeze (v_t, first)
        difference = Sub (v_row, recalled)
        beta_b = Unsqueeze (beta_t, both)
        delta = Mul (difference, beta_b)
        k_column = Unsqueeze (k_t, second)
        written = MatMul (k_column, delta)
        new_s = Add (decayed, written)
        q_row = Unsqueeze (q_t, first)
        read = MatMul (q_row, new_s)
        o_t = Squeeze (read, first)
    }> (recurrent_state, q, k, v, decay, beta)
"""
    + _FLAT_OUTPUT
)

_MAMBA2 = (
    _HEADS
    + """
    q_scaled = Identity (q_of_k_heads)
    k_normed = Identity (k_of_k_heads)
"""
    + _SHARED_HEADS
    + """
    decay = Exp (gate)
    new_recurrent_state, reads = Scan <num_scan_inputs = 5, body = row
        (float[h, m, n] s, float[h, m] q_t, float[h, m] k_t, float[h, n] v_t, float[h] decay_t, float[h] step_t)
        => (float[h, m, n] new_s, float[h, n] o_t)
    {
        first = Constant <value_ints = [1]> ()
        second = Constant <value_ints = [2]> ()
        both = Constant <value_ints = [1, 2]> ()
        decay_b = Unsqueeze (decay_t, both)
        decayed = Mul (s, decay_b)
        v_row = Unsqueeze (v_t, first)
        step_b = Unsqueeze (step_t, both)
        stepped = Mul (v_row, step_b)
        k_column = Unsqueeze (k_t, second)
        written = MatMul (k_column, stepped)
        new_s = Add (decayed, written)
        q_row = Unsqueeze (q_t, first)
        read = MatMul (q_row, new_s)
        o_t = Squeeze (read, first)
    }> (recurrent_state, q, k, v, decay, beta)
    skip_column = Unsqueeze (skip, one)
    skipped = Mul (v, skip_column)
    outputs = Add (reads, skipped)
"""
    + _FLAT_OUTPUT
)

_SILU_CONV = """{
    convolved, new_conv_state = chunkrt.CausalConvolution (qkv, conv_weight, conv_bias, conv_state)
    squashed = Sigmoid (convolved)
    output = Mul (convolved, squashed)
}"""

_variants = {
    "short_conv": Variant(columns_per_channel=3, is_recurrent=False, expansion=_SHORT_CONV),
    "silu_conv": Variant(columns_per_channel=1, is_recurrent=False, expansion=_SILU_CONV),
    "gated_delta_rule": Variant(columns_per_channel=1, is_recurrent=True, num_gates=2, expansion=_GATED_DELTA_RULE),
    "mamba2": Variant(
        columns_per_channel=1,
        is_recurrent=True,
        num_gates=2,
        has_skip=True,
        is_row_by_row=True,
        expansion=_MAMBA2,
    ),
}


def register_variant(attn_type: str, variant: Variant) -> None:
    """Register a kind of linear attention. Raises ConfigError if the name is already registered."""
    if attn_type in _variants:
        raise ConfigError(f"the attn_type {attn_type!r} is already registered")
    _variants[attn_type] = variant


def find_variant(attn_type: str) -> Variant:
    """Return the kind with a name; if the name is unknown, import plug-ins' families, which may register it.

    Raises:
        UnsupportedModelError: no such kind is registered.
    """
    if attn_type not in _variants:
        from chunkrt.graph.decoders import PLUGINS  # a compiled model runs without the family that built it

        PLUGINS.load_all()
    if attn_type not in _variants:
        raise UnsupportedModelError(f"attn_type {attn_type!r} is unknown; known: {', '.join(sorted(_variants))}")
    return _variants[attn_type]
