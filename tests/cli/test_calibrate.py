"""Tests of `chunkrt calibrate`: output, written files and errors."""

import json
import os
import shutil
import threading

import numpy as np
import pytest
import tokenizers
from fixture_checkpoints import checkpoint, expected_logits, input_ids
from one_line import expect_one_line

import chunkrt
from chunkrt.checkpoints.checkpoint import open_checkpoint
from chunkrt.compile import calibrate as calibration_module
from chunkrt.compile.calibration_tokens import DEFAULT_NUM_TOKENS
from chunkrt.compile.compiler import compile_checkpoint, plan_checkpoint
from chunkrt.graph.plan import linear_nodes
from chunkrt.quant import residual_scaling
from chunkrt.quant.calibration import Calibration
from chunkrt.quant.scheme import SCHEMES, Recipe
from chunkrt.tokenizer import Tokenizer

GGUF, FOLDER = checkpoint("llama_biased_gguf"), checkpoint("llama_gqa")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "calibrations"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Eine kleine Geschichte.\n\nUnd noch eine.", "utf-8")
    return path


def test_calibrate_prints_a_summary_and_writes_a_file(command, cache, text):
    finished = command("calibrate", GGUF, "--text", text)
    assert (finished.status, finished.err) == (0, "")
    (path,) = cache.iterdir()
    made = Calibration.load(path)
    assert finished.out.splitlines()[-1] == f"saved to {path}"
    assert f"{made.token_ids.size} tokens, {len(made.peaks)} values, limits by mse" in finished.out
    assert f"widest: {max(made.peaks, key=made.peaks.get)}, " in finished.out


def test_calibrate_json_equals_the_file(command, cache, text):
    finished = command("calibrate", GGUF, "--text", text, "--method", "mse", "--tokens", 12, "--json")
    assert (finished.status, finished.err) == (0, "")
    (path,) = cache.iterdir()
    made, summary = Calibration.load(path), json.loads(finished.out)
    widest = max(made.peaks, key=made.peaks.get)
    rows = summary.pop("most_uneven")
    assert summary == {
        "model": str(GGUF),
        "method": "mse",
        "tokens": 12,
        "values": len(made.peaks),
        "widest": {"name": widest, "peak": made.peaks[widest]},
        "residual_stream": {"peak": stream_peak(made), "exponent": 0, "obstacle": None},
        "path": str(path),
    }
    ratios = {name: limits.max() / np.median(limits) for name, limits in made.column_peaks.items()}
    assert [row["ratio"] for row in rows] == pytest.approx(sorted(ratios.values(), reverse=True)[:5])
    linears = linear_nodes(plan_checkpoint(GGUF, {}).plan)
    for row in rows:
        node = linears[f"{row['linear']}.weight"]
        limits = made.column_peaks[node.outputs[0]]
        assert (row["input"], row["input_limit"]) == (made.peaks[node.inputs[0]], made.limits[node.inputs[0]])
        assert row["largest_column"] == limits.max()
        assert row["median_column"] == np.median(limits)


def stream_peak(calibration):
    """Peaks of the embeddings, of the values added to them, and of the sums."""
    added = (f"{linear}.{value}" for linear in ("o_proj", "down_proj") for value in ("product", "output"))
    stream = ("embed_tokens.output", *added, "attention_residual", "layers.0.output", "layers.1.output")
    return max(peak for name, peak in calibration.peaks.items() if name.endswith(stream))


def test_calibrate_reports_the_scale_of_the_residual_stream(command, text, monkeypatch):
    finished = command("calibrate", GGUF, "--text", text)
    (line,) = (line for line in finished.out.splitlines() if line.startswith("the residual stream reaches "))
    assert line.endswith(" and keeps its scale (float16's largest value is 65504)")
    peak = float(line.split()[4])
    monkeypatch.setattr(residual_scaling, "HEADROOM", 65_504 / peak * 3)
    finished = command("calibrate", GGUF, "--text", text)
    assert f"the residual stream reaches {peak:.6g} and is scaled by 2^-2, to {peak / 4:.6g}\n" in finished.out
    summary = json.loads(command("calibrate", GGUF, "--text", text, "--json").out)
    assert summary["residual_stream"]["exponent"] == 2


def test_calibrate_writes_a_copy_with_output(command, cache, text, tmp_path):
    finished = command("calibrate", GGUF, "--text", text, "-o", tmp_path / "mine.npz")
    assert finished.out.splitlines()[-1] == f"saved to {tmp_path / 'mine.npz'}"
    (path,) = cache.iterdir()
    assert Calibration.load(tmp_path / "mine.npz").limits == Calibration.load(path).limits


def test_calibrate_uses_the_built_in_text_by_default(command, cache):
    assert json.loads(command("calibrate", GGUF, "--json").out)["tokens"] == DEFAULT_NUM_TOKENS


IDS = np.arange(300) * 7 % 128
"""Token ids for llama_gqa, which has no tokenizer."""


@pytest.mark.parametrize("kind", ["array", "rows", "lists", "numbers"])
def test_calibrate_on_ids_needs_no_tokenizer(command, tmp_path, kind):
    path, made = tmp_path / "ids", tmp_path / "made.npz"
    if kind in ("array", "rows"):
        with path.open("wb") as file:
            np.save(file, IDS.astype(np.uint16) if kind == "array" else IDS.reshape(6, 50))
    elif kind == "lists":
        path.write_text(f"{IDS[:7].tolist()}\n\n{IDS[7:].tolist()}\n")
    else:
        path.write_text(" ".join(map(str, IDS[:50])) + "\n" + ", ".join(map(str, IDS[50:])))
    finished = command("calibrate", FOLDER, "--ids", path, "--tokens", 290, "-o", made)
    assert (finished.status, finished.err) == (0, "")
    assert Calibration.load(made).token_ids.tolist() == IDS[:290].tolist()


def test_calibration_on_ids_compiles_a_model_without_a_tokenizer(command, tmp_path):
    np.save(tmp_path / "ids.npy", IDS)
    command("calibrate", FOLDER, "--ids", tmp_path / "ids.npy", "-o", tmp_path / "made.npz")
    expected = expected_logits("llama_gqa")
    for scheme in ("w8a16", "w4a16", "w8a8"):  # as calibrated, rotated, and equalised
        options = {"scheme": scheme, "calibration": tmp_path / "made.npz", "threads": 1}
        with chunkrt.load(FOLDER, **options) as engine, engine.session() as session:
            logits = session.prefill(input_ids("llama_gqa"), logits="all").logits
        assert np.corrcoef(logits.ravel(), expected.ravel())[0, 1] > 0.9


@pytest.fixture
def chat_folder(tmp_path):
    """A folder with a tokenizer, and a chat template that writes one letter for each role."""
    folder = shutil.copytree(FOLDER, tmp_path / "chat")
    (folder / "tokenizer.json").write_text(Tokenizer.from_source(open_checkpoint(GGUF)).to_json(), "utf-8")
    refusal = "{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}"
    template = f"{{% for m in messages %}}{refusal}{{{{ m.role[0] }}}}:{{{{ m.content }}}};{{% endfor %}}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def tokens_of(folder, *texts):
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [token for text in texts for token in library.encode(text, add_special_tokens=False).ids]


def test_calibrate_on_chats_renders_each_by_the_template(command, chat_folder, tmp_path):
    chats = [
        [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "yes"}],
        [{"role": "system", "content": "be short"}, {"role": "user", "content": "no"}],
    ]
    lines = [json.dumps({"messages": chats[0], "source": "mine"}), "", json.dumps(chats[1])]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    finished = command("calibrate", chat_folder, "--chats", tmp_path / "chats.jsonl", "-o", tmp_path / "made.npz")
    assert (finished.status, finished.err) == (0, "")
    expected = tokens_of(chat_folder, "u:Hello;a:yes;", "s:be short;u:no;")
    assert Calibration.load(tmp_path / "made.npz").token_ids.tolist() == expected


def test_calibrate_shares_the_tokens_among_files(command, chat_folder, tmp_path):
    """A short file leaves the rest of its share to the others."""
    (chat_folder / "tokenizer_config.json").unlink()
    for name, text in (("long", "to be or not " * 40), ("short", "yes"), ("other", "what is this " * 40)):
        (tmp_path / name).write_text(text)
    np.save(tmp_path / "ids.npy", IDS)
    files = [part for name in ("long", "short", "other") for part in ("--text", tmp_path / name)]
    num_short = len(tokens_of(chat_folder, "yes"))
    num_tokens = num_short + 90
    made = tmp_path / "made.npz"
    command("calibrate", chat_folder, *files, "--ids", tmp_path / "ids.npy", "--tokens", num_tokens, "-o", made)
    assert Calibration.load(made).token_ids.tolist() == [
        *tokens_of(chat_folder, "to be or not " * 40)[:30],
        *tokens_of(chat_folder, "yes"),
        *tokens_of(chat_folder, "what is this " * 40)[:30],
        *IDS[:30].tolist(),
    ]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("kind", ["text", "chats", "ids"])
def test_calibrate_reads_no_more_of_a_file_than_it_needs(command, chat_folder, tmp_path, kind):
    """The file is a pipe that would supply 2^25 characters."""
    line = {"text": "to be or not\n", "chats": '[{"role": "user", "content": "be"}]\n', "ids": "1 2 3\n"}[kind]
    os.mkfifo(tmp_path / "pipe")
    written = 0

    def write():
        nonlocal written
        try:
            with (tmp_path / "pipe").open("w", buffering=1 << 13) as pipe:
                while written < 1 << 25:
                    written += pipe.write(line)
        except BrokenPipeError:
            pass

    writer = threading.Thread(target=write)
    writer.start()
    finished = command("calibrate", chat_folder, f"--{kind}", tmp_path / "pipe", "--tokens", 100, "--json")
    writer.join()
    assert json.loads(finished.out)["tokens"] == 100
    assert written < 1 << 20


def test_calibrate_names_the_damaged_line(command, chat_folder, tmp_path):
    path = tmp_path / "file"
    for kind, content, message in [
        ("ids", "1 2\n3 -4", "file: line 2: '-4' is no token id"),
        ("ids", "1 2\n\n[3, 1.5]", "file: line 3: 1.5 is no token id"),
        ("ids", "[true]", "line 1: True is no token id"),
        ("ids", "[1, 2", "line 1: "),
        ("ids", "5\n[-1]", "line 2: token id -1 is outside the vocabulary of 128"),
        ("ids", "5 128", "line 1: token id 128 is outside the vocabulary of 128"),
        ("ids", "\n", "the file holds no token ids"),
        ("chats", '[{"role": "user"}]', "line 1: a message is {'role': 'user'}"),
        ("chats", '[{"role": "user", "content": "a"}]\n{"prompt": "x"}', "line 2: expected messages"),
        ("chats", '[{"role": "user", "content": "no"}]\n[{"role": "tool", "content": "a"}]', "chat 2: "),
        ("chats", "", "the file holds no chats"),
        ("text", " \n", "the calibration text is empty"),
    ]:
        path.write_text(content)
        expect_one_line(command("calibrate", chat_folder, f"--{kind}", path), message, status=1)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([1.0, 2.0]), "is of type float64, expected whole numbers"),
        (np.array([3, -2]), "token id -2 is outside the vocabulary of 128"),
        (np.array([], np.int64), "holds no token ids"),
        (np.array(["1"], object), "cannot be read"),
    ],
)
def test_calibrate_refuses_arrays_of_other_values(command, tmp_path, array, message):
    np.save(tmp_path / "ids.npy", array, allow_pickle=True)
    expect_one_line(command("calibrate", FOLDER, "--ids", tmp_path / "ids.npy"), message, status=1)


LINES = [
    (("smollm2",), "no model is called 'smollm2'; did you mean smollm2-135m-instruct?"),
    (("nowhere/model.gguf",), "there is no file or folder nowhere/model.gguf"),
    ((GGUF, "--text", "nowhere.txt"), "cannot read the text from nowhere.txt: No such file"),
    ((GGUF, "--text", "."), "cannot read the text from .: Is a directory"),
    ((GGUF, "--text", GGUF), "is not UTF-8"),
    ((GGUF, "--tokens", 0), "--tokens is 0, expected at least 1"),
    ((GGUF, "--tokens", -5), "--tokens is -5, expected at least 1"),
    ((GGUF, "--tokens", 100_000), "fewer than the requested 100000"),
    ((GGUF, "-o", "."), "cannot write the calibration"),
    (
        (FOLDER,),
        "has no tokenizer, which calibration on a text needs; add its tokenizer.json, or run `chunkrt calibrate",
    ),
    ((FOLDER,), "--ids FILE"),
    ((GGUF, "--ids", "nowhere.npy"), "cannot read the ids from nowhere.npy: No such file"),
    ((GGUF, "--ids", GGUF), "the ids in"),
    ((GGUF, "--chats", "."), "cannot read the chats from .: Is a directory"),
    ((GGUF, "--chats", GGUF), "the model has no chat template for chats; give plain text with --text"),
]
USAGE = [
    (("--method", "median"), "'median' is not one of"),
    (("--tokens", "many"), "'many' is not a valid integer"),
    (("--texts", "x"), "No such option"),
]


@pytest.mark.parametrize(("arguments", "message"), LINES)
def test_calibrate_refuses_impossible_requests(command, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expect_one_line(command("calibrate", *arguments), message, status=1)


@pytest.mark.parametrize(("arguments", "message"), USAGE)
def test_calibrate_refuses_a_wrong_command_line(command, arguments, message):
    expect_one_line(command("calibrate", GGUF, *arguments), message, status=2)


def test_calibrate_refuses_an_engine_directory(command, tmp_path):
    compile_checkpoint(GGUF, Recipe(scheme=SCHEMES["w8a8-dynamic"]), {}, tmp_path / "engine", model="toy")
    expect_one_line(command("calibrate", tmp_path / "engine"), "is compiled and has fixed grids", status=1)


def test_ctrl_c_stops_a_calibration(command, cache, text, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(calibration_module, "calibrate", interrupt)
    finished = command("calibrate", GGUF, "--text", text)
    assert (finished.status, finished.out, finished.err.strip()) == (130, "", "interrupted")
    assert not cache.exists()
