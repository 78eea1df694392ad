"""Convert any model, see what happened to each layer, train a step, and convert back."""

import torch
from torch import nn

from quaver import (
    Float8LinearConfig,
    cast_weights_once,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64), nn.Linear(64, 10))

convert_to_float8_training(
    model,
    config=Float8LinearConfig.from_recipe_name("rowwise"),
    module_filter_fn=lambda module, name: name != "4",  # the head stays in high precision
)
print(conversion_report(model))

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
microbatches = [(torch.randn(32, 64), torch.randint(10, (32,))) for _ in range(4)]
for step in range(20):
    with cast_weights_once(model):  # one cast per weight for all microbatches of the step
        total = 0.0
        for inputs, labels in microbatches:
            loss = nn.functional.cross_entropy(model(inputs), labels) / len(microbatches)
            loss.backward()
            total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0 or step == 19:
        print(f"step {step:2d}  loss {total:.4f}")

convert_to_high_precision(model)
print(type(model[0]).__name__, "again, with the trained weights")
