"""Tokenizers: the tokens of `tokenizers` itself, the end of a document, and files that are none."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from quaver.trainer.config import Data, Model
from quaver.trainer.data import text_files
from quaver.trainer.data import tokenizer as tokenizer_module
from quaver.trainer.data.tokenizer import check_vocabulary, load_tokenizer

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "float8 has four bits of exponent\n\n  and a sign",
    "0123456789",
]
TRICKY = "a </s> <|end_of_text|> don't  \r\n\r\n\tx \N{SNOWMAN}\N{GRINNING FACE} 12345 \u00e9\u0301 "


def train_tokenizer(path: Path, special: list[str], vocab_size: int = 400) -> Tokenizer:
    """A small byte-level BPE that adds a first token, cuts and pads, as a file for a model might tell it to."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS * 10, trainer)
    first = special[0]
    tokenizer.post_processor = processors.TemplateProcessing(f"{first} $A", special_tokens=[(first, 0)])
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(path))
    return tokenizer


@pytest.fixture
def hf_file(tmp_path: Path) -> Path:
    train_tokenizer(tmp_path / "tokenizer.json", ["<s>", "</s>"])
    return tmp_path / "tokenizer.json"


def test_bytes():
    tokenizer = load_tokenizer(Data())
    (tokens,) = tokenizer.encode([TRICKY])
    assert tokens.tobytes().decode() == TRICKY
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (256, 0)


def test_hugging_face_tokens_are_the_whole_text_and_nothing_else(hf_file):
    tokenizer = load_tokenizer(Data(tokenizer=str(hf_file)))
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (Tokenizer.from_file(str(hf_file)).get_vocab_size(), 1)
    encoded = tokenizer.encode([*TEXTS, TRICKY])
    decode = Tokenizer.from_file(str(hf_file)).decode
    for text, tokens in zip([*TEXTS, TRICKY], encoded, strict=True):
        assert decode(tokens.tolist(), skip_special_tokens=False) == text
        assert not {0, 1} & set(tokens.tolist())  # a text that spells a special token gets none
    assert len(encoded[0]) < len(TEXTS[0])
    assert len(tokenizer.encode([TEXTS[0] * 10])[0]) > 8  # not truncated


def test_a_folder_names_its_own_end_token(tmp_path):
    special = ["<s>", "<|endoftext|>", "</s>", "<stop>"]
    train_tokenizer(tmp_path / "tokenizer.json", special)
    with pytest.raises(ValueError, match=r"\(several: <\|endoftext\|>, </s>\); set data.eos_token"):
        load_tokenizer(Data(tokenizer=str(tmp_path)))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    assert load_tokenizer(Data(tokenizer=str(tmp_path))).eos_id == 2
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    assert load_tokenizer(Data(tokenizer=str(tmp_path))).eos_id == 1
    assert load_tokenizer(Data(tokenizer=str(tmp_path / "tokenizer.json"))).eos_id == 1
    given = load_tokenizer(Data(tokenizer=str(tmp_path), eos_token="<stop>"))
    assert given.eos_id == 3
    assert given.digest != load_tokenizer(Data(tokenizer=str(tmp_path))).digest
    with pytest.raises(ValueError, match=r"'<none>' is not a token of .*; set data.eos_token to one"):
        load_tokenizer(Data(tokenizer=str(tmp_path), eos_token="<none>"))


def test_cutting_a_long_text_into_pieces_changes_no_token(hf_file, tmp_path, load, monkeypatch):
    text = "".join(f"{TEXTS[number % 3]}\n{'  ' * (number % 3)}{number}\n\n" for number in range(400))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(text)
    whole = load(tmp_path / "text", tokenizer=str(hf_file), cache_folder=str(tmp_path / "whole"))
    monkeypatch.setattr(text_files, "READ_BYTES", 200)
    cut = load(tmp_path / "text", tokenizer=str(hf_file), cache_folder=str(tmp_path / "cut"))
    assert whole.origin["sha256"] == cut.origin["sha256"]
    assert whole.train.tokens.dtype == np.uint16
    assert whole.train.tokens[-1] == whole.origin["eos_id"]


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("none.json", None, FileNotFoundError, "does not exist; give bytes, a tokenizer.json or its folder"),
        (".", None, FileNotFoundError, "a folder without a tokenizer.json"),
        ("a.json", b"{}", ValueError, "is not a tokenizer of Hugging Face"),
        ("a.json", b"\xff", ValueError, "is not a tokenizer of Hugging Face"),
        ("tokenizer.model", b"aGk= 0\n", ValueError, "got '.*model'; the tokenizer.json of the same model"),
    ],
)
def test_files_that_are_no_tokenizers(name, content, error, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=message):
        load_tokenizer(Data(tokenizer=str(tmp_path / name)))


def test_a_missing_package_is_named(hf_file, monkeypatch):
    monkeypatch.setattr(tokenizer_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"tokenizers, which is not installed; pip install 'quaver\[data\]'"):
        load_tokenizer(Data(tokenizer=str(hf_file)))


def test_the_model_must_have_every_token(hf_file, load, text_folder):
    data = Data(tokenizer=str(hf_file))
    tokenizer = load_tokenizer(data)
    size = tokenizer.vocab_size
    assert size > 256
    check_vocabulary(tokenizer, data, Model(vocab_size=size))
    message = rf"model.vocab_size must be at least {size}, .*, got {size - 1}; set it to {size}"
    with pytest.raises(ValueError, match=message):
        load(text_folder, tokenizer=str(hf_file), vocab_size=size - 1)
    with pytest.raises(ValueError, match="at least 256, because text is read as bytes, got 255; set it to 256"):
        load(text_folder, vocab_size=255)


def test_tokens_beyond_two_bytes_are_kept_in_four(tmp_path, text_folder, load):
    tokenizer = train_tokenizer(tmp_path / "tokenizer.json", ["<s>", "</s>"])
    tokenizer.add_tokens([tokenizers.AddedToken(f"<extra {number}>") for number in range(2**16)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    data = load(text_folder, tokenizer=str(tmp_path))
    assert data.train.tokens.dtype == np.uint32
    assert data.origin["vocab_size"] > 2**16
