"""Makes TRL's SFTTrainer of the foreign tests, its tokenizer and its data."""

import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from quaver.integrations.transformers import Float8Callback
from tests.library.third_party.hf_trainer import settings
from tests.library.third_party.llama import Tokens

WORDS = [f"w{number}" for number in range(126)]


def make_tokenizer():
    model = WordLevel({word: number for number, word in enumerate([*WORDS, "<pad>", "<eos>"])}, unk_token="<pad>")
    words = Tokenizer(model)
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def make_dataset():
    samples = map(Tokens().__getitem__, range(len(Tokens())))
    return Dataset.from_list([{key: tensor.tolist() for key, tensor in sample.items()} for sample in samples])


class InOrder(trl.SFTTrainer):
    def _get_train_sampler(self, *args):
        return None


def sft(folder, model, callbacks=(), **options):
    """Return an SFTTrainer as hf_trainer.py makes a Trainer."""
    arguments = trl.SFTConfig(**settings(folder, **options), loss_type="nll", max_length=None)
    data = {"train_dataset": make_dataset(), "eval_dataset": make_dataset(), "processing_class": make_tokenizer()}
    return InOrder(model, arguments, callbacks=[Float8Callback(), *callbacks], **data)
