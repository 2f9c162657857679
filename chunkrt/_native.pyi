"""chunkrt's C++ core: programs of kernels over a thread pool; its sources are in csrc/.

Operands of `ProgramBuilder` are values: numbers that its functions return. Every function raises ValueError for
operands that do not fit. The function `ProgramBuilder.linear` is `linear` in csrc/program/operators/linear.cc, and so
on; csrc/bindings/program.cc binds them. `Program.run` is `Program::run` in csrc/program/program.cc.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

def architecture() -> str: ...
def built_isas() -> dict[str, bool]: ...
def present_isas() -> dict[str, bool]: ...
def supported_isas() -> dict[str, bool]: ...
def selected_kernels() -> dict[str, str]: ...

class ThreadPool:
    def __init__(self, budget: int) -> None: ...
    @property
    def budget(self) -> int: ...

class StepTimes:
    """How long the steps of programs took that were built with it, over all their runs and threads."""

    def __init__(self) -> None: ...
    def take(self) -> tuple[int, dict[str, int]]:
        """Nanoseconds since the last call: how long callers were in programs, and by name, over all threads.

        "between_steps" is what callers spent in programs beside steps: they open loops, and wait for a turn and for
        other threads. Runs that failed are not counted.
        """

class AdapterTables:
    """The factors of loaded LoRA adapters, which programs find by number. Every thread may call the methods."""

    def __init__(self) -> None: ...
    def add(self, number: int, factors: Mapping[str, tuple[NDArray[Any], NDArray[Any], NDArray[Any], int]]) -> None:
        """Add an adapter. The arrays are not copied.

        Args:
            number: a number of 1 or more that is not in use.
            factors: by the name of a weight [K, N]: a float32 [blocks of 16 ranks, K, 16]; b float32 [stored rows, 16];
                for each block of 16 columns its first rank and its number of ranks, int64 [ceil(N / 16), 2]; and N. The
                rows of b are those of the first block of columns, then those of the second one, and so on.

        Raises:
            ValueError: the arrays do not fit, a weight has more than 2048 ranks, or the number is in use.
        """
    def remove(self, number: int) -> None:
        """Remove an adapter that no run uses."""

class Program:
    """A compiled subgraph: the class `Program` in csrc/program/program.h."""

    def run(self, inputs: Sequence[NDArray[Any]], outputs: Sequence[NDArray[Any]]) -> None:
        """Compute the outputs without the GIL. Inputs, states included, and outputs stand in declared order.

        Raises:
            ValueError: an array is not what was declared.
            IndexError: an index or a position is out of range. Nothing has been written then.
        """
    def run_segments(
        self,
        inputs: Sequence[NDArray[Any]],
        outputs: Sequence[NDArray[Any]],
        segments: Sequence[tuple[int, Sequence[NDArray[Any]]]],
    ) -> None:
        """As `run`, for rows of several sequences, with the bits that each alone would give.

        Args:
            inputs: those with rows, of the whole chunk, in declared order.
            segments: consecutive rows that are one sequence's: how many, and the sequence's states and inputs without
                rows, in declared order.

        Raises:
            ValueError: also if the segments' rows together are not T, or if two share a state's memory.
        """
    @property
    def arena_bytes(self) -> int: ...
    @property
    def num_loops(self) -> int: ...
    @property
    def step_names(self) -> list[list[str]]:
        """Of each loop the names of its steps."""

class ProgramBuilder:
    def __init__(self, pool: ThreadPool, max_rows: int, times: StepTimes | None = None) -> None: ...
    def input(self, name: str, dtype: str, shape: Sequence[int | str]) -> int: ...
    def state(self, name: str, shape: Sequence[int | str]) -> int: ...
    def constant(self, array: NDArray[Any]) -> int: ...
    def output(self, name: str, value: int) -> None: ...
    def gather(self, table: int, indices: int) -> int: ...
    def gather_share(self, table: int, indices: int, *, first: int, all_rows: int) -> int: ...
    def pick_columns(self, input: int, ranges: Sequence[tuple[int, int]]) -> int: ...
    def rms_norm(self, input: int, weight: int, epsilon: float) -> int: ...
    def layer_norm(self, input: int, weight: int, bias: int, epsilon: float) -> int: ...
    def add_positions(self, input: int, table: int, position: int) -> int: ...
    def head_norm(self, input: int, weight: int, epsilon: float) -> int: ...
    def linear(
        self,
        input: int,
        packed: int,
        scales: int,
        bias: int | None = None,
        residual: int | None = None,
        num_digits: int = 1,
        input_step: float | None = None,
        multipliers: int | None = None,
    ) -> int: ...
    def float_linear(self, input: int, weight: int) -> int: ...
    def low_rank_sum(self, product: int, input: int, adapters: int, tables: AdapterTables, weight: str) -> int: ...
    def block_linear(
        self,
        input: int,
        packed: int,
        block_scales: int,
        columns: int,
        bias: int | None = None,
        residual: int | None = None,
    ) -> int: ...
    def shadow_linear(self, input: int, packed: int, scales: int, input_step: float, hot_channels: int) -> int: ...
    def routed_experts(
        self,
        hidden: int,
        router_logits: int,
        gate_up: int,
        gate_up_scales: int,
        down: int,
        down_scales: int,
        selection_bias: int | None = None,
        gate_up_bias: int | None = None,
        down_bias: int | None = None,
        *,
        top_k: int,
        norm_topk_prob: bool,
        use_sigmoid: bool = False,
        norm_epsilon: float = 0.0,
        swiglu_alpha: float = 1.0,
        swiglu_limit: float = 0.0,
        uses_gelu: bool = False,
        num_groups: int = 1,
        top_groups: int = 1,
        best_of_group: int = 1,
    ) -> int: ...
    def add(self, left: int, right: int) -> int: ...
    def mul(self, left: int, right: int) -> int: ...
    def sigmoid(self, input: int) -> int: ...
    def gelu(self, input: int) -> int: ...
    def thresholded_relu(self, input: int, threshold: float) -> int: ...
    def erf_gelu(self, input: int) -> int: ...
    def quick_gelu(self, input: int) -> int: ...
    def xielu(self, input: int, parameters: int) -> int: ...
    def relu(self, input: int) -> int: ...
    def softplus(self, input: int) -> int: ...
    def tanh(self, input: int) -> int: ...
    def round_to_grid(self, input: int, step: int, levels: int) -> int: ...
    def silu_mul(self, input: int) -> int: ...
    def gelu_mul(self, input: int) -> int: ...
    def columns(self, input: int, begin: int, width: int) -> int: ...
    def concat(self, inputs: Sequence[int]) -> int: ...
    def attention(
        self,
        qkv: int,
        position: int,
        table_row: int,
        cos: int,
        sin: int,
        key_cache: int,
        value_cache: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        soft_cap: float = 0.0,
        window: int = 0,
        has_raw_keys: bool = False,
        math: str = "float32",
        qkv_bias: int | None = None,
        sinks: int | None = None,
        appends: bool = True,
        rope_period: int = 0,
        rope_limit: int = 0,
        long_context_from: int = 0,
    ) -> int: ...
    def silu_conv(self, x: int, conv_weight: int, conv_bias: int | None, conv_state: int) -> int: ...
    def selective_scan(self, x: int, step: int, bc: int, rates: int, skip: int, state: int) -> int: ...
    def short_conv(self, bcx: int, conv_weight: int, conv_bias: int | None, conv_state: int) -> int: ...
    def mamba2(
        self,
        cbx: int,
        gate: int,
        step: int,
        conv_weight: int,
        conv_bias: int | None,
        conv_state: int,
        recurrent_state: int,
        skip: int,
        *,
        num_groups: int,
        num_heads: int,
        state_dim: int,
        head_dim: int,
    ) -> int: ...
    def gated_delta_rule(
        self,
        qkv: int,
        gate: int,
        beta: int,
        conv_weight: int,
        conv_bias: int | None,
        conv_state: int,
        recurrent_state: int,
        *,
        num_k_heads: int,
        num_v_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        use_qk_l2norm: bool,
    ) -> int: ...
    def build(self) -> Program: ...
