"""Chat templates become prompts as in Transformers, and hostile ones become errors."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest
from small_vocabularies import make_tokenizer

from chunkrt.errors import ConfigError, ModelError
from chunkrt.tokenizer import chat_template
from chunkrt.tokenizer.chat_template import ChatTemplate
from chunkrt.tokenizer.template_process import MAX_PROMPT_LENGTH

USER = {"role": "user", "content": "Hi <b>&</b>"}
CHATML = """{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def render(source: str, messages: object = (USER,), *, add_generation_prompt: bool = True) -> str:
    """Return a prompt of one message."""
    return (
        ChatTemplate(source)
        .render(
            list(messages) if isinstance(messages, tuple) else messages,
            add_generation_prompt=add_generation_prompt,
            bos_token="<s>",
            eos_token="</s>",
        )
        .text
    )


def test_a_chat_becomes_a_prompt():
    messages = ({"role": "system", "content": "Be brief."}, USER)
    chat = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b>&</b><|im_end|>\n"
    assert render(CHATML, messages, add_generation_prompt=False) == chat
    assert render(CHATML, messages) == chat + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{% if true %}\n  x\n    {% endif %}\ny", "  x\ny"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Hi <b>&</b>"}]'),
        ("{{ 'é' | tojson }}{{ [1] | tojson(indent=2) }}", '"é"[\n  1\n]'),
        ("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{% set ns = namespace(n=1) %}{% for i in range(3) %}{% set ns.n = ns.n * 2 %}{% endfor %}{{ ns.n }}", "8"),
        ("{{ dict(a=1).a }}{{ '-' * 3 }}", "1---"),
        ("{{ tools is defined }}{{ tools is none }}{{ documents is none }}{{ messages[0].absent }}", "TrueTrueTrue"),
        ("{{ strftime_now('%Y') | length }}", str(len(str(datetime.now().year)))),
    ],
)
def test_template_environment_matches_transformers(source, expected):
    assert render(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['sys'] }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns }}",
        "{{ namespace(__class__=1) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ lipsum.__globals__ }}",
        "{% include 'x' %}",
        "{% import 'os' as os %}",
    ],
)
def test_a_template_cannot_reach_beyond_its_data(source):
    with pytest.raises(ModelError):
        render(source)


RUNS_LONG = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
    "{{ 9 ** (9 ** 9) }}",
    "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "{% set t = 'ab' * 9999 %}{% for a in t %}{% for b in t %}{% for c in t %}{% endfor %}{% endfor %}{% endfor %}",
    "{% set t = ' ' * 9999999 ~ 'x' %}{% for i in range(9999) %}{{ t | urlize | length }}{% endfor %}",
    "{{ ('x' * 99999999) | wordwrap(1) }}",
]
TAKES_MUCH_MEMORY = [
    "{{ 'a' * 999999999 }}",
    "{{ 999999999 * [0] }}",
    "{{ 'a'.ljust(999999999) }}",
    "{{ 'a' | center(999999999) }}",
    "{{ '%2000000000d' | format(1) }}",
    "{{ '{:2000000000}'.format(1) }}",
    "{{ 'a'.replace('a', 'b' * 99999999).replace('b', 'c' * 99) }}",
    "{{ ('x' * 99999).join(('y' * 99999) | list) }}",
    "{{ ('x\n' * 99999) | indent(99999) }}",
    "{{ [[[[[1]]]]] | tojson(indent=999999999) }}",
    "{% set ns = namespace(s='ab') %}{% for i in range(36) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("source", "seconds"),
    [*((source, 0.1) for source in RUNS_LONG), *((source, 2.0) for source in TAKES_MUCH_MEMORY)],
)
def test_runaway_template_is_stopped(source, seconds, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_SECONDS", seconds)
    with pytest.raises(ModelError, match=rf"too much memory|more than {seconds:g} seconds|Range too big"):
        render(source)


def test_calls_without_end_are_stopped():
    with pytest.raises(ModelError, match="recursion"):
        render("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")


def test_stopped_template_still_renders_other_prompts(monkeypatch):
    template = ChatTemplate(
        "{% if messages | length > 1 %}{{ 9 ** (messages | length * 9 ** 9) }}{% endif %}{{ messages[0].content }}"
    )
    variables = {"add_generation_prompt": True, "bos_token": "", "eos_token": ""}
    for _ in range(2):
        assert template.render([USER], **variables).text == USER["content"]
        with monkeypatch.context() as patch:
            patch.setattr(chat_template, "MAX_SECONDS", 0.1)
            with pytest.raises(ModelError, match=r"more than 0\.1 seconds"):
                template.render([USER, USER], **variables)


def test_threads_share_a_template():
    template = ChatTemplate("{{ messages[0].content }}{{ messages[0].content }}")
    variables = {"add_generation_prompt": True, "bos_token": "", "eos_token": ""}

    def ask(number):
        return template.render([{"role": "user", "content": f"{number} "}], **variables).text

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(200))) == [f"{number} {number} " for number in range(200)]


def test_a_long_chat_gets_the_memory_that_it_takes():
    content = "\N{GRINNING FACE}" * (1 << 20)
    assert render("{{ messages[0].content }}", ({"role": "user", "content": content},)) == content


def test_lone_surrogates_pass():
    assert render("{{ messages[0].content }}", ({"role": "user", "content": "a\ud800"},)) == "a\ud800"


def test_missing_python_interpreter_is_an_error(monkeypatch):
    monkeypatch.setattr("sys.executable", "")
    with pytest.raises(ConfigError, match="need a Python interpreter"):
        ChatTemplate("x")


@pytest.mark.parametrize("is_killed", [False, True])
def test_process_that_was_started_early_renders_one_template(monkeypatch, is_killed):
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *given, **named: started.append(popen(*given, **named)) or started[-1]
    )
    chat_template.prepare()
    assert len(started) == 1
    if is_killed:
        started[0].kill()
        started[0].wait()
    assert render("{{ messages[0].content }}") == USER["content"]
    assert len(started) == (2 if is_killed else 1)
    assert render("{{ messages[0].content }}") == USER["content"]
    assert len(started) == (3 if is_killed else 2)


@pytest.mark.parametrize(
    ("executable", "message"), [("", "need a Python interpreter"), ("/nowhere/python", "cannot start /nowhere/python")]
)
def test_interpreter_that_is_missing_early_is_reported_by_the_template(monkeypatch, executable, message):
    monkeypatch.setattr("sys.executable", executable)
    chat_template.prepare()
    with pytest.raises(ConfigError, match=message):
        ChatTemplate("x")


def test_a_prompt_may_not_be_endless():
    with pytest.raises(ModelError, match=f"longer than {MAX_PROMPT_LENGTH} characters"):
        render("{% set t = 'a' * 4000 %}{% for i in range(99999) %}{{ t }}{% endfor %}")


def test_template_refusal_is_reported():
    with pytest.raises(ModelError, match="rejects these messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize("source", ["{% for", "{{ x", "{% unknown %}", "{{ x | nofilter }}", "{{ " + "(" * 999])
def test_a_template_that_does_not_compile_is_an_error(source):
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "at least one message"),
        ({"role": "user"}, "found dict, expected a list"),
        (["Hi"], "message 0: found 'Hi'"),
        ([USER, {"content": "x"}], "message 1: found"),
        ([{"role": "user", "content": object()}], "not plain JSON data"),
    ],
)
def test_malformed_messages_are_the_callers_error(messages, expected):
    with pytest.raises(ConfigError, match=expected):
        render(CHATML, messages)


def test_missing_chat_template_is_an_error():
    tokenizer = make_tokenizer("byte_level", pre="smollm")
    assert not tokenizer.has_chat_template
    with pytest.raises(ModelError, match="has no chat template"):
        tokenizer.encode_chat([USER])


def test_a_chat_is_encoded_without_a_second_beginning():
    chat_template = "{{ bos_token }}" + CHATML + "{{ eos_token }}"
    tokenizer = make_tokenizer("byte_level", pre="llama-bpe", chat_template=chat_template)
    ids = tokenizer.encode_chat([USER])
    assert ids[:2] == [1, 1]
    assert ids[-1] == 2
    assert ids.count(2) == 2
    assert tokenizer.apply_chat_template([USER], add_generation_prompt=False).endswith("<|im_end|>\n<|im_end|>")
