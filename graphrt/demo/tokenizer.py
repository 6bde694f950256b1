"""Text to token ids and back: a checkpoint's tokenizer.json, or bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graphrt.core.base.errors import CheckpointError
from graphrt.demo.checkpoint import BEGIN, inside

if TYPE_CHECKING:
    import tokenizers


class Tokenizer:
    """The tokenizer.json of `directory`, or else UTF-8 bytes with a `notice` that says so.

    Without a directory: bytes behind BEGIN, as the seeded model has them. Raises
    `CheckpointError` for a broken file and for ids that a model of `vocab_size` lacks.
    """

    def __init__(self, directory: Path | None, vocab_size: int) -> None:
        self.notice: str | None = None
        self._prefix = [BEGIN] if directory is None else []
        self._file: tokenizers.Tokenizer | None = None
        size, source = 256, "the byte tokenizer"
        if directory is not None:
            path = directory / "tokenizer.json"
            if path.exists():
                self._file, source = _read(path), str(path)
                size = 1 + max(self._file.get_vocab().values(), default=-1)
            else:
                self.notice = f"{path} is missing: text goes in and comes out as plain bytes"
        if size > vocab_size:
            expected = f"at most the model's 'vocab_size', {vocab_size}"
            raise CheckpointError(f"{source} has too many ids", got=size, expected=expected)

    def encode(self, text: str) -> list[int]:
        """Ids, with the special tokens that the tokenizer adds itself."""
        if self._file is None:
            return [*self._prefix, *text.encode()]
        return list(self._file.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        if self._file is None:
            return bytes(i for i in ids if i < 256).decode(errors="replace")
        return str(self._file.decode(list(ids)))


def _read(path: Path) -> tokenizers.Tokenizer:
    # Not at import: bytes need no tokenizer.
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(inside(path.parent, path.name)))
    except CheckpointError:
        raise
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(f"{path} is no readable tokenizer", got=error) from error
