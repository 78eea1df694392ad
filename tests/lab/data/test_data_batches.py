"""Tests sequences of tokens: their order, their batches on every layout, and attention inside documents."""

from dataclasses import replace
from functools import partialmethod

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quaver.lab.data.order import compute_stream_indices
from quaver.lab.model.float8 import convert_model
from quaver.lab.model.llama import Llama
from quaver.lab.model.loss import compute_next_token_loss
from quaver.lab.model.parallelize import parallelize
from quaver.lab.settings import ActivationCheckpoint, Float8, Model, TrainConfig, Training, Validation
from quaver.lab.settings.parallel_dims import ParallelDims
from quaver.lab.trainer.training_run import prepare_run
from tests.lab.trainer.runs import with_settings
from tests.thinned import at_night

TRAINING = Training(seq_len=16, local_batch_size=2, global_batch_size=12, seed=3)

CONFIG = Model(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=96)
LENGTHS = [[7, 1, 20, 4], [32], [1, 1, 30], [16, 16]]
"""Documents of each of four rows of 32 tokens."""

FLOAT32_ROUNDING = {"rtol": 0.0, "atol": 2e-5}
"""Rotation by other positions rounds the same products of queries and keys otherwise. Logits reach 7 here, of which one
float32 unit is 5e-7; differences of at most 8e-6 were measured over 20 seeds."""


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 17, 63, 64, 65, 1000, 4096, 4097, 100_003])
def test_an_epoch_has_every_sequence_once(count):
    for epoch in (0, 1, 5):
        indices = compute_stream_indices(epoch * count, count, count, seed=3)
        assert indices.dtype == np.int64
        assert np.array_equal(np.sort(indices), np.arange(count))


def test_the_order_is_the_same_on_every_machine_and_for_good():
    """Runs that resume with a newer quaver must go on with the same sequences."""
    assert compute_stream_indices(0, 8, 1000, seed=0).tolist() == [392, 855, 729, 432, 952, 18, 417, 298]
    late = compute_stream_indices(2**40, 4, 2**33 + 7, seed=2**63 - 1).tolist()
    assert late == [5622581958, 7666094962, 7809753020, 4795761993]


def test_any_part_of_the_stream_equals_that_of_the_whole():
    whole = compute_stream_indices(0, 350, 100, seed=7)
    for start, length in ((0, 1), (99, 2), (90, 120), (250, 100), (349, 1)):
        assert np.array_equal(compute_stream_indices(start, length, 100, seed=7), whole[start : start + length])


def list_windows(batches) -> list[tuple[int, ...]]:
    for batch in batches:
        assert batch.tokens.dtype == batch.targets.dtype == torch.int64
        assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
        assert batch.documents is None
    return [tuple(row) for batch in batches for row in torch.cat([batch.tokens, batch.targets[:, -1:]], 1).tolist()]


@pytest.fixture
def numbered(tmp_path, load):
    """Return a text of which every window of 17 bytes is another."""
    (tmp_path / "a.txt").write_text("".join(f"{number:06d}\n" for number in range(1000)))
    return load(tmp_path / "a.txt")


def test_ranks_never_overlap_and_an_epoch_leaves_nothing_out(numbered):
    count = numbered.train.count_sequences(16)
    assert count == (len(numbered.train.tokens) - 1) // 16
    text, dealt = numbered.train.tokens, []
    steps = -(-count // 12)
    for rank in range(3):
        for step in range(steps):
            dealt += list_windows(numbered.make_step_batches(TRAINING, step * 12, ParallelDims(dp_shard=3, rank=rank)))
    expected = {tuple(text[16 * index : 16 * index + 17].tolist()) for index in range(count)}
    assert len(expected) == count
    assert set(dealt) == expected
    extra = steps * 12 - count  # the last step ends in the next epoch
    assert len(dealt) == count + extra
    assert 0 < extra < 12


def test_resuming_mid_epoch_goes_on_as_if_nothing_had_happened(numbered, load, tmp_path):
    """Also with another batch shape: the stream depends on the number of consumed sequences alone."""
    whole = [batch for step in range(6) for batch in numbered.make_step_batches(TRAINING, 12 * step)]
    reopened = load(tmp_path / "a.txt")
    smaller = replace(TRAINING, global_batch_size=6, local_batch_size=3)
    resumed = [batch for step in range(8) for batch in reopened.make_step_batches(smaller, 24 + 6 * step)]
    assert list_windows(resumed) == list_windows(whole)[24:]


def test_batches_depend_on_the_seed_and_not_on_how_they_are_cut(numbered):
    assert [batch.tokens.shape for batch in numbered.make_step_batches(TRAINING, 0)] == [(2, 16)] * 6
    first = list_windows(numbered.make_step_batches(TRAINING, 0))
    assert first == list_windows(numbered.make_step_batches(replace(TRAINING, local_batch_size=3), 0))
    assert first != list_windows(numbered.make_step_batches(replace(TRAINING, seed=4), 0))
    assert first != list_windows(numbered.make_step_batches(TRAINING, 12))


def test_documents_are_numbered_from_the_start_of_each_row(tmp_path, load):
    for number in range(60):
        (tmp_path / f"{number:02d}.txt").write_text(f"{number:02d}" * (1 + number % 9))
    data = load(tmp_path, document_mask=True)
    training = replace(TRAINING, global_batch_size=data.train.count_sequences(16) // 2 * 2)
    several = 0
    for batch in [*data.make_step_batches(training, 0), *data.make_validation_batches(TRAINING, Validation(steps=3))]:
        for tokens, documents in zip(batch.tokens.tolist(), batch.documents.tolist(), strict=True):
            expected = [tokens[:place].count(0) for place in range(16)]  # an end token belongs to what it ends
            assert documents == expected
            several += expected[-1] > 0
    assert several > 10


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("mask", [False, True])
def test_ranks_share_out_the_batches_of_one_process(text_folder, tp, mask, load):
    data = load(text_folder, document_mask=mask)
    alone = data.make_step_batches(TRAINING, 5)
    assert len(alone) == 6
    for rank in range(3 * tp):
        first, second = data.make_step_batches(TRAINING, 5, ParallelDims(dp_shard=3, tp=tp, rank=rank))
        group = rank // tp
        assert torch.equal(first.tokens, alone[group].tokens)
        assert torch.equal(second.targets, alone[3 + group].targets)
        assert not mask or torch.equal(second.documents, alone[3 + group].documents)


def test_validation_batches_are_dealt_only_where_they_divide(text_folder, load):
    data = load(text_folder)
    layouts = [ParallelDims(dp_replicate=3, rank=rank) for rank in range(3)]
    alone = data.make_validation_batches(TRAINING, Validation(steps=6))
    dealt = [data.make_validation_batches(TRAINING, Validation(steps=6), layout) for layout in layouts]
    assert all(torch.equal(dealt[number % 3][number // 3].tokens, alone[number].tokens) for number in range(6))
    assert [len(data.make_validation_batches(TRAINING, Validation(steps=4), layout)) for layout in layouts] == [4, 4, 4]


def test_validation_batches_span_the_split_and_never_change(text_folder, load):
    data = load(text_folder)
    validation = Validation(steps=3)
    batches = data.make_validation_batches(TRAINING, validation)
    assert [batch.tokens.shape for batch in batches] == [(2, 16)] * 3
    again = data.make_validation_batches(replace(TRAINING, seed=99), validation)
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(batches, again, strict=True))
    assert batches[0].tokens[0].tolist() == data.validation.tokens[:16].tolist()
    assert batches[-1].targets[-1].tolist() == data.validation.tokens[-16:].tolist()


def test_a_split_of_exactly_one_sequence_works(tmp_path, load):
    file = tmp_path / "a.txt"
    file.write_bytes(b"0123456789" * 16)
    data = load(file)
    assert len(data.validation.tokens) == 17
    (batch, *_) = data.make_validation_batches(TRAINING, Validation(steps=1))
    assert batch.tokens.shape == batch.targets.shape == (2, 16)


@pytest.fixture
def model() -> Llama:
    model = Llama(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() == 2 else 1)  # else attention hardly matters
    return model


@pytest.fixture
def packed() -> tuple[Tensor, Tensor]:
    """Return tokens and documents [4, 32]."""
    rows = [torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)) for lengths in LENGTHS]
    return torch.randint(0, 256, (4, 32)), torch.stack(rows)


def test_a_packed_row_is_its_documents_alone(model, packed):
    tokens, documents = packed
    together = model(tokens, documents)
    for row, lengths in enumerate(LENGTHS):
        alone = torch.cat([model(part[None])[0] for part in tokens[row].split(lengths)])
        torch.testing.assert_close(together[row], alone, **FLOAT32_ROUNDING)
    crossing = model(tokens)
    assert (crossing[0] - together[0]).abs().max() > 1000 * FLOAT32_ROUNDING["atol"]  # the mask matters
    torch.testing.assert_close(crossing[1], together[1], **FLOAT32_ROUNDING)  # one document: nothing to mask


def test_without_documents_attention_is_causal_and_has_no_mask(model, packed, monkeypatch):
    calls = []
    attention = F.scaled_dot_product_attention

    def record_call(*tensors: Tensor, **options: object) -> Tensor:
        calls.append((len(tensors), tensors[1].shape[1], options))
        return attention(*tensors, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record_call)
    model(packed[0])
    assert calls == [(3, 2, {"is_causal": True, "enable_gqa": True})] * 2


@pytest.mark.parametrize(
    ("recipe", "compiled", "mode"),
    [(None, False, "full"), ("tensorwise", False, "selective"), *at_night([("rowwise", True, "selective")])],
)
def test_compiled_and_checkpointed_blocks_do_the_same(recipe, compiled, mode, packed, monkeypatch):
    float8 = Float8(recipe_name=recipe) if recipe else Float8(enable_float8_linear=False)
    config = TrainConfig(
        model=replace(CONFIG, n_layers=1),
        training=Training(compile=compiled),
        activation_checkpoint=ActivationCheckpoint(mode=mode),
        float8=float8,
    )
    tokens, documents = packed

    def compute_loss_and_gradients(config: TrainConfig) -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(1)
        model = Llama(config.model)
        if recipe:
            convert_model(model, config.float8, tokens=tokens.numel(), device=torch.device("cpu"))
        parallelize(model, config, None)
        loss = compute_next_token_loss(model(tokens, documents), tokens.roll(-1, 1))
        loss.backward()
        return loss, [parameter.grad for parameter in model.parameters()]

    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    plain = replace(config, training=Training(), activation_checkpoint=ActivationCheckpoint())
    loss, gradients = compute_loss_and_gradients(config)
    expected, expected_gradients = compute_loss_and_gradients(plain)
    assert torch.equal(loss, expected)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-5, atol=1e-7)


def test_a_run_with_the_mask_is_another_run(tiny_config, tmp_path, text_folder):
    for number, file in enumerate(sorted(text_folder.iterdir())):
        file.write_text(f"{number} {file.name} " * 2)  # several documents in a sequence
    for number in range(60):
        (text_folder / f"more{number}.txt").write_text(f"{number} times {number} is {number * number}")
    losses = []
    for name, mask in (("with", True), ("without", False)):
        run = prepare_run(with_settings(tiny_config, job={"name": name}, data={"document_mask": mask}))
        batches = run.data.make_step_batches(run.config.training, 0)
        assert (batches[0].documents is not None) == mask
        losses.append(run.models[0].train_step(1, batches).loss)
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)  # first weights: little attention
