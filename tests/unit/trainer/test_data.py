"""Text as bytes: the splits, the digest, and how batches are dealt out."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from quaver.trainer.config import Training, Validation
from quaver.trainer.parallel_dims import ParallelDims

TRAINING = Training(seq_len=16, local_batch_size=2, global_batch_size=6, seed=3)


def test_stdlib_is_large_real_source_and_the_same_each_time(load):
    first, second = (load("stdlib") for _ in range(2))
    assert first.origin == second.origin
    assert np.array_equal(first.train.tokens, second.train.tokens)
    assert len(first.train.tokens) > 2_000_000
    assert len(first.validation.tokens) > 100_000
    text = first.train.tokens.tobytes()
    assert b"def " in text
    # _sysconfigdata has paths of the machine that built Python
    assert b"# system configuration generated and used by the sysconfig module" not in text


def test_a_folder_is_split_by_file(text_folder, load):
    data = load(text_folder)
    contents = [file.read_bytes() + b"\0" for file in sorted(text_folder.iterdir())]
    train, validation = data.train.tokens.tobytes(), data.validation.tokens.tobytes()
    assert all((content in train) != (content in validation) for content in contents)
    assert len(train) + len(validation) == sum(map(len, contents))
    assert data.origin["files"] == 12
    assert data.train.tokens.dtype == np.uint8
    assert (data.origin["train_documents"], data.origin["validation_documents"]) == (11, 1)
    for split in (data.train, data.validation):
        assert np.array_equal(split.ends, np.flatnonzero(split.tokens == 0) + 1)


def test_a_new_file_leaves_the_others_in_their_split(text_folder, load):
    before = load(text_folder).validation.tokens.tobytes()
    (text_folder / "zz.txt").write_text("something else\n" * 40)  # its hash is late in the order
    assert load(text_folder).validation.tokens.tobytes() == before


def test_a_single_file_keeps_its_last_tenth_for_validation(tmp_path, load):
    file = tmp_path / "a.txt"
    file.write_bytes(b"abcdefghij" * 100)
    data = load(file)
    assert data.train.tokens.tobytes() == file.read_bytes()[:900] + b"\0"
    assert data.validation.tokens.tobytes() == file.read_bytes()[900:] + b"\0"


@pytest.mark.parametrize("before", range(4))
def test_a_single_file_is_never_cut_inside_a_character(before, tmp_path, load):
    file = tmp_path / "a.txt"
    text = "x" * before + "\N{GRINNING FACE}" * 100
    file.write_text(text, encoding="utf-8")
    data = load(file)
    parts = [split.tokens[:-1].tobytes().decode("utf-8") for split in (data.train, data.validation)]
    assert "".join(parts) == text
    assert len(parts[1]) in (10, 11)


def test_digest_sees_content_and_order(text_folder, load):
    digests = {load(text_folder).origin["sha256"]}
    (text_folder / "00.txt").rename(text_folder / "99.txt")
    digests.add(load(text_folder).origin["sha256"])
    (text_folder / "99.txt").write_text("changed\n" * 100)
    digests.add(load(text_folder).origin["sha256"])
    assert len(digests) == 3


def test_line_ends_stay_what_they_are(tmp_path, load):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\n" * 40)
    assert b"one\r\ntwo\rthree\none" in load(tmp_path / "a.txt").train.tokens.tobytes()


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, FileNotFoundError, "does not exist; give stdlib, a text file or a folder"),
        (b"", ValueError, "holds no text"),
        (b"\0\0", ValueError, "holds no text.*1 corrupt were skipped, the first at data.txt: a 0 byte"),
        (b"short", ValueError, r"train split .* has 6 tokens, but one sequence needs training.seq_len \+ 1 = 17"),
        (b"x" * 100, ValueError, "validation split .* has 11 tokens"),
    ],
)
def test_bad_data(tmp_path, content, error, message, load):
    file = tmp_path / "data.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(error, match=message):
        load(file)


def test_an_empty_folder_holds_no_text(tmp_path, load):
    with pytest.raises(ValueError, match="holds no text"):
        load(tmp_path)


def test_batches_are_windows_of_the_text_with_targets_one_ahead(text_folder, load):
    data = load(text_folder)
    text = data.train.tokens.tobytes()
    batches = data.step_batches(TRAINING, 0)
    assert [batch.tokens.shape for batch in batches] == [(2, 16)] * 3
    for batch in batches:
        assert batch.tokens.dtype == batch.targets.dtype == torch.int64
        assert batch.documents is None
        for row, target in zip(batch.tokens, batch.targets, strict=True):
            place = text.index(bytes(row.tolist()) + bytes(target[-1:].tolist()))
            assert place >= 0
            assert torch.equal(row[1:], target[:-1])


def test_documents_are_numbered_from_the_start_of_each_row(tmp_path, load):
    for number in range(60):
        (tmp_path / f"{number:02d}.txt").write_text(f"{number:02d}" * (1 + number % 9))
    data = load(tmp_path, document_mask=True)
    training = replace(TRAINING, global_batch_size=data.train.sequence_count(16) // 2 * 2)
    several = 0
    for batch in [*data.step_batches(training, 0), *data.validation_batches(TRAINING, Validation(steps=3))]:
        for tokens, documents in zip(batch.tokens.tolist(), batch.documents.tolist(), strict=True):
            expected = [tokens[:place].count(0) for place in range(16)]  # an end token belongs to what it ends
            assert documents == expected
            several += expected[-1] > 0
    assert several > 10


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("mask", [False, True])
def test_ranks_deal_the_batches_of_one_process_among_them(text_folder, tensor, mask, load):
    data = load(text_folder, document_mask=mask)
    training = replace(TRAINING, global_batch_size=12)
    alone = data.step_batches(training, 5)
    assert len(alone) == 6
    for rank in range(3 * tensor):
        mine = data.step_batches(training, 5, ParallelDims(shard=3, tensor=tensor, rank=rank))
        group = rank // tensor
        assert len(mine) == 2
        assert torch.equal(mine[0].tokens, alone[group].tokens)
        assert torch.equal(mine[1].targets, alone[3 + group].targets)
        assert not mask or torch.equal(mine[1].documents, alone[3 + group].documents)


def test_validation_batches_are_dealt_only_where_they_divide(text_folder, load):
    data = load(text_folder)
    layouts = [ParallelDims(replicate=3, rank=rank) for rank in range(3)]
    alone = data.validation_batches(TRAINING, Validation(steps=6))
    dealt = [data.validation_batches(TRAINING, Validation(steps=6), layout) for layout in layouts]
    assert all(torch.equal(dealt[number % 3][number // 3].tokens, alone[number].tokens) for number in range(6))
    assert [len(data.validation_batches(TRAINING, Validation(steps=4), layout)) for layout in layouts] == [4, 4, 4]


def test_validation_batches_span_the_split_and_never_change(text_folder, load):
    data = load(text_folder)
    validation = Validation(steps=3)
    batches = data.validation_batches(TRAINING, validation)
    assert [batch.tokens.shape for batch in batches] == [(2, 16)] * 3
    again = data.validation_batches(replace(TRAINING, seed=99), validation)
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(batches, again, strict=True))
    assert batches[0].tokens[0].tolist() == data.validation.tokens[:16].tolist()
    assert batches[-1].targets[-1].tolist() == data.validation.tokens[-16:].tolist()


def test_a_split_of_exactly_one_sequence_works(tmp_path, load):
    file = tmp_path / "a.txt"
    file.write_bytes(b"0123456789" * 16)
    data = load(file)
    assert len(data.validation.tokens) == 17
    (batch, *_) = data.validation_batches(TRAINING, Validation(steps=1))
    assert batch.tokens.shape == batch.targets.shape == (2, 16)
