"""Runs a program for torchao on quaver: one call in front of Accelerate's mixed_precision="fp8".

Without the call, run the unchanged program with `accelerate launch -m quaver.integrations.torchao program.py`.
"""

import quaver.integrations.torchao

quaver.integrations.torchao.install()

import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.utils import AORecipeKwargs  # noqa: E402
from torch import nn  # noqa: E402
from torchao.float8 import Float8LinearConfig  # noqa: E402

from quaver import assert_float8_training, conversion_report  # noqa: E402

torch.manual_seed(0)
recipe = AORecipeKwargs(config=Float8LinearConfig.from_recipe_name("rowwise"))
accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="fp8", kwargs_handlers=[recipe])
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
inputs, labels = torch.randn(32, 64), torch.randint(10, (32,))
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=16)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
print(conversion_report(model))
assert_float8_training(model, optimizer.optimizer)

for epoch in range(10):
    for batch, target in data:
        loss = nn.functional.cross_entropy(model(batch), target)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if epoch % 3 == 0:
        print(f"epoch {epoch}  loss {loss.item():.4f}")
