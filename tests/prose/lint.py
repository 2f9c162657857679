"""Check that comments, docstrings, messages and documents are written in plain technical English.

Run it from the root of the repository, with paths as arguments, or with none for all files. It prints each violation as
`FILE:LINE: RULE: TEXT`, and exits with status 1 if there is one. CONTRIBUTING.md explains the rules.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

FIRST_WORDS = frozenset(
    {"of", "that", "those", "what", "who", "whose", "whoever", "as", "which", "whether", "how", "where", "why", "when"}
)
"""A docstring that begins with one of these is a clause without a main verb."""

COMMENT_FIRST_WORDS = FIRST_WORDS - {"as", "where", "when"}
"""In a comment, "As in PyTorch, ..." and "Where X is absent, ..." begin whole sentences."""

PHRASES = {
    r"what(?![^.]*\?)": "a noun",
    r"whatever|whoever": "any ..., regardless of ...",
    r"(?:^|[.,;:(]|\b(?:of|for|to|by|with|and|or|than|as)) ?who\b": "a noun",
    r"(?:is|are|was|were|be|been|being) told|tells?(?! \w* ?\w* ?apart)|telling": "report, print, state",
    r"beside": "next to, in addition to, with",
    r"leav(?:es?|ing) (?:\w+ )?away|left away|took away|taken away": "omit, remove",
    r"plays? (?:the|an?|its|their) (?:role|part|npu|rest|last)|plays? the": "serve as",
    r"on (?:its|their|the) way": "in progress",
    r"but for": "unless, except for",
    r"(?:that|which) (?:is|are) there": "available, supported",
    r"nobody|somebody|anybody": "name the subject",
    r"anew": "again",
    r"as ever": "as before, unchanged",
    r"for want of|in vain|save for|to and fro": "for lack of, without effect, except",
    r"thereof|therein|whereof|wherein|whereupon|thereby|hence|thither": "a plain connective",
    r"lies? in tiles": "is stored in tile layout",
    r"melts?|melted|melting": "fuse",
    r"is asked(?! for)|are asked(?! for)": "call, query, request",
    r"nothing else|no such thing": "only",
}
"""Phrases, as patterns, and a hint at their replacement."""

RIDDLES = re.compile(r"_(?:what|who|whose|whoever|whatever|nobody|told|tells?|telling|beside|anew|as_ever|away)(?:_|$)")
"""Parts of names of tests that say neither the unit nor its behaviour."""

SUBJECT_LENGTH = 72
SUBJECTS_SINCE = "2026-11-25T22:30:00+00:00"

_PHRASES = {
    re.compile(rf"(?<![\w/`.-])(?:{pattern})(?![\w/=`\"-])", re.IGNORECASE): hint for pattern, hint in PHRASES.items()
}
_SUFFIXES = {".py", ".cc", ".h", ".md", ".toml", ".sh", ".cmake", ".yml"}
_NAMES = {"CMakeLists.txt", "Makefile", "run"}
_FOLDERS = ("*", *(f"{folder}/**/*" for folder in ("bench", "chunkrt", "csrc", "docs", "examples", "models", "tests")))


def violations(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line, rule and text for each violation in a file."""
    for line, kind, text in prose(path):
        words = FIRST_WORDS if kind == "docstring" else COMMENT_FIRST_WORDS if kind == "comment" else ()
        first = re.match(r"\W*([A-Za-z]+)", text)
        if first and first[1].lower() in words:
            yield line, f"the first word of a {kind} is {first[1]!r}", text.strip().splitlines()[0]
        for number, part in enumerate(text.splitlines()):
            for pattern, hint in _PHRASES.items():
                if found := pattern.search(part):
                    yield line + number, f"{found[0].strip()!r}; write: {hint}", part.strip()
        if kind == "test" and RIDDLES.search(text):
            yield line, "the name of a test names the unit and its behaviour", text


def prose(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind (docstring, comment, string, test or text) and text of all prose in a file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from _python(source, strings=path.parts[0] != "tests")
    elif path.suffix in {".cc", ".h"}:
        yield from _cpp(source)
    else:
        yield from ((number, "text", line) for number, line in enumerate(source.splitlines(), 1))


def _python(source: str, *, strings: bool) -> Iterator[tuple[int, str, str]]:
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.lineno, "test", node.name
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(text := getattr(statement.value, "value", None), str):
                docstrings.add(statement.lineno)
                yield statement.lineno, "docstring", text
    previous = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            alone = token.line.strip().startswith("#")
            begins = not alone or token.start[0] != previous + 1
            yield token.start[0], "comment" if begins else "text", token.string
            previous = token.start[0] if alone else -1
        elif strings and token.type == tokenize.STRING and token.start[0] not in docstrings:
            is_formatted = token.string[0] in "fF" or token.string[1] in "fF"
            yield token.start[0], "string", re.sub(r"\{[^{}]*\}", "{}", token.string) if is_formatted else token.string


def _cpp(source: str) -> Iterator[tuple[int, str, str]]:
    inside = False
    for number, line in enumerate(source.splitlines(), 1):
        comment = re.search(r"(?<![:\"])//+(.*)", line)
        alone = bool(comment) and line.strip().startswith("//")
        if comment:
            yield number, "text" if inside and alone else "comment", comment[1]
        yield from ((number, "string", text) for text in re.findall(r'"((?:[^"\\]|\\.)*)"', line) if not alone)
        inside = alone


def long_subjects() -> Iterator[str]:
    """Yield subjects of recent commits that are longer than SUBJECT_LENGTH, if this is a repository of git."""
    command = ["git", "log", "--no-merges", f"--since={SUBJECTS_SINCE}", "--format=%s"]
    try:
        log = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return
    yield from (subject for subject in log.splitlines() if len(subject) > SUBJECT_LENGTH)


def prose_files() -> list[Path]:
    """Return all files that hold prose, except this one: those that git knows or would add, or all without git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        listed = [str(path) for folder in _FOLDERS for path in Path().glob(folder)]
    paths = [path for path in map(Path, listed) if path.suffix in _SUFFIXES or path.name in _NAMES]
    own = Path(__file__).resolve()
    return [path for path in paths if path.exists() and path.resolve() != own]


def main() -> int:
    """Print all violations in the files given as arguments, or in all files of the repository."""
    count = 0
    for path in [Path(name) for name in sys.argv[1:]] or prose_files():
        for line, rule, text in violations(path):
            print(f"{path}:{line}: {rule}: {text}")
            count += 1
    for subject in long_subjects():
        print(f"commit: longer than {SUBJECT_LENGTH} characters: {subject}")
        count += 1
    if count:
        print(f"{count} violations; CONTRIBUTING.md explains the rules", file=sys.stderr)
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
