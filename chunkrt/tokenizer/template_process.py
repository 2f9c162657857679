"""Script of a process that renders one chat template: `python -I -S template_process.py`.

A template is untrusted code. It runs in Jinja's sandbox with access to only plain data, and in a separate process. The
system limits the memory of this process, and the caller kills it at the time limit (`chat_template.py`).

The process reads lines of JSON and answers each line with a line: first {"path", "memory_bytes"}, then the source as a
string, then the variables of each prompt. An answer is {"text"} or {"error"}. The script does not import chunkrt, so it
starts quickly.

Source: Transformers, utils/chat_template_utils.py, which defines the environment that templates expect.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template

MAX_PROMPT_LENGTH = 1 << 24
_NONCHARACTER = re.compile(r"(?<!\\)((?:\\\\)*)\\u(fd[de][0-9a-f])")
"""An escape of U+FDD0 to U+FDEF in JSON, behind an even number of backslashes."""


def main() -> None:
    """Answer requests until the caller closes its end."""
    # A terminal sends the interrupt to both processes; the caller handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    template: Template

    def start(path: list[str], memory_bytes: int) -> str:
        sys.path[:0] = path
        import jinja2.sandbox  # noqa: F401, so that the memory limit does not count the import

        _limit_memory(memory_bytes)
        return ""

    def compile_source(source: str) -> str:
        nonlocal template
        template = _compile(source)
        return ""

    _answer(lambda line: start(**json.loads(line)))
    _answer(lambda line: compile_source(json.loads(line)))
    while _answer(lambda line: _render(template, json.loads(line))):
        pass


def _answer(work: Callable[[bytes], str]) -> bool:
    """Answer the next line; return False at the end of the input."""
    line = sys.stdin.buffer.readline()
    if not line:
        return False
    try:
        found = {"text": work(line)}
    except MemoryError:
        found = {"error": "rendering takes too much memory"}
    except Exception as error:
        found = {"error": str(error) or type(error).__name__}
    sys.stdout.buffer.write(json.dumps(found, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
    sys.stdout.buffer.flush()
    return True


def _limit_memory(num_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # on Windows the caller enforces the limit
        return
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def _render(template: Template, variables: dict[str, Any]) -> str:
    pieces, length = [], 0
    for piece in template.generate(**variables):
        length += len(piece)
        if length > MAX_PROMPT_LENGTH:
            raise ValueError(f"its prompt is longer than {MAX_PROMPT_LENGTH} characters")
        pieces.append(piece)
    return "".join(pieces)


def _compile(source: str) -> Template:
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace as JinjaNamespace

    class GenerationTag(Extension):
        """Render the body of `{% generation %}` unchanged; the tag marks the model's own words for training."""

        tags = {"generation"}  # noqa: RUF012, as Jinja declares it

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_unchanged"), [], [], body).set_lineno(line)  # with its own scope

        @staticmethod
        def _unchanged(caller: Callable[[], str]) -> str:
            return caller()

    class Namespace(JinjaNamespace):
        """Jinja's namespace without attributes that begin with an underscore, because these give access to Python's
        internals."""

        def __init__(self, *mappings: Any, **attributes: Any) -> None:
            super().__init__()
            for name, value in dict(*mappings, **attributes).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"it sets the attribute {name!r} of a namespace")
            super().__setitem__(name, value)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return datetime.now().strftime(pattern)

    class NewDict:
        """`dict` and `dict.fromkeys`, without access to the class and its attributes."""

        def __call__(self, *arguments: Any, **values: Any) -> dict[Any, Any]:
            return dict(*arguments, **values)

        def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
            return dict.fromkeys(*arguments)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    del environment.globals["lipsum"]  # a plain function would give access to Python's internals
    environment.globals |= {
        "dict": NewDict(),
        "namespace": Namespace,
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
    }
    return environment.from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Convert to JSON without Jinja's escaping of HTML.

    Noncharacters are not escaped: the caller marks control tokens by them (`chat_prompt.py`).
    """
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return _NONCHARACTER.sub(lambda found: found[1] + chr(int(found[2], 16)), text) if ensure_ascii else text


if __name__ == "__main__":
    main()
