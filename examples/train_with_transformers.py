"""transformers' Trainer in float8, with LoRA adapters of PEFT: load with a QuaverConfig, and add a callback."""

import tempfile

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from quaver import conversion_report
from quaver.integrations.transformers import Float8Callback, QuaverConfig


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        tokens = (torch.arange(32) * (i + 3) + i) % 128
        return {"input_ids": tokens, "labels": tokens}


torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=128, num_key_value_heads=2, use_cache=False, **sizes)

with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(config).save_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, quantization_config=QuaverConfig("rowwise"))  # or frozen=True
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))  # or train all weights
    print(conversion_report(model))
    arguments = TrainingArguments(
        folder,
        bf16=True,
        report_to="none",
        max_steps=8,
        logging_steps=2,
        learning_rate=1e-2,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model, arguments, train_dataset=Tokens(), callbacks=[Float8Callback()])
    trainer.train()
    merged = model.merge_and_unload()
    merged.save_pretrained(folder)
    print(type(LlamaForCausalLM.from_pretrained(folder).model.layers[0].mlp.up_proj).__name__, "after from_pretrained")
