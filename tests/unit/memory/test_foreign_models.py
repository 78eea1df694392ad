"""Predictions for models that are not quaver's own: against measurements of real steps, and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quaver import Float8LinearConfig, convert_to_float8_training
from quaver.memory import explain
from quaver.memory.faking.fakes import fake_tensors, without_tracing_in_transformers
from quaver.recorder.allocator import measure_usage

transformers = pytest.importorskip("transformers")

WITHIN = 0.03
"""Of a measurement: what predictions are to keep."""
VOCABULARY = 512
TOKENS = torch.arange(128).reshape(2, 64) % VOCABULARY


def _measured(model, inputs, loss):
    optimizer = torch.optim.AdamW(model.parameters())

    def step(mark):
        output = loss(model(*inputs))
        mark()
        output.backward()
        del output
        optimizer.step()
        model.zero_grad(set_to_none=True)

    step(lambda: None)
    with measure_usage(torch.device("cpu")) as measured:
        step(measured.mark)
    return measured.usage


def _check(model, inputs, loss, **options):
    prediction = explain(model, inputs, loss=loss, optimizer=torch.optim.AdamW, **options)
    usage = _measured(model, inputs, loss)
    assert prediction.step_peak_bytes == pytest.approx(usage.tensor_peak_bytes, rel=WITHIN)
    assert prediction.saved_by_forward_bytes == pytest.approx(usage.saved_bytes, rel=WITHIN)
    return prediction


def _next_token(output):
    logits = output.logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), torch.zeros(logits.shape[:2].numel(), dtype=torch.int64))


def _square(output):
    return output.float().square().mean()


def _llama(*, width=128, layers=2, **settings):
    heads = width // 32
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads // 2, "vocab_size": VOCABULARY}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **settings))


def _float8_llama():
    model, config = _llama(), Float8LinearConfig.from_recipe_name("rowwise")
    return convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "lm_head")


def _checkpointed_llama():
    model = _llama(use_cache=False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def _gpt2():
    sizes = {"vocab_size": VOCABULARY, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


HUGGING_FACE = {
    "llama, attention in Python, tied": lambda: _llama(attn_implementation="eager", tie_word_embeddings=True),
    "llama, checkpointed": _checkpointed_llama,
    "llama, float8": _float8_llama,
    "gpt2": _gpt2,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face(name):
    model = HUGGING_FACE[name]()
    prediction = _check(model, (TOKENS,), _next_token)
    parameters = sum(each.numel() for each in model.parameters())  # tied ones once
    assert prediction.by_category["parameters"] == pytest.approx(4 * parameters, rel=0.01)  # and small buffers
    assert any("layers.1" in module or ".h.1" in module for (module,) in prediction.by("module"))


def test_transformers_take_fakes_for_real_tensors_only_meanwhile():
    tracing = transformers.utils.import_utils.is_tracing
    with fake_tensors():
        assert not tracing(torch.empty(2))
        with without_tracing_in_transformers():  # nested
            assert not tracing(torch.empty(2))
        fake = torch.empty(2)
    assert tracing(fake)


def _layers(*, last=64):
    middle = (nn.LayerNorm(128), nn.GELU(), nn.Dropout(0.1))
    return nn.Sequential(nn.Embedding(VOCABULARY, 64), nn.Linear(64, 128), *middle, nn.Linear(128, last))


@pytest.mark.parametrize("recipe", [None, "tensorwise"])
def test_plain_layers(recipe):
    model = _layers()
    if recipe is not None:
        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    prediction = _check(model, (TOKENS.repeat(16, 1),), _square)
    modules = {module for (module,) in prediction.by("module")}
    assert {"0", "1", "2", "5"} <= modules


class _Squares(torch.autograd.Function):
    """A product that keeps its factors in half precision."""

    @staticmethod
    def forward(ctx, rows, weight):
        ctx.save_for_backward(rows.half(), weight)
        return rows.square() @ weight

    @staticmethod
    def backward(ctx, grad):
        rows, weight = ctx.saved_tensors
        rows = rows.float()
        return 2 * rows * (grad @ weight.t()), rows.square().t() @ grad


class _Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(128, 128))

    def forward(self, rows):
        return _Squares.apply(rows, self.weight)


def test_an_autograd_function_of_ones_own():
    prediction = _check(nn.Sequential(nn.Linear(128, 128), _Custom(), _Custom()), (torch.zeros(1024, 128),), _square)
    halves = [row for row in prediction.saved_for_backward if row["dtype"] == "float16"]
    assert sum(row["bytes"] for row in halves) == 2 * 1024 * 128 * 2


class _Chooses(nn.Linear):
    def forward(self, rows):
        return super().forward(rows[rows[:, 0] > 0])


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        ctx.save_for_backward(rows)
        return rows * 2

    @staticmethod
    def backward(ctx, grad):
        (rows,) = ctx.saved_tensors
        return grad * torch.masked_select(rows, rows > 0).sum()


class _Late(nn.Linear):
    def forward(self, rows):
        return _InBackward.apply(super().forward(rows))


ROWS = torch.zeros(8, 4)


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (_Chooses, r"aten\.nonzero\.default in module 0 \(\w+.*\.py:\d+\)"),
        (_Late, r"aten\.masked_select\.default in .*models\.py:\d+"),
    ],
)
def test_a_size_that_numbers_decide_is_refused_with_its_place_or_estimated(kind, place):
    model = nn.Sequential(kind(4, 4), nn.Linear(4, 4))
    with pytest.raises(NotImplementedError, match=f"do not depend on values, got {place}") as refused:
        explain(model, (ROWS,))
    assert "\n" not in str(refused.value)
    prediction = explain(model, (ROWS,), estimate=True)
    assert len(prediction.notes) == 1
    assert "gives its largest possible result" in prediction.notes[0]
    assert list(prediction.notes) == prediction.to_dict()["assumptions"]


def test_an_estimate_is_what_the_largest_choice_takes():
    """Where all rows are chosen, the assumption is what happens."""
    _check(nn.Sequential(_Chooses(64, 256), nn.Linear(256, 32)), (torch.ones(1024, 64),), _square, estimate=True)


class _Length(nn.Linear):
    def forward(self, rows):
        return super().forward(rows[: (rows[:, 0] > 0).sum().item()])


class _Split(nn.Linear):
    def forward(self, rows):
        return torch.cat([super(_Split, self).forward(part) for part in rows.split(rows[:, 0].long().tolist())])


class _Checks(nn.Linear):
    def forward(self, rows):
        if not rows.isfinite().all() or rows.long().max().item() > 100 or rows.sum().tolist() > 100:
            raise ValueError("a number that is read is 1")
        return super().forward(rows)


def test_integers_that_sizes_depend_on_are_found():
    with pytest.raises(
        NotImplementedError, match=r"other sizes for another integer read in module 0 \(\w+.*\.py:\d+\)"
    ):
        explain(nn.Sequential(_Length(4, 4)), (ROWS,))
    estimate = explain(nn.Sequential(_Length(4, 4)), (ROWS,), estimate=True)
    assert "sizes depend on an integer that was assumed to be 1, read in module 0" in estimate.notes[0]
    with pytest.raises(NotImplementedError, match=r"got an error \(split_with_sizes .*\) read in module 0"):
        explain(nn.Sequential(_Split(4, 4)), (torch.zeros(9, 4),))


def test_numbers_that_are_only_checked_are_counted_and_do_no_harm():
    prediction = explain(nn.Sequential(_Checks(4, 4)), (ROWS,))
    assert prediction.reads == prediction.to_dict()["reads_answered_by_1"] == 3
    assert prediction.notes == ()
    unread = explain(nn.Sequential(nn.Linear(4, 4)), (ROWS,))
    assert prediction.by_category["parameters"] == unread.by_category["parameters"]


@pytest.fixture
def unknown_operator():
    library = torch.library.Library("quaver_tests_foreign", "FRAGMENT")
    library.define("odd(Tensor rows) -> Tensor")
    library.impl("odd", torch.clone, "CPU")
    yield torch.ops.quaver_tests_foreign.odd
    library._destroy()


def test_an_operator_without_a_fake_implementation(unknown_operator):
    class Odd(nn.Linear):
        def forward(self, rows):
            return super().forward(rows) * unknown_operator(rows.detach()).sum()

    model = nn.Sequential(Odd(4, 4))
    with pytest.raises(
        NotImplementedError, match=r"quaver_tests_foreign\.odd.* in module 0 .* torch.library.register_fake"
    ):
        explain(model, (ROWS,))
    prediction = explain(model, (ROWS,), estimate=True)
    assert "odd.default, which has no fake implementation, gives results like its first tensor" in prediction.notes[0]


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="same reduction dim"):
        explain(nn.Linear(4, 4), (torch.zeros(2, 5),))
