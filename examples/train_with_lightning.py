"""Lightning's Trainer in float8: one plugin. Fabric takes Float8FabricPrecision in the same way."""

import pytorch_lightning
import torch
from torch import nn

from quaver import conversion_report
from quaver.integrations.lightning import Float8Precision


class Classifier(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))

    def training_step(self, batch, index):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.layers(inputs), labels)
        if index == 0:
            print(f"epoch {self.current_epoch}  loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


torch.manual_seed(0)
model = Classifier()
data = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.randint(10, (64,)))
trainer = pytorch_lightning.Trainer(
    max_epochs=4,
    plugins=[Float8Precision("rowwise", module_filter_fn=lambda module, name: name != "layers.2")],
    accelerator="auto",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=16))
print(conversion_report(model))
