"""Tests predictions for models that are not quaver's against measured steps, and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quaver import convert_to_float8_training
from quaver.lab.memory import predict_step_memory
from tests.lab.memory.models import check_explained
from tests.thinned import at_night

transformers = pytest.importorskip("transformers")

VOCABULARY = 512
TOKENS = torch.arange(128).reshape(2, 64) % VOCABULARY


def predict_next(output):
    logits = output.logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), torch.zeros(logits.shape[:2].numel(), dtype=torch.int64))


def square(output):
    return output.float().square().mean()


def build_llama(*, width=128, layers=2, **settings):
    heads = width // 32
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads // 2, "vocab_size": VOCABULARY}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **settings))


def build_float8_llama():
    is_converted = lambda _, name: name != "lm_head"  # noqa: E731
    return convert_to_float8_training(build_llama(), config="rowwise", module_filter_fn=is_converted)


def build_checkpointed_llama():
    model = build_llama(use_cache=False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def build_gpt2():
    sizes = {"vocab_size": VOCABULARY, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def build_layers(recipe=None):
    middle = (nn.LayerNorm(128), nn.GELU(), nn.Dropout(0.1))
    model = nn.Sequential(nn.Embedding(VOCABULARY, 64), nn.Linear(64, 128), *middle, nn.Linear(128, 64))
    return model if recipe is None else convert_to_float8_training(model, config=recipe)


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


class _Custom(nn.Linear):
    def forward(self, rows):
        return _Squares.apply(rows, self.weight)


class _LinearAfter(nn.Linear):
    """A function of the input, and a linear of its result."""

    def __init__(self, function, inputs=4, outputs=4):
        super().__init__(inputs, outputs)
        self.function = function

    def forward(self, rows):
        return super().forward(self.function(rows))


def choose_rows(rows):
    return rows[rows[:, 0] > 0]


LONG, ONES = TOKENS.repeat(16, 1), torch.ones(1024, 64)
MODELS = {
    "llama, attention in Python, tied": (
        lambda: build_llama(attn_implementation="eager", tie_word_embeddings=True),
        *(TOKENS, predict_next, "layers.1"),
    ),
    "llama, checkpointed": (build_checkpointed_llama, TOKENS, predict_next, "layers.1"),
    "llama, float8": (build_float8_llama, TOKENS, predict_next, "layers.1"),
    "gpt2": (build_gpt2, TOKENS, predict_next, ".h.1"),
    "plain layers": (build_layers, LONG, square, "5"),
    "plain layers, float8": (lambda: build_layers("tensorwise"), LONG, square, "5"),
    "an autograd function": (
        lambda: nn.Sequential(nn.Linear(64, 64), _Custom(64, 64, False), _Custom(64, 64, False)),
        *(ONES, square, "2"),
    ),
    # where all rows are chosen, the assumption is what happens
    "an estimate": (
        lambda: nn.Sequential(_LinearAfter(choose_rows, 64, 256), nn.Linear(256, 32)),
        *(ONES, square, "0"),
    ),
}
ALWAYS = ["llama, attention in Python, tied", "llama, checkpointed", "plain layers, float8", *list(MODELS)[-2:]]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", [*ALWAYS, *at_night((name,) for name in MODELS if name not in ALWAYS)])
def test_a_prediction_is_what_is_measured(name):
    build, inputs, loss, module = MODELS[name]
    model = build()
    prediction = check_explained(model, (inputs,), loss, estimate=name == "an estimate")
    parameters = sum(parameter.numel() for parameter in model.parameters())  # tied ones once
    assert prediction.by_category["parameters"] == pytest.approx(4 * parameters, rel=0.01)  # and small buffers
    assert any(module in name for (name,) in prediction.sum_bytes_by("module"))
    halves = [row["bytes"] for row in prediction.saved_for_backward if row["dtype"] == "float16"]
    assert sum(halves) == (2 * 1024 * 64 * 2 if name == "an autograd function" else 0)


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        ctx.save_for_backward(rows)
        return rows * 2

    @staticmethod
    def backward(ctx, grad):
        (rows,) = ctx.saved_tensors
        return grad * torch.masked_select(rows, rows > 0).sum()


LIBRARY = torch.library.Library("quaver_tests_foreign", "FRAGMENT")
LIBRARY.define("odd(Tensor rows) -> Tensor")
LIBRARY.impl("odd", torch.clone, "CPU")
PLACE = r"in module 1 \(\w+.*\.py:\d+\)"
LARGEST = "gives its largest possible result"


@pytest.mark.parametrize(
    ("function", "refusal", "assumption"),
    [
        (choose_rows, rf"do not depend on values, got aten\.nonzero\.default {PLACE}", LARGEST),
        (_InBackward.apply, r"got aten\.masked_select\.default in .*models\.py:\d+", LARGEST),
        (
            lambda rows: rows[: (rows[:, 0] > 0).sum().item()],
            f"other sizes for another integer read {PLACE}",
            "sizes depend on an integer that was assumed to be 1, read in module 1",
        ),
        (
            lambda rows: torch.cat(rows.split(rows[:, 0].long().tolist())),
            rf"got an error \(split_with_sizes .*\) read {PLACE}",
            None,  # an error remains one
        ),
        (
            lambda rows: rows * torch.ops.quaver_tests_foreign.odd(rows.detach()).sum(),
            rf"quaver_tests_foreign\.odd.* {PLACE}.* torch.library.register_fake",
            "odd.default, which has no fake implementation, gives results like its first tensor",
        ),
    ],
    ids=["rows chosen", "values chosen in backward", "a length", "lengths", "an unknown operator"],
)
def test_what_values_decide_is_refused_with_its_place_or_estimated(function, refusal, assumption):
    model = nn.Sequential(nn.Linear(4, 4), _LinearAfter(function))
    with pytest.raises(NotImplementedError, match=refusal) as refused:
        predict_step_memory(model, (torch.zeros(9, 4),))
    assert "\n" not in str(refused.value)
    if assumption is not None:
        prediction = predict_step_memory(model, (torch.zeros(9, 4),), estimate=True)
        (note,) = prediction.to_dict()["assumptions"]
        assert assumption in note


def test_numbers_that_are_only_checked_are_counted_and_do_no_harm():
    def check(rows):
        if not rows.isfinite().all() or rows.long().max().item() > 100 or rows.sum().tolist() > 100:
            raise ValueError("a number that is read is 1")
        return rows

    prediction = predict_step_memory(nn.Sequential(_LinearAfter(check)), (torch.zeros(8, 4),))
    assert prediction.to_dict()["reads_answered_by_1"] == 3
    assert prediction.notes == ()
    assert prediction.by_category["parameters"] == 4 * (4 * 4 + 4)


def test_errors_of_the_model_are_raised_unchanged():
    with pytest.raises(RuntimeError, match="same reduction dim"):
        predict_step_memory(nn.Linear(4, 4), (torch.zeros(2, 5),))
