"""A LightningModule with exact updates; pip install lightning. python examples/module.py"""

import calendar
import inspect

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from megabatch import losses
from megabatch.integrations.lightning import ExactUpdates

CONFIG = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)


class Llama(ExactUpdates, LightningModule):
    def __init__(self):
        super().__init__(losses.next_token, batches_per_update=4, max_norm=1.0, max_microbatch_tokens=4096)
        self.model = LlamaForCausalLM(CONFIG)

    def forward(self, input_ids):
        return self.model(input_ids)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=4e-3)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if "train_loss" in self.trainer.callback_metrics and (batch_idx + 1) % 4 == 0:
            print(f"update {self.global_step}  loss {self.trainer.callback_metrics['train_loss']:.3f}")


texts = [torch.tensor(list(part.encode())) for part in inspect.getsource(calendar).split("\n\n") if len(part) > 20]
samples = [{"input_ids": text, "labels": text} for text in texts]
trainer = Trainer(max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
trainer.fit(Llama(), DataLoader(samples, batch_size=4, shuffle=True, collate_fn=list))
