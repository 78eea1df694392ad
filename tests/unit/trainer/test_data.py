"""Text as bytes: the split, the digest, the batches."""

from dataclasses import replace

import pytest
import torch

from quaver.trainer.config import Data, Training, Validation
from quaver.trainer.data import load_text
from quaver.trainer.layout import Layout

TRAINING = Training(seq_len=16, local_batch_size=2, global_batch_size=6, seed=3)


def test_stdlib_is_large_real_source_and_the_same_each_time():
    first, second = (load_text(Data(path="stdlib"), TRAINING) for _ in range(2))
    assert first.origin == second.origin
    assert torch.equal(first.train, second.train)
    assert len(first.train) > 2_000_000
    assert len(first.validation) > 100_000
    text = bytes(first.train.tolist())
    assert b"def " in text
    # _sysconfigdata has the paths of whoever built Python
    assert b"# system configuration generated and used by the sysconfig module" not in text


def test_a_folder_is_split_by_file(text_folder):
    data = load_text(Data(path=str(text_folder)), TRAINING)
    contents = [file.read_bytes() + b"\0" for file in sorted(text_folder.iterdir())]
    train, validation = bytes(data.train.tolist()), bytes(data.validation.tolist())
    assert all((content in train) != (content in validation) for content in contents)
    assert len(train) + len(validation) == sum(map(len, contents))
    assert data.origin["files"] == 12
    assert data.train.dtype == torch.uint8


def test_a_new_file_leaves_the_others_in_their_split(text_folder):
    before = bytes(load_text(Data(path=str(text_folder)), TRAINING).validation.tolist())
    (text_folder / "zz.txt").write_text("something else\n" * 40)  # its hash is late in the order
    after = bytes(load_text(Data(path=str(text_folder)), TRAINING).validation.tolist())
    assert after == before


def test_a_single_file_keeps_its_last_tenth_for_validation(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"abcdefghij" * 100)
    data = load_text(Data(path=str(file)), TRAINING)
    assert bytes(data.train.tolist()) + bytes(data.validation.tolist()) == file.read_bytes()
    assert len(data.validation) == 100


def test_digest_sees_content_and_names(text_folder):
    digests = {load_text(Data(path=str(text_folder)), TRAINING).origin["sha256"]}
    (text_folder / "00.txt").rename(text_folder / "99.txt")
    digests.add(load_text(Data(path=str(text_folder)), TRAINING).origin["sha256"])
    (text_folder / "99.txt").write_text("changed\n" * 100)
    digests.add(load_text(Data(path=str(text_folder)), TRAINING).origin["sha256"])
    assert len(digests) == 3


def test_binary_files_are_left_out_and_counted(text_folder):
    (text_folder / "nul.bin").write_bytes(b"a\0b" * 100)
    (text_folder / "latin.txt").write_bytes(b"caf\xe9" * 100)
    (text_folder / ".git").mkdir()
    (text_folder / ".git" / "config").write_text("secret\n" * 100)
    data = load_text(Data(path=str(text_folder)), TRAINING)
    assert data.origin["skipped_files"] == 2
    assert data.origin["files"] == 12


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, FileNotFoundError, "does not exist; give stdlib, a text file or a folder"),
        (b"", ValueError, "holds no text"),
        (b"\0\0", ValueError, "holds no text"),
        (b"short", ValueError, r"train split .* has 5 bytes, but one sequence needs training.seq_len \+ 1 = 17"),
        (b"x" * 100, ValueError, "validation split .* has 10 bytes"),
    ],
)
def test_bad_data(tmp_path, content, error, message):
    file = tmp_path / "data.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(error, match=message):
        load_text(Data(path=str(file)), TRAINING)


def test_an_empty_folder_holds_no_text(tmp_path):
    with pytest.raises(ValueError, match="holds no text"):
        load_text(Data(path=str(tmp_path)), TRAINING)


def test_batches_are_windows_of_the_text_with_targets_one_ahead(text_folder):
    data = load_text(Data(path=str(text_folder)), TRAINING)
    text = bytes(data.train.tolist())
    batches = data.step_batches(TRAINING, 1)
    assert [tokens.shape for tokens, _ in batches] == [(2, 16)] * 3
    for tokens, targets in batches:
        assert tokens.dtype == targets.dtype == torch.int64
        for row, target in zip(tokens, targets, strict=True):
            assert bytes(row.tolist()) + bytes(target[-1:].tolist()) in text
            assert torch.equal(row[1:], target[:-1])


def test_batches_depend_on_seed_and_step_and_not_on_how_they_are_cut(text_folder):
    data = load_text(Data(path=str(text_folder)), TRAINING)

    def sequences(training: Training, step: int) -> torch.Tensor:
        return torch.cat([tokens for tokens, _ in data.step_batches(training, step)])

    first = sequences(TRAINING, 1)
    assert torch.equal(first, sequences(TRAINING, 1))
    assert torch.equal(first, sequences(replace(TRAINING, local_batch_size=3), 1))
    assert not torch.equal(first, sequences(TRAINING, 2))
    assert not torch.equal(first, sequences(replace(TRAINING, seed=4), 1))


@pytest.mark.parametrize("tensor", [1, 2])
def test_ranks_deal_the_batches_of_one_process_among_them(text_folder, tensor):
    data = load_text(Data(path=str(text_folder)), TRAINING)
    training = replace(TRAINING, global_batch_size=12)
    alone = data.step_batches(training, 1)
    assert len(alone) == 6
    for rank in range(3 * tensor):
        layout = Layout(shard=3, tensor=tensor, rank=rank)
        mine = data.step_batches(training, 1, layout)
        group = rank // tensor
        assert len(mine) == 2
        assert torch.equal(mine[0][0], alone[group][0])
        assert torch.equal(mine[1][1], alone[3 + group][1])


def test_validation_batches_are_dealt_only_where_they_divide(text_folder):
    data = load_text(Data(path=str(text_folder)), TRAINING)
    layouts = [Layout(replicate=3, rank=rank) for rank in range(3)]
    alone = data.validation_batches(TRAINING, Validation(steps=6))
    dealt = [data.validation_batches(TRAINING, Validation(steps=6), layout) for layout in layouts]
    assert all(torch.equal(dealt[number % 3][number // 3][0], alone[number][0]) for number in range(6))
    assert [len(data.validation_batches(TRAINING, Validation(steps=4), layout)) for layout in layouts] == [4, 4, 4]


def test_validation_batches_span_the_split_and_never_change(text_folder):
    data = load_text(Data(path=str(text_folder)), TRAINING)
    validation = Validation(steps=3)
    batches = data.validation_batches(TRAINING, validation)
    assert [tokens.shape for tokens, _ in batches] == [(2, 16)] * 3
    again = data.validation_batches(replace(TRAINING, seed=99), validation)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(batches, again, strict=True))
    assert torch.equal(batches[0][0][0], data.validation[:16].long())
    assert torch.equal(batches[-1][1][-1], data.validation[-16:].long())


def test_a_split_of_exactly_one_sequence_works(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"0123456789" * 17)
    data = load_text(Data(path=str(file)), TRAINING)
    assert len(data.validation) == 17
    (tokens, targets), *_ = data.validation_batches(TRAINING, Validation(steps=1))
    assert tokens.shape == targets.shape == (2, 16)
