"""The stream of sequences: each once per epoch, in an order of seed and epoch, from any place on."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from quaver.trainer.config import Training
from quaver.trainer.data.order import stream_indices
from quaver.trainer.parallel_dims import ParallelDims


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 17, 63, 64, 65, 1000, 4096, 4097, 100_003])
def test_an_epoch_has_every_sequence_once(count):
    for epoch in (0, 1, 5):
        indices = stream_indices(epoch * count, count, count, seed=3)
        assert indices.dtype == np.int64
        assert np.array_equal(np.sort(indices), np.arange(count))


def test_the_order_is_of_seed_and_epoch():
    first, second, other = (stream_indices(start, 1000, 1000, seed) for start, seed in ((0, 1), (1000, 1), (0, 2)))
    for one, two in ((first, second), (first, other), (second, other), (first, np.arange(1000))):
        assert np.count_nonzero(one == two) < 10  # 1 is expected by chance


def test_the_order_is_the_same_on_every_machine_and_for_good():
    """Runs that resume with a newer quaver must go on with the same sequences."""
    assert stream_indices(0, 8, 1000, seed=0).tolist() == [392, 855, 729, 432, 952, 18, 417, 298]
    assert stream_indices(2**40, 4, 2**33 + 7, seed=2**63 - 1).tolist() == [
        5622581958,
        7666094962,
        7809753020,
        4795761993,
    ]


def test_any_part_of_the_stream_is_what_the_whole_has_there():
    whole = stream_indices(0, 350, 100, seed=7)
    for start, amount in ((0, 1), (99, 2), (90, 120), (250, 100), (349, 1)):
        assert np.array_equal(stream_indices(start, amount, 100, seed=7), whole[start : start + amount])


TRAINING = Training(seq_len=16, local_batch_size=2, global_batch_size=12, seed=3)


def windows(batches) -> list[tuple[int, ...]]:
    return [tuple(row) for batch in batches for row in torch.cat([batch.tokens, batch.targets[:, -1:]], 1).tolist()]


@pytest.fixture
def numbered(tmp_path, load):
    """A text of which every window of 17 bytes is another."""
    (tmp_path / "a.txt").write_text("".join(f"{number:06d}\n" for number in range(1000)))
    return load(tmp_path / "a.txt")


def test_ranks_never_overlap_and_an_epoch_leaves_nothing_out(numbered):
    count = numbered.train.sequence_count(16)
    assert count == (len(numbered.train.tokens) - 1) // 16
    text, seen = numbered.train.tokens, []
    steps = -(-count // 12)
    for rank in range(3):
        for step in range(steps):
            seen.append(numbered.step_batches(TRAINING, step * 12, ParallelDims(shard=3, rank=rank)))
    dealt = [window for batches in seen for window in windows(batches)]
    expected = {tuple(text[16 * index : 16 * index + 17].tolist()) for index in range(count)}
    assert len(expected) == count
    assert set(dealt) == expected
    extra = steps * 12 - count  # the last step ends in the next epoch
    assert len(dealt) == count + extra
    assert 0 < extra < 12


def test_resuming_mid_epoch_goes_on_as_if_nothing_had_happened(numbered, load, tmp_path):
    """With other batch shapes too: the count of consumed sequences is all there is to know."""
    through = [window for step in range(6) for window in windows(numbered.step_batches(TRAINING, 12 * step))]
    opened_again = load(tmp_path / "a.txt")
    smaller = replace(TRAINING, global_batch_size=6, local_batch_size=3)
    resumed = [w for step in range(8) for w in windows(opened_again.step_batches(smaller, 24 + 6 * step))]
    assert resumed == through[24:]


def test_batches_depend_on_the_seed_and_not_on_how_they_are_cut(numbered):
    first = windows(numbered.step_batches(TRAINING, 0))
    assert first == windows(numbered.step_batches(replace(TRAINING, local_batch_size=3), 0))
    assert first != windows(numbered.step_batches(replace(TRAINING, seed=4), 0))
    assert first != windows(numbered.step_batches(TRAINING, 12))
