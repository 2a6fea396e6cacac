"""Loops of other libraries over 20 samples of uneven length, as their users write them; megabatch is not imported.

python -m tests.integrations.audited_loops KIND FOLDER: trains to the end of an epoch and saves the weights.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BATCH, ACCUMULATED, VOCABULARY = 2, 4, 256


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random tokens: two windows of 8 samples, and one of 4."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        lengths = torch.randint(4, 60, (20,), generator=generator)
        self.texts = [torch.randint(2, VOCABULARY, (int(each),), generator=generator) for each in lengths]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.texts[index]}


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    texts = [each["input_ids"] for each in samples]
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in texts], batch_first=True)
    return {"input_ids": padded, "labels": padded.masked_fill(mask == 0, -100), "attention_mask": mask}


def build(name: str = "llama") -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                             "num_attention_heads": 4}  # fmt: skip
    if name == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0, "embd_pdrop": 0,
                 "attn_pdrop": 0}  # fmt: skip
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, vocab_size=VOCABULARY, **sizes))


def settings(folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder, "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": ACCUMULATED,
        "num_train_epochs": 1, "report_to": [], "save_strategy": "no", "use_cpu": True, "learning_rate": 1e-3,
        "logging_steps": 1, "disable_tqdm": True,
    }  # fmt: skip


def trainer(folder: str, *, is_mean: bool = False, name: str = "llama") -> Any:
    from transformers import Trainer, TrainingArguments

    class OwnMean(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            output = model(**inputs)
            return (output.loss, output) if return_outputs else output.loss

    kind, model = OwnMean if is_mean else Trainer, build(name)
    kind(model, TrainingArguments(**settings(folder)), train_dataset=Texts(), data_collator=collate).train()
    return model


def accelerated(folder: str) -> Any:
    from accelerate import Accelerator

    accelerator, model = Accelerator(gradient_accumulation_steps=ACCUMULATED, cpu=True), build()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader: Any = torch.utils.data.DataLoader(Texts(), batch_size=BATCH, collate_fn=collate)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return model


def lightning(folder: str) -> Any:
    import lightning as lightning_package

    class Module(lightning_package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    module = Module()
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
             "enable_model_summary": False}  # fmt: skip
    fit = lightning_package.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, accumulate_grad_batches=ACCUMULATED, gradient_clip_val=1.0, **quiet
    )
    fit.fit(module, torch.utils.data.DataLoader(Texts(), batch_size=BATCH, collate_fn=collate))
    return module


def plain(folder: str) -> Any:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loader: Any = torch.utils.data.DataLoader(Texts(), batch_size=BATCH, collate_fn=collate)
    for number, batch in enumerate(loader, 1):
        (model(**batch).loss / ACCUMULATED).backward()
        if number % ACCUMULATED == 0 or number == len(loader):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model


def words_tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", unk_token="w0")


def words_of(ids: Any) -> str:
    return " ".join(f"w{number}" for number in ids)


def trl_settings(folder: str) -> dict[str, Any]:
    return settings(folder) | {"bf16": False, "gradient_checkpointing": False}


def sft(folder: str, name: str = "gpt2") -> Any:
    from datasets import Dataset
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    rows = [{"input_ids": text.tolist(), "labels": text.tolist()} for text in Texts().texts]
    config = SFTConfig(**trl_settings(folder), dataset_kwargs={"skip_prepare_dataset": True})
    model = build(name)
    SFTTrainer(model, config, train_dataset=Dataset.from_list(rows), processing_class=words_tokenizer()).train()
    return model


def saved(folder: str) -> str:
    """Return the folder of a model and its tokenizer, for trainers that load a second copy."""
    path = f"{folder}/model"
    build().save_pretrained(path)
    words_tokenizer().save_pretrained(path)
    return path


def dpo(folder: str) -> Any:
    from datasets import Dataset
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    texts = [text.tolist() for text in Texts().texts]
    rows = [
        {"prompt": words_of(text[:2]), "chosen": f" {words_of(text[2:])}", "rejected": f" {words_of(text[-2:])}"}
        for text in texts
    ]
    trainer = DPOTrainer(
        saved(folder), args=DPOConfig(**trl_settings(folder)), train_dataset=Dataset.from_list(rows)
    )  # fmt: skip
    trainer.train()
    return trainer.model


def count_odd(completions: list[str], **_: Any) -> list[Any]:
    """Return a reward that differs between completions."""
    return [float(sum(word[-1] in "13579" for word in text.split())) for text in completions]


def grpo(folder: str) -> Any:
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    rows = [{"prompt": words_of(text[:3].tolist())} for text in Texts().texts]
    config = GRPOConfig(**trl_settings(folder), num_generations=4, max_completion_length=12, max_steps=3)
    trainer = GRPOTrainer(saved(folder), count_odd, args=config, train_dataset=Dataset.from_list(rows))
    trainer.train()
    return trainer.model


def sentences(folder: str) -> Any:
    import sentence_transformers
    from datasets import Dataset
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel

    library: Any = sentence_transformers
    path, texts = f"{folder}/model", [text.tolist() for text in Texts().texts]
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                         intermediate_size=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
              ).save_pretrained(path)  # fmt: skip
    words_tokenizer().save_pretrained(path)
    model = library.SentenceTransformer(modules=[Transformer(path), Pooling(16)], device="cpu")
    rows = [{"anchor": words_of(text[:-2]), "positive": words_of(text[2:])} for text in texts]
    library.SentenceTransformerTrainer(
        model,
        library.SentenceTransformerTrainingArguments(**settings(folder)),
        Dataset.from_list(rows),
        loss=library.sentence_transformer.losses.MultipleNegativesRankingLoss(model),
    ).train()
    return model


def torchtune(folder: str) -> Any:
    """The training loop of torchtune's recipe for one device."""
    import importlib.util as util

    from torchtune.modules.loss import CEWithChunkedOutputLoss

    from tests.integrations.tune_runs import padded, run

    # The package refuses to be imported, so it is found and not loaded.
    recipes_spec = util.find_spec("recipes")
    assert recipes_spec is not None
    (recipes,) = recipes_spec.submodule_search_locations or ()
    texts = [(text % 64).tolist() for text in Texts().texts]  # its vocabulary
    batches = [padded(texts[first : first + BATCH]) for first in range(0, len(texts), BATCH)]
    path = Path(recipes, "full_finetune_single_device.py")
    _, recipe = run(path, batches, CEWithChunkedOutputLoss(), steps=ACCUMULATED, width=32, at_step=lambda *_: None)
    return recipe._model


def torchtitan(folder: str, *, chunked: bool = True) -> Any:
    """torchtitan's trainer on one process, with rows of one length and other numbers of targets."""
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"})
    os.environ.update({"MASTER_PORT": "29571", "DUMP_FOLDER": folder})
    from tests.integrations import titan_runs

    batches = [titan_runs.batch(0, number) for number in range(2 * titan_runs.STEPS + 2)]
    trainer = titan_runs.config([batches], steps=9, chunked=chunked).build()
    trainer.train()
    (model,) = trainer.model_parts
    return model


def diffusers(folder: str) -> Any:
    """diffusers' train_unconditional.py, in the folder DIFFUSERS_EXAMPLES of its repository, on 20 tiny pictures."""
    import runpy
    from types import ModuleType

    # PyPI's torchvision is built for CUDA and does not register its operators without it; the script uses none.
    sys.modules["torchvision._meta_registrations"] = ModuleType("torchvision._meta_registrations")
    from diffusers import UNet2DModel
    from PIL import Image

    pictures = Path(folder, "pictures")
    pictures.mkdir()
    generator = torch.Generator().manual_seed(1)
    for number in range(20):
        pixels = torch.randint(0, 256, (16, 16, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(pictures / f"{number:02}.png")
    library: Any = UNet2DModel
    library(
        sample_size=16, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).save_config(f"{folder}/unet")  # fmt: skip
    options = {
        "train_data_dir": pictures, "model_config_name_or_path": f"{folder}/unet", "output_dir": f"{folder}/out",
        "cache_dir": f"{folder}/cache", "resolution": 16, "train_batch_size": BATCH, "eval_batch_size": 1,
        "gradient_accumulation_steps": ACCUMULATED, "num_epochs": 1, "lr_warmup_steps": 0,
        "ddpm_num_inference_steps": 1,
    }  # fmt: skip
    script = Path(os.environ["DIFFUSERS_EXAMPLES"], "unconditional_image_generation", "train_unconditional.py")
    sys.argv = [str(script), *(f"--{name}={value}" for name, value in options.items())]
    runpy.run_path(str(script), run_name="__main__")
    return library.from_pretrained(f"{folder}/out", subfolder="unet")


LOOPS: dict[str, Any] = {
    "plain": plain,
    "trainer": trainer,
    "trainer-gpt2": partial(trainer, name="gpt2"),
    "trainer-mean": partial(trainer, is_mean=True),
    "accelerate": accelerated,
    "lightning": lightning,
    "sft": sft,
    "sft-llama": partial(sft, name="llama"),
    "dpo": dpo,
    "grpo": grpo,
    "sentence-transformers": sentences,
    "torchtune": torchtune,
    "torchtitan": partial(torchtitan, chunked=False),
    "torchtitan-chunked": torchtitan,
    "diffusers": diffusers,
}

if __name__ == "__main__":
    _, loop, run_folder = sys.argv
    trained = LOOPS[loop](run_folder)
    torch.save([each.detach().clone() for each in trained.parameters()], f"{run_folder}/weights.pt")
