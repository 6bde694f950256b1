"""Tokenizers: bytes for the seeded model, tokenizer.json for a checkpoint that has one."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as FileTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from graphrt.core.base.errors import CheckpointError
from graphrt.demo.checkpoint import BEGIN, END
from graphrt.demo.tokenizer import Tokenizer


@pytest.mark.parametrize("text", ["", "Hello", "déjà vu", "図 🙂", "line\nline"])
def test_the_byte_tokenizer_decodes_what_was_encoded(text):
    tokenizer = Tokenizer(None, 258)
    ids = tokenizer.encode(text)
    assert ids == [BEGIN, *text.encode()]
    assert tokenizer.decode([*ids, END]) == text
    assert tokenizer.notice is None


def test_decoding_invalid_utf8_bytes_gives_replacement_characters():
    assert Tokenizer(None, 258).decode([0xC3]) == "�"


def write_tokenizer(directory):
    file = FileTokenizer(WordLevel({"[UNK]": 0, "hello": 1, "world": 9}, unk_token="[UNK]"))
    file.pre_tokenizer = Whitespace()
    file.save(str(directory / "tokenizer.json"))


def test_a_tokenizer_json_of_the_checkpoint_is_used(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path, 10)
    assert tokenizer.encode("hello there world") == [1, 0, 9]
    assert tokenizer.decode([1, 9]) == "hello world"
    assert tokenizer.notice is None


def test_a_checkpoint_without_tokenizer_json_uses_bytes_with_a_notice(tmp_path):
    tokenizer = Tokenizer(tmp_path, 300)
    assert tokenizer.encode("a") == [97]
    assert str(tmp_path / "tokenizer.json") in tokenizer.notice


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="byte tokenizer"):
        Tokenizer(tmp_path, 255)
    write_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="vocab_size"):
        Tokenizer(tmp_path, 9)


def test_a_broken_tokenizer_json_is_refused_by_name(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path, 300)
