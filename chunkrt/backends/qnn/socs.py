"""SoCs that contexts can be compiled for, with Qualcomm's numbers and the limits on a model's size.

The numbers come from `Qnn_SocModel_t` in Qualcomm's QnnTypes.h, or from its compiler for newer SoCs. The compiler of
onnxruntime-qnn 2.7.0 writes its data about the target into each context. Names, minimum architectures, VTCM and memory
limits come from these data, and tests compare them. Where other sources contradict the compiler, the compiler takes
precedence (some sources call SM8735 a v79; the compiler reports v73, without float16). Products, cores and RAM come
from public sources and are not checked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from chunkrt.errors import ConfigError, unknown_name

MIB = 2**20
GB = 10**9


@dataclass(frozen=True, kw_only=True)
class Soc:
    """A system on a chip with a Hexagon NPU.

    name: Qualcomm's name, e.g. "SM8650".
    products: its product names, without "Snapdragon".
    marks: prefixes of the names that operating systems report, if they differ from `name`.
    soc_model: its number in Qualcomm's headers.
    htp_arch: the version of its tensor processor, e.g. 75 for v75.
    vtcm_bytes: size of the NPU's own fast memory.
    npu_window_bytes: number of bytes that one session on the NPU can address, according to the compiler.
    num_cores: number of CPU cores.
    typical_ram_bytes: estimated RAM of typical devices with this SoC.
    """

    name: str
    products: tuple[str, ...]
    marks: tuple[str, ...] = ()
    soc_model: int
    htp_arch: int
    npu_window_bytes: int = 3584 * MIB
    vtcm_bytes: int = 8 * MIB
    num_cores: int = 8
    typical_ram_bytes: int = 12 * GB


V69_WINDOW_BYTES = 2048 * MIB

SOCS = {
    soc.name: soc
    for soc in (
        Soc(
            name="SM8450",
            products=("8 Gen 1",),
            soc_model=36,
            htp_arch=69,
            npu_window_bytes=V69_WINDOW_BYTES,
            typical_ram_bytes=8 * GB,
        ),
        Soc(
            name="SM8475",
            products=("8+ Gen 1",),
            soc_model=42,
            htp_arch=69,
            npu_window_bytes=V69_WINDOW_BYTES,
            typical_ram_bytes=8 * GB,
        ),
        Soc(name="SM8550", products=("8 Gen 2",), soc_model=43, htp_arch=73),
        Soc(name="SM8650", products=("8 Gen 3",), soc_model=57, htp_arch=75),
        Soc(name="SM8750", products=("8 Elite",), soc_model=69, htp_arch=79),
        Soc(name="SM8845", products=("8 Gen 5",), soc_model=97, htp_arch=81),
        Soc(name="SM8850", products=("8 Elite Gen 5",), soc_model=87, htp_arch=81),
        Soc(
            name="SC8380XP",
            products=("X Elite", "X Plus", "X"),
            marks=("X1E", "X1P", "X126", "SC8340XP"),
            soc_model=60,
            htp_arch=73,
            num_cores=12,
            typical_ram_bytes=16 * GB,
        ),
        Soc(
            name="SC8480XP",
            products=("X2 Elite", "X2 Plus"),
            marks=("X2E", "X2P"),
            soc_model=88,
            htp_arch=81,
            num_cores=18,
            typical_ram_bytes=32 * GB,
        ),
        Soc(name="QCS8550", products=(), soc_model=66, htp_arch=73),
        Soc(name="QCS8300", products=("IQ-8275",), marks=("QCS8275",), soc_model=82, htp_arch=75),
        Soc(
            name="QCS9100",
            products=("IQ-9075",),
            marks=("QCS9075",),
            soc_model=77,
            htp_arch=73,
            typical_ram_bytes=16 * GB,
        ),
        Soc(
            name="SA8255",
            products=(),
            marks=("SA8255P", "SA8775", "SA8775P"),
            soc_model=52,
            htp_arch=73,
            typical_ram_bytes=16 * GB,
        ),
    )
}

WITHOUT_FLOAT16 = {"SM8350": "888", "SM7675": "7+ Gen 3", "SM8635": "8s Gen 3", "SM8735": "8s Gen 4", "QCS6490": ""}
"""Product names, by name, of SoCs whose NPU does not support float16, which values between linears need."""


def find_soc(name: str) -> Soc:
    """Find an SoC by its name, a product's name or the name on the chip, ignoring case: "SM8650", "8gen3", "sd8gen3",
    "Snapdragon 8 Gen 3", "X1E80100".

    Raises:
        ConfigError: no SoC has that name (the message suggests the nearest name and lists all names), or the SoC's NPU
            does not support float16.
    """
    known = {_plain(alias): soc for soc in SOCS.values() for alias in (soc.name, *soc.products, *soc.marks)}
    if soc := known.get(_plain(name)):
        return soc
    chip = re.match(r"(x\d[ep]|x126)\d+$", _plain(name))  # X1E80100: a mark, and the model's number
    if chip and (soc := known.get(chip[1])):
        return soc
    for other, product in WITHOUT_FLOAT16.items():
        if _plain(name) in {_plain(other), _plain(product)} - {""}:
            raise ConfigError(
                f"the NPU of {other} has no float16, which models need between their linear layers; run with --npu "
                "native, "
                f"or choose one of: {', '.join(SOCS)}"
            )
    raise unknown_name("SoC", name.upper(), SOCS)


def _plain(name: str) -> str:
    letters = "".join(c for c in name.lower() if c.isalnum() or c == "+")
    return letters.removeprefix("qualcomm").removeprefix("snapdragon").removeprefix("sd")
