"""Hugging Face's Trainer with exact updates, alone or under torchrun. python examples/trainer.py"""

import calendar
import inspect
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from megabatch.batching import pad_right
from megabatch.integrations.transformers import MegabatchTrainer

torch.manual_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
texts = [list(part.encode()) for part in inspect.getsource(calendar).split("\n\n") if len(part) > 20]
samples = [{"input_ids": text, "labels": text} for text in texts]  # of any length

with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder, per_device_train_batch_size=4, gradient_accumulation_steps=4, num_train_epochs=2, learning_rate=4e-3,
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, dataloader_pin_memory=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = MegabatchTrainer(  # the one line that changes; the cap is optional
        LlamaForCausalLM(config), args, data_collator=pad_right, train_dataset=samples, max_microbatch_tokens=4096
    )
    trainer.train()
