"""The tokenizer that a model file describes: byte-level BPE ("gpt2") and SentencePiece ("llama").

The `tokenizers` library does the merging; which texts are control tokens, when a BOS is added and
how bytes come back are decided here, by the rules of the file:

- Control tokens (type 3) are found in a text only where the caller says so (`parse_special`);
  user-defined ones (type 4) always. The text between them is encoded as plain text.
- A BOS is added if the file says so, or does not say and its kind of tokenizer asks for one; never
  if the file names no BOS, and never a second one (a chat template may have written it).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from kvasir_rt.chat import ChatTemplate
from kvasir_rt.errors import ChatError, ModelFileError, UnsupportedModel
from kvasir_rt.gguf_file import GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Merger

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How text is cut before merging, by the name the file gives. None: GPT-2's own rule.
PATTERNS: dict[str, str | None] = {
    **dict.fromkeys(("gpt-2", "phi-2", "jina-es", "jina-de", "mellum", "modern-bert"), None),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"),
        rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{REST}",
    ),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"),
        rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{REST}",
    ),
}
DIGITS_ALONE = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
WHOLE_WORDS_FIRST = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"}
ADDS_BOS = {"llama3", "llama-v3", "llama-bpe"}

# Control tokens that end a text in some model family, whatever `eos_token_id` says.
END_TEXTS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>",
    "<|end_of_text|>", "<|endofturn|>",
}  # fmt: skip


class Tokenizer:
    """Text to token ids and back, for one model.

    Attributes:
        bos_id: The file's beginning-of-sequence token, or None.
        adds_bos: Whether a prompt begins with it.
        eos_ids: Tokens that end a text.
    """

    def __init__(
        self,
        merger: "Merger",
        texts: list[str],
        kinds: Sequence[int],
        *,
        is_byte_level: bool,
        space_prefix: bool,
        bos_id: int | None,
        adds_bos: bool,
        eos_ids: frozenset[int],
        template: ChatTemplate | None,
    ) -> None:
        self._merger = merger
        self._texts = texts
        self._kinds = kinds
        self._is_byte_level = is_byte_level
        self._space_prefix = space_prefix
        self.bos_id = bos_id
        self.adds_bos = adds_bos
        self.eos_ids = eos_ids
        self._template = template
        self._controls = self._ids_of(CONTROL)
        user_defined = self._ids_of(USER_DEFINED)
        self._always = _finder(user_defined)
        self._special_ids = {**user_defined, **self._controls}
        self._all = _finder(self._special_ids)

    def __len__(self) -> int:
        return len(self._texts)

    def encode(self, text: str, *, add_bos: bool, parse_special: bool) -> list[int]:
        """Token ids of a text.

        Args:
            text: Any text.
            add_bos: Begin with a BOS if this model's prompts do.
            parse_special: Whether the text of a control token means that token.
        """
        ids = self._encode(text, self._all if parse_special else self._always)
        return self._with_bos(ids) if add_bos else ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text; control tokens have none, and bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.decode_bytes, ids)).decode(errors="replace")

    def decode_bytes(self, token: int) -> bytes:
        """The bytes one token adds to a text; a character may be spread over several."""
        text, kind = self._texts[token], self._kinds[token]
        if kind in (CONTROL, UNKNOWN, UNUSED):
            return b""
        if kind == USER_DEFINED:
            return text.encode()
        if self._is_byte_level:
            known = self._byte_of
            return b"".join(
                bytes((known[each],)) if each in known else each.encode() for each in text
            )
        if kind == BYTE:
            return bytes((int(text[3:5], 16),))
        return text.replace("▁", " ").encode()

    def token_text(self, token: int) -> str:
        """The token as the file spells it, control tokens too; for logs and debugging."""
        return self._texts[token]

    @cached_property
    def token_bytes_max(self) -> int:
        """Bytes of the longest token: a text has at least its length over this many tokens."""
        return max(len(text.encode()) for text in [" ", *self._texts])

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        What users wrote is never turned into control tokens: those the template writes are.

        Raises:
            ChatError: The model has no template, or it refuses these messages.
        """
        rendered, guard = self._chat_template().render(messages, tools, guarded=self._controls)
        return self._with_bos(self._encode(rendered, self._all, guard))

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> str:
        """The conversation as the template writes it; for people, not for encoding.

        Raises:
            ChatError: As `chat`.
        """
        return self._chat_template().render(messages, tools, guarded=())[0]

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            raise ChatError(
                "this model's file has no chat template (key 'tokenizer.chat_template'); "
                "use completions with a prompt"
            )
        return self._template

    def _encode(self, text: str, finder: "re.Pattern[str] | None", guard: str = "") -> list[int]:
        """Ids of a text whose special tokens `finder` finds; then the guard is taken out."""
        ids: list[int] = []
        is_special = True  # The start counts as one: SentencePiece puts a space there.
        for index, piece in enumerate(finder.split(text) if finder is not None else (text,)):
            if index % 2:  # The finder's one group: every second piece is a special token.
                ids.append(self._special_ids[piece])
                is_special = True
            elif piece:
                plain = piece.replace(guard, "") if guard else piece
                ids += self._encode_plain(plain, has_prefix=is_special and self._space_prefix)
                is_special = False
        return ids

    def _encode_plain(self, text: str, *, has_prefix: bool) -> list[int]:
        if not self._is_byte_level:
            text = (" " + text if has_prefix else text).replace(" ", "▁")
        ids: list[int] = self._merger.encode(text, add_special_tokens=False).ids
        return ids

    def _with_bos(self, ids: list[int]) -> list[int]:
        if self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        return {character: byte for byte, character in enumerate(byte_characters())}

    def _ids_of(self, kind: int) -> dict[str, int]:
        found: dict[str, int] = {}
        for token in np.flatnonzero(np.asarray(self._kinds) == kind).tolist():
            if len(self._texts[token]) > 1:  # A single character cannot be told from text.
                found.setdefault(self._texts[token], token)
        return found


def _finder(texts: Iterable[str]) -> "re.Pattern[str] | None":
    """Finds any of the texts, the longest first; its one group makes `split` keep them."""
    ordered = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile(f"({'|'.join(map(re.escape, ordered))})") if ordered else None


def byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def load_tokenizer(gguf: GgufFile) -> Tokenizer:
    """The tokenizer of an opened model.

    Raises:
        ModelFileError: A key is missing (named) or contradicts another.
        UnsupportedModel: A kind of tokenizer or of pre-tokenizer that is not implemented.
    """
    keys = _Keys(gguf)
    model = keys.text("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise UnsupportedModel(
            f"{gguf.path}: tokenizer {model[:64]!r} is not supported; supported are gpt2 "
            "(byte-level BPE) and llama (SentencePiece)"
        )
    texts = keys.texts("tokenizer.ggml.tokens")
    kinds = keys.numbers("tokenizer.ggml.token_type", len(texts), default=NORMAL)
    is_byte_level = model == "gpt2"
    pre = keys.text("tokenizer.ggml.pre") if is_byte_level else ""
    merger = (
        _byte_level_merger(keys, texts, pre)
        if is_byte_level
        else _sentencepiece_merger(keys, texts, kinds)
    )
    bos_id = keys.token("tokenizer.ggml.bos_token_id", len(texts))
    eos_id = keys.token("tokenizer.ggml.eos_token_id", len(texts))
    others = [keys.token(f"tokenizer.ggml.{name}_token_id", len(texts)) for name in ("eot", "eom")]
    ends = {token for token in (eos_id, *others) if token is not None}
    ends |= {
        token
        for token, text in enumerate(texts)
        if text in END_TEXTS and kinds[token] in (CONTROL, USER_DEFINED)
    }
    template = gguf.metadata.get("tokenizer.chat_template")
    special = {"bos_token": bos_id, "eos_token": eos_id}
    return Tokenizer(
        merger,
        texts,
        kinds,
        is_byte_level=is_byte_level,
        space_prefix=keys.truth("tokenizer.ggml.add_space_prefix", default=True),
        bos_id=bos_id,
        adds_bos=keys.truth(
            "tokenizer.ggml.add_bos_token", default=not is_byte_level or pre in ADDS_BOS
        ),
        eos_ids=frozenset(ends),
        template=ChatTemplate(
            template, {name: "" if id_ is None else texts[id_] for name, id_ in special.items()}
        )
        if isinstance(template, str)
        else None,
    )


def _byte_level_merger(keys: "_Keys", texts: list[str], pre: str) -> "Merger":
    from tokenizers import Regex, models, pre_tokenizers
    from tokenizers import Tokenizer as Merger

    if pre not in PATTERNS and pre not in DIGITS_ALONE:
        raise UnsupportedModel(
            f"{keys.path}: pre-tokenizer {pre[:64]!r} is not supported; supported are "
            f"{', '.join(sorted({*PATTERNS, *DIGITS_ALONE}))}"
        )
    merges: list[tuple[str, str]] = []
    for merge in keys.texts("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    vocabulary = {text: token for token, text in reversed(list(enumerate(texts)))}
    try:
        merger = Merger(models.BPE(vocabulary, merges, ignore_merges=pre in WHOLE_WORDS_FIRST))
    except Exception as error:  # The library raises nothing narrower.
        raise ModelFileError(f"{keys.path}: tokens and merges contradict: {error}") from error
    pattern = PATTERNS.get(pre)
    if pre in DIGITS_ALONE:
        first: Any = pre_tokenizers.Digits(individual_digits=True)
    elif pattern is not None:
        first = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    else:
        first = None
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    merger.pre_tokenizer = last if first is None else pre_tokenizers.Sequence([first, last])
    return merger


def _sentencepiece_merger(keys: "_Keys", texts: list[str], kinds: Sequence[int]) -> "Merger":
    """SentencePiece's merging by score, as merges in order of the merged piece's score."""
    from tokenizers import Tokenizer as Merger
    from tokenizers import models

    scores = keys.numbers("tokenizer.ggml.scores", len(texts), default=None)
    vocabulary = {text: token for token, text in reversed(list(enumerate(texts)))}
    found: list[tuple[float, int, int, int]] = []
    for token, text in enumerate(texts):
        if kinds[token] != NORMAL:
            continue
        for cut in range(1, len(text)):
            left, right = vocabulary.get(text[:cut]), vocabulary.get(text[cut:])
            if left is not None and right is not None:
                found.append((-scores[token], token, left, right))
    found.sort()
    merges = [(texts[left], texts[right]) for _, _, left, right in found]
    unknown = [texts[token] for token, kind in enumerate(kinds) if kind == UNKNOWN]
    return Merger(
        models.BPE(
            vocabulary,
            merges,
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )


class _Keys:
    """Reads the tokenizer's keys; what is missing is named."""

    def __init__(self, gguf: GgufFile) -> None:
        self.path = gguf.path
        self._metadata = gguf.metadata

    def text(self, key: str) -> str:
        value = self._metadata.get(key)
        if not isinstance(value, str):
            raise self._missing(key, value)
        return value

    def texts(self, key: str) -> list[str]:
        value = self._metadata.get(key)
        if not isinstance(value, list) or not value:
            raise self._missing(key, value)
        return value

    def numbers(self, key: str, count: int, *, default: int | None) -> list[Any]:
        value = self._metadata.get(key)
        if value is None and default is not None:
            return [default] * count
        if not isinstance(value, np.ndarray):
            raise self._missing(key, value)
        if len(value) != count:
            raise ModelFileError(f"{self.path}: {key!r} has {len(value)} items for {count} tokens")
        numbers: list[Any] = value.tolist()
        return numbers

    def token(self, key: str, count: int) -> int | None:
        value = self._metadata.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
            raise ModelFileError(
                f"{self.path}: {key!r} is {str(value)[:40]}; it must be a token below {count}"
            )
        return value

    def truth(self, key: str, *, default: bool) -> bool:
        value = self._metadata.get(key, default)
        if not isinstance(value, bool):
            raise ModelFileError(f"{self.path}: {key!r} must be true or false")
        return value

    def _missing(self, key: str, value: object) -> ModelFileError:
        found = "is missing" if value is None else "has another type than it must"
        return ModelFileError(
            f"{self.path}: the key {key!r} {found}; without it there is no tokenizer"
        )
