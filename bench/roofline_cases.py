"""The measured kernels and their shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GEMM_SHAPES = {
    "SmolLM2-135M": {"qkv": (576, 960), "o": (576, 576), "gate_up": (576, 3072), "down": (1536, 576)},
    "Qwen2.5-1.5B": {"qkv": (1536, 2048), "o": (1536, 1536), "gate_up": (1536, 17920), "down": (8960, 1536)},
}
"""Depth and columns of each linear."""

ROWS = (1, 8, 32, 128)
CHUNK = 32
DECODERS = {"SmolLM2-135M": (576, 1536, 9, 3, 64), "Qwen2.5-1.5B": (1536, 8960, 12, 2, 128)}
"""Hidden size, intermediate size, heads, KV heads, head_dim."""

POSITIONS = (0, 480, 2016)


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """One measurement of a kernel.

    line: request to the probe, without the threads. work: of one call, in billionths of the unit. kind: type of the
    peak for comparison; None: bandwidth alone. read_bytes: bytes that a call reads, or reads and writes. walked_bytes:
    bytes of the region that calls cycle through; they determine the cache that it reads from.
    """

    kernel: str
    what: str
    line: str
    unit: str
    work: float
    kind: Literal["int8", "bfloat16", "float32"] | None
    read_bytes: float
    walked_bytes: float


def kernel_cases(ring_bytes: int, *, with_bfloat16: bool) -> list[KernelCase]:
    """Return all measurements; attention in bfloat16 only on processors with instructions for its products."""
    attention = [*_attention_cases("float32"), *(_attention_cases("bfloat16") if with_bfloat16 else [])]
    return [*_gemm_cases(ring_bytes), *attention, *_row_cases()]


def _gemm_cases(ring_bytes: int) -> list[KernelCase]:
    return [
        KernelCase(
            kernel="gemm",
            what=f"{model} {name} {depth} x {columns}, M = {rows}, {weights}",
            line=f"gemm {rows} {depth} {columns} {weights}",
            unit="GMAC/s",
            work=rows * depth * columns,
            kind="int8",
            read_bytes=depth * columns,
            walked_bytes=depth * columns if weights == "hot" else ring_bytes,
        )
        for model, linears in GEMM_SHAPES.items()
        for name, (depth, columns) in linears.items()
        for rows in ROWS
        for weights in ("hot", "streamed")
    ]


def _attention_cases(math: Literal["bfloat16", "float32"]) -> list[KernelCase]:
    cases, kernel = [], "attention" if math == "float32" else f"attention_{math}"
    for model, (_, _, heads, kv_heads, head_dim) in DECODERS.items():
        for position in POSITIONS:
            pairs = CHUNK * position + CHUNK * (CHUNK + 1) // 2
            cache_bytes = 2 * 2 * kv_heads * head_dim * (position + CHUNK)  # keys and values, two bytes each
            cases.append(
                KernelCase(
                    kernel=kernel,
                    what=f"{model}, {CHUNK} rows at {position}",
                    line=f"{kernel} {CHUNK} {position} {heads} {kv_heads} {head_dim}",
                    unit="GFLOP/s",
                    work=4 * pairs * heads * head_dim,
                    kind=math,
                    read_bytes=cache_bytes,
                    walked_bytes=cache_bytes,
                )
            )
    return cases


def _row_cases() -> list[KernelCase]:
    """Return measurements of kernels that go over rows once: bytes read and written count."""
    cases = []
    for model, (hidden, intermediate, *_) in DECODERS.items():
        for kernel, width, bytes_per_element in (
            ("rms_norm", hidden, 8),
            ("quantize", hidden, 5),
            ("silu_mul", intermediate, 12),
        ):
            num_bytes = CHUNK * width * bytes_per_element
            cases.append(
                KernelCase(
                    kernel=kernel,
                    what=f"{model}, {CHUNK} x {width}",
                    line=f"{kernel} {CHUNK} {width}",
                    unit="GB/s",
                    work=num_bytes,
                    kind=None,
                    read_bytes=num_bytes,
                    walked_bytes=num_bytes,
                )
            )
    return cases
