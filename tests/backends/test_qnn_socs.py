"""The table of SoCs against Qualcomm's own compiler, which writes its target into each context."""

import re

import onnx
import pytest
from onnx import TensorProto, helper

import chunkrt.backends.qnn.library as library
from chunkrt.backends.qnn.socs import MIB, SOCS, WITHOUT_FLOAT16, Soc, find_soc
from chunkrt.errors import ConfigError

ROWS, DEPTH, COLUMNS = 32, 64, 48
NUMBERS_WITHOUT_FLOAT16 = {"SM8350": 30, "SM7675": 70, "SM8635": 68, "SM8735": 85, "QCS6490": 93}


@pytest.fixture(scope="module")
def model():
    """A norm in float16, a linear in 16 bits, and its square in float16."""
    weight = [i % 255 - 127 for i in range(DEPTH * COLUMNS)]
    constants = {
        "norm": helper.make_tensor("norm", TensorProto.FLOAT, [DEPTH], [1.0] * DEPTH),
        "step": helper.make_tensor("step", TensorProto.FLOAT, [], [1 / 32639]),
        "zero": helper.make_tensor("zero", TensorProto.UINT16, [], [32768]),
        "w": helper.make_tensor("w", TensorProto.INT8, [DEPTH, COLUMNS], weight),
        "scale": helper.make_tensor("scale", TensorProto.FLOAT, [COLUMNS], [1e-4] * COLUMNS),
    }
    nodes = [
        helper.make_node("Cast", ["x"], ["x32"], to=TensorProto.FLOAT),
        helper.make_node("RMSNormalization", ["x32", "norm"], ["normal"], axis=-1, epsilon=1e-5),
        helper.make_node("QuantizeLinear", ["normal", "step", "zero"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "step", "zero"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "scale"], ["wd"], axis=1),
        helper.make_node("MatMul", ["xd", "wd"], ["product"]),
        helper.make_node("QuantizeLinear", ["product", "step", "zero"], ["yq"]),
        helper.make_node("DequantizeLinear", ["yq", "step", "zero"], ["yd"]),
        helper.make_node("Mul", ["yd", "yd"], ["y32"]),
        helper.make_node("Cast", ["y32"], ["y"], to=TensorProto.FLOAT16),
    ]
    graph = helper.make_graph(
        nodes,
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT16, [ROWS, DEPTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, [ROWS, COLUMNS])],
        list(constants.values()),
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.checker.check_model(made, full_check=True)
    return made.SerializeToString()


def compiled(htp, soc, model, folder):
    """Return the compiler's properties of its target, as text by name."""
    library.open_session(htp, soc, model, options={}, write_context=folder / "context.onnx")
    (binary,) = folder.glob("*.bin")
    found = re.findall(rb"[;=]?\b(soc_type|min_arch|vtcm_size|memory_alloc_limit)=(\w+);", binary.read_bytes())
    return {name.decode(): value.decode() for name, value in found}


@pytest.mark.parametrize("soc", SOCS.values(), ids=SOCS)
def test_compiler_agrees_with_the_table(htp, soc, model, tmp_path):
    assert compiled(htp, soc, model, tmp_path) == {
        "soc_type": soc.name,
        "min_arch": str(soc.htp_arch),
        "vtcm_size": str(soc.vtcm_bytes),
        "memory_alloc_limit": str(soc.npu_window_bytes // MIB),
    }


@pytest.mark.parametrize("name", WITHOUT_FLOAT16)
def test_compiler_and_table_refuse_float16_on_the_same_socs(htp, name, model, tmp_path):
    soc = Soc(name=name, products=(), soc_model=NUMBERS_WITHOUT_FLOAT16[name], htp_arch=73)
    with pytest.raises(Exception, match=r"fallback to CPU EP has been|Failed to finalize QNN graph"):
        compiled(htp, soc, model, tmp_path)
    with pytest.raises(ConfigError, match=rf"the NPU of {name} has no float16.*choose one of: SM8450,"):
        find_soc(name.lower())


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("SM8650", "SM8650"),
        ("sm8650", "SM8650"),
        ("8gen3", "SM8650"),
        ("Snapdragon 8 Gen 3", "SM8650"),
        ("8+ Gen 1", "SM8475"),
        ("8 gen 1", "SM8450"),
        ("8-elite", "SM8750"),
        ("8 Elite Gen 5", "SM8850"),
        ("x-elite", "SC8380XP"),
        ("Snapdragon X Plus", "SC8380XP"),
        ("Qualcomm Snapdragon X2 Elite", "SC8480XP"),
        ("QCS9075", "QCS9100"),
        ("X1E80100", "SC8380XP"),
        ("X1P-42-100", "SC8380XP"),
        ("X126100", "SC8380XP"),
        ("X2E96100", "SC8480XP"),
        ("SA8775P", "SA8255"),
    ],
)
def test_soc_has_several_names(alias, name):
    assert find_soc(alias) is SOCS[name]


def test_names_are_unambiguous():
    names = [name for soc in SOCS.values() for name in (soc.name, *soc.products, *soc.marks)]
    assert len({find_soc(name).name for name in names}) == len(SOCS)
    assert len(set(names)) == len(names)
    assert len({soc.soc_model for soc in SOCS.values()}) == len(SOCS)
    assert not set(SOCS) & set(WITHOUT_FLOAT16)


@pytest.mark.parametrize("name", ["SM8651", "sm8651"])
def test_unknown_soc_lists_all(name):
    with pytest.raises(ConfigError, match=r"unknown SoC 'SM8651'; did you mean 'SM8650'\? there are: .*, SA8255$"):
        find_soc(name)


@pytest.mark.parametrize("name", ["", "8s Gen 3", "Snapdragon", "pentium", "X1Eighty", "X3E1"])
def test_inexact_names_are_refused(name):
    with pytest.raises(ConfigError, match="SM8650"):
        find_soc(name)
