"""The tokenizer of an engine: a tokenizer of the `tokenizers` library, with the tokens that begin and end a text.

The functions call the library, and convert its untyped exceptions to chunkrt's errors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np
import tokenizers
from numpy.typing import NDArray

from chunkrt.errors import ConfigError, ModelError, cause_in_file
from chunkrt.files import read_text
from chunkrt.tokenizer.decoding import IncrementalDecoder, TokenBytes
from chunkrt.tokenizer.fewest_tokens import TokenBound
from chunkrt.tokenizer.text_settings import SETTINGS_FILE, TextSettings

if TYPE_CHECKING:
    from chunkrt.checkpoints.source import TensorSource
    from chunkrt.tokenizer.chat_prompt import ChatPrompt, ControlTokens
    from chunkrt.tokenizer.chat_template import ChatTemplate
import json
from collections.abc import Iterator
from contextlib import contextmanager

from tokenizers import AddedToken, models

from chunkrt.files import BYTE_ORDER_MARK, check_regular


class ChatOptions(TypedDict, total=False):
    """Options of `Tokenizer.render_chat`, which describes them."""

    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    template_options: Mapping[str, Any] | None


class Tokenizer:
    """Encodes text to tokens and decodes tokens to text; thread-safe.

    Args:
        num_rows: number of rows of the model's LM head, which may exceed the number of tokens in the vocabulary.

    Raises:
        UnsupportedModelError: the kind of tokenizer is not implemented.
    """

    def __init__(self, library: tokenizers.Tokenizer, settings: TextSettings, num_rows: int = 0) -> None:
        self.settings = settings
        self.token_bytes = TokenBytes(library, num_rows)
        self._num_rows = num_rows
        self._library = library
        self._by_mode: dict[bool, tokenizers.Tokenizer] = {}
        self._lock = Lock()

    def __repr__(self) -> str:
        """Return the number of tokens."""
        return f"Tokenizer({self.vocab_size} tokens)"

    @staticmethod
    def from_source(source: TensorSource) -> Tokenizer | None:
        """Return the tokenizer of a checkpoint, or None if it has none and runs on token ids alone.

        Raises:
            ModelError: the tokenizer is damaged.
            UnsupportedModelError: its kind is not implemented.
        """
        # These modules are imported here, because only the compiler needs them, not a device that runs an engine.
        metadata: Mapping[str, Any] | None = getattr(source, "metadata", None)
        try:
            with library_errors("the vocabulary cannot be read", panics_alone=True):
                if metadata is None:
                    from chunkrt.tokenizer.huggingface_folder import read_folder

                    found = read_folder(source.path, source.config)
                else:
                    from chunkrt.tokenizer.gguf_vocabulary import read_metadata

                    found = read_metadata(metadata)
                return None if found is None else Tokenizer(*found)
        except ModelError as error:
            raise type(error)(f"{source.path}: {error}") from error

    @staticmethod
    def load(folder: str | os.PathLike[str], num_rows: int = 0) -> Tokenizer | None:
        """Read the files that `save` wrote, or return None if the folder contains no tokenizer.

        Args:
            num_rows: number of rows of the model's LM head.

        Raises:
            ModelError: the tokenizer is damaged.
        """
        folder = Path(folder)
        if not os.path.lexists(folder / VOCABULARY_FILE):
            return None
        try:
            with library_errors("the vocabulary cannot be read", panics_alone=True):
                settings = TextSettings.from_json(read_text(folder / SETTINGS_FILE))
                return Tokenizer(read_vocabulary(folder / VOCABULARY_FILE), settings, num_rows)
        except (OSError, UnicodeDecodeError, ModelError) as error:
            raise ModelError(
                f"the tokenizer in {folder} is damaged ({cause_in_file(error)}); compile the model again"
            ) from error

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write tokenizer.json and text.json into an existing folder. Raises OSError if that fails."""
        _write(Path(folder) / SETTINGS_FILE, self.settings.to_json())
        _write(Path(folder) / VOCABULARY_FILE, _with_joined_merges(self.to_json()))

    def to_json(self) -> str:
        """Return the vocabulary and the rules for splitting text, in the format of the `tokenizers` library."""
        with library_errors("the vocabulary cannot be written"):
            return self._library.to_str()

    @property
    def has_chat_template(self) -> bool:
        """True if the model was tuned for chat and has a chat template."""
        return self.settings.chat_template is not None

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the vocabulary; the LM head of a model may have more rows, for padding."""
        return self._library.get_vocab_size()

    @cached_property
    def missing_ids(self) -> NDArray[np.int64]:
        """Indices of the rows of the model's LM head without a token, int64 [n], ascending. They are never sampled."""
        token_of = self._library.id_to_token  # a third of the time of `get_vocab`
        return np.array([row for row in range(self._num_rows) if token_of(row) is None], np.int64)

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Ids of all tokens that end a generation."""
        return frozenset(self.settings.eos_ids)

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound on the number of tokens of a text, which depends only on its bytes; 0 if no bound is
        known."""
        return self._token_bound.fewest_tokens(text)

    @cached_property
    def _token_bound(self) -> TokenBound:
        return TokenBound.of(self._library)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the tokens of a text.

        Args:
            add_special: begin with the beginning token if the model wants one.
            parse_special: parse control tokens that are spelled out in the text ("<|im_end|>"); otherwise they are
                plain text, as a user's words must be.

        Raises:
            ConfigError: the text holds a lone surrogate, which has no encoding.
            ModelError: the vocabulary has no token for a part of the text.
        """
        if not isinstance(text, str):
            raise ConfigError(f"the text is of type {type(text).__name__}, expected str")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"the text is not valid Unicode: {error}") from error
        ids = encode_text(self._library_that(parse_special=parse_special), text).ids
        bos_id = self.settings.bos_id
        return [bos_id, *ids] if add_special and self.settings.add_bos and bos_id is not None else ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of tokens, as `IncrementalDecoder` produces it.

        Raises:
            ConfigError: a token is neither in the vocabulary nor a row of the model's LM head.
        """
        try:
            ids = iter(token_ids)
        except TypeError as error:
            raise ConfigError(f"token_ids is of type {type(token_ids).__name__}, expected a list") from error
        decoder = IncrementalDecoder(self)
        return "".join([*map(decoder.push, ids), decoder.flush()])

    def encode_for_embedding(self, text: str) -> list[int]:
        """Return the tokens of a text for an embedding, followed by the tokens that the model expects after it.

        Errors are those of `encode`.
        """
        return [*self.encode(text), *self.settings.suffix_ids]

    def special_id(self, text: str) -> int | None:
        """Return the id of the control token that is exactly the text; None if it is not one."""
        return self._special_ids.get(text)

    def special_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Return the ids of the control tokens that texts spell out; see `special_id`."""
        return frozenset(self._special_ids[text] for text in texts if text in self._special_ids)

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        added = self._library.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    @property
    def takes_tools(self) -> bool:
        """True if the chat template lists the available tools."""
        return re.search(r"\btools\b", self.settings.tool_template or self.settings.chat_template or "") is not None

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> list[int]:
        """Return the tokens of a chat. A control token that a message spells out stays text.

        Arguments and errors are those of `render_chat`.
        """
        return self.encode_prompt(self.render_chat(messages, **options))

    def encode_prompt(self, prompt: ChatPrompt) -> list[int]:
        """Return the tokens of a rendered chat. Errors are those of `encode`."""
        (first, is_plain), *others = prompt.parts
        ids = self._encode_plain(first) if is_plain else self.encode(first, add_special=False, parse_special=True)
        for text, is_plain in others:
            ids += self._encode_behind(text, is_plain=is_plain)
        return ids

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> str:
        """Return the prompt of a chat as text, which does not show whether control tokens come from the messages.

        Arguments and errors are those of `render_chat`.
        """
        return self.render_chat(messages, **options).text

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_options: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """Return the prompt of a chat, for `encode_prompt`.

        Args:
            messages: objects with "role" and "content", as in {"role": "user", "content": "Hello"}.
            tools: tools that the model may call, as JSON objects in the form of OpenAI's API; see `takes_tools`.
            add_generation_prompt: end at the start of the model's answer.
            template_options: further variables of the template, as in {"enable_thinking": False}.

        Raises:
            ConfigError: the messages or options are malformed.
            ModelError: the model has no chat template, or its template fails or refuses the messages.
        """
        template = self._tool_template if tools and self.settings.tool_template is not None else self._chat_template
        bos_token = self._token(self.settings.bos_id)
        prompt = template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            bos_token=bos_token,
            eos_token=self._token(next(iter(self.settings.eos_ids), None)),
            options=template_options,
            control_tokens=self._control_tokens,
        )
        is_begun = prompt.parts[0][0].startswith(bos_token) and not prompt.parts[0][1]
        return prompt.preceded_by(bos_token) if self.settings.chat_adds_bos and not is_begun else prompt

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        """Control tokens, and other added tokens that the templates write, e.g. "<tool_call>", except white space."""
        from chunkrt.tokenizer.chat_prompt import ControlTokens

        sources = f"{self.settings.chat_template} {self.settings.tool_template}"
        added = self._library.get_added_tokens_decoder().values()
        written = (t.content for t in added if t.special or (t.content in sources and not t.content.isspace()))
        return ControlTokens(set(written))

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        if self.settings.chat_template is None:
            raise ModelError("the model has no chat template; give it a plain prompt, or take one tuned for chat")
        return _compiled(self.settings.chat_template)

    @cached_property
    def _tool_template(self) -> ChatTemplate:
        assert self.settings.tool_template is not None
        return _compiled(self.settings.tool_template)

    def _encode_behind(self, text: str, *, is_plain: bool) -> list[int]:
        """Return the tokens of a text that continues another text.

        SentencePiece puts a space before a text. A line break before the text absorbs this space, and is removed
        afterwards.
        """

        def encode(text: str) -> list[int]:
            return self._encode_plain(text) if is_plain else self.encode(text, add_special=False, parse_special=True)

        line_break, ids = encode("\n"), encode("\n" + text)
        behind = ids[: len(line_break)] == line_break
        return ids[len(line_break) :] if behind else encode(text)

    def _encode_plain(self, text: str) -> list[int]:
        """Return the tokens of a text without searching it for added tokens, including control tokens."""
        library = self._library
        with library_errors(f"the tokenizer cannot encode {text!r:.80}"):
            normalised = text if library.normalizer is None else library.normalizer.normalize_str(text)
            if library.pre_tokenizer is None:
                words = [normalised]
            else:
                words = [word for word, _ in library.pre_tokenizer.pre_tokenize_str(normalised)]
            return [token.id for word in words for token in library.model.tokenize(word)]

    def _library_that(self, *, parse_special: bool) -> tokenizers.Tokenizer:
        """Return the library object that parses control tokens, or the object that does not parse them.

        The setting is part of a library object's state. Each mode has a separate object, so that threads can encode in
        both modes at once. The second object is created on first use.
        """
        with self._lock:
            if parse_special not in self._by_mode:
                library = copy_of(self._library) if self._by_mode else self._library
                library.encode_special_tokens = not parse_special
                self._by_mode[parse_special] = library
            return self._by_mode[parse_special]

    def _token(self, token_id: int | None) -> str:
        return "" if token_id is None else self.token_bytes[token_id].decode(errors="replace")


def _compiled(source: str) -> ChatTemplate:
    from chunkrt.tokenizer.chat_template import ChatTemplate  # starting the template's process takes time

    return ChatTemplate(source)


def _write(path: Path, text: str) -> None:
    """Write a temporary file and rename it, so that no reader gets an incomplete file."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8", newline="\n")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _with_joined_merges(text: str) -> str:
    """Return the contents of a tokenizer.json with merges in the older form "a b", if it can express them.

    The library reads this form in two thirds of the time. It skips merges that begin with "#version".
    """
    contents = json.loads(text)
    pairs: list[list[str]] = contents["model"].get("merges") or []
    if any(" " in part for pair in pairs for part in pair) or any(pair[0].startswith("#version") for pair in pairs):
        return text
    if pairs:
        contents["model"]["merges"] = [" ".join(pair) for pair in pairs]
    return json.dumps(contents, ensure_ascii=False, separators=(",", ":"))


VOCABULARY_FILE = "tokenizer.json"

LARGEST_ID = (1 << 24) - 1
"""Limit of token ids. The library allocates memory by the largest id, so a huge one would end the process."""

_MAY_BE_TOO_LARGE = re.compile(rb":\s*\d{8}")
"""Pattern of a JSON number with eight or more digits; 2^24 has eight digits."""


@contextmanager
def library_errors(problem: str, *, panics_alone: bool = False) -> Iterator[None]:
    """Raise ModelError in place of the library's exceptions.

    A panic of the library is a BaseException named PanicException, which `except Exception` does not catch.

    Args:
        panics_alone: convert only panics; other exceptions propagate.
    """
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:
        is_error = isinstance(error, Exception) and not panics_alone
        if not is_error and type(error).__name__ != "PanicException":
            raise  # for example, an interrupt
        raise ModelError(f"{problem}: {error}") from error


def read_vocabulary(path: Path) -> tokenizers.Tokenizer:
    """Read a tokenizer.json. Raise ModelError if it cannot be read."""
    with library_errors(f"{path.name} cannot be read"):
        check_regular(path)
        contents = path.read_bytes().removeprefix(BYTE_ORDER_MARK.encode())
        if _MAY_BE_TOO_LARGE.search(contents):
            _check_ids(contents)
        library = tokenizers.Tokenizer.from_buffer(contents)
        library.no_truncation()
        library.no_padding()
        return library


def byte_pair_encoding(
    vocab: dict[str, int], merges: list[tuple[str, str]], **options: str | bool | None
) -> tokenizers.Tokenizer:
    """Return a tokenizer that only merges. Raise ModelError if a merge is not in the vocabulary."""
    with library_errors("the vocabulary and its merges contradict each other"):
        return tokenizers.Tokenizer(models.BPE(vocab, merges, **options))


def add_tokens(library: tokenizers.Tokenizer, tokens: list[AddedToken]) -> None:
    """Add tokens that are found in a text before it is split further. Raise ModelError if that fails."""
    with library_errors("the added tokens cannot be read"):
        library.add_tokens(tokens)


def copy_of(library: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return an independent library object with the same tokens. Raise ModelError if that fails."""
    with library_errors("the vocabulary cannot be copied"):
        return tokenizers.Tokenizer.from_str(library.to_str())


def encode_text(library: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool = False) -> tokenizers.Encoding:
    """Encode a text while other threads run. Raise ModelError if the library cannot encode it.

    The library releases Python's lock in `encode_batch`, but not in `encode`.
    """
    with library_errors(f"the tokenizer cannot encode {text!r:.80}"):
        return library.encode_batch([text], add_special_tokens=add_special_tokens)[0]


def _check_ids(contents: bytes) -> None:
    """Raise ModelError if a tokenizer.json gives a token an id larger than LARGEST_ID, or repeats a key."""
    parsed = json.loads(contents, object_pairs_hook=_object)
    model = parsed.get("model") if isinstance(parsed, dict) else None
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    added = parsed.get("added_tokens") if isinstance(parsed, dict) else None
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    if too_large := [token_id for token_id in ids if type(token_id) is int and token_id > LARGEST_ID]:
        raise ModelError(f"{VOCABULARY_FILE} gives a token the id {too_large[0]}; at most {LARGEST_ID} is accepted")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raise ModelError if it repeats a key, because parsers differ in the value that they use."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ModelError(f"an object of {VOCABULARY_FILE} names a key twice")
    return found
