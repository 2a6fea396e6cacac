"""Keys of a recipe, the types of their values, and the nearest key to an unknown one."""

import difflib
from collections.abc import Collection
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin

from megabatch.errors import MegabatchError
from megabatch.train.config import Config, Options, Section, SourceConfig

# By key, its name in other libraries.
NAMES_ELSEWHERE = {
    "update.micro_batch_size": "local_batch_size per_device_train_batch_size mbs train_micro_batch_size_per_gpu",
    "update.global_batch_size": "train_batch_size total_batch_size global_bsz gbs",
    "update.global_batch_size (samples of an update; update.micro_batch_size are those of a forward)": "batch_size",
    "update.max_norm": "max_grad_norm clip_grad gradient_clip_val",
    "update.max_microbatch_tokens": "max_tokens_per_gpu max_token_len_per_gpu",
    "optim.lr": "learning_rate",
    "optim.schedule": "lr_scheduler_type lr_scheduler",
    "optim.warmup_steps, in updates": "warmup_ratio",
    "run.folder": "output_dir save_dir",
    "run.save_every": "save_steps save_interval",
    "run.keep_last": "save_total_limit",
    "run.max_epochs": "num_train_epochs epochs",
    "eval.every": "eval_steps eval_interval",
    "eval.patience": "early_stopping_patience",
    "model.name": "model_name_or_path base_model pretrained_model_name_or_path",
    "model.compute_dtype": "bf16 fp16 mixed_precision",
    "model.dtype": "torch_dtype",
    "model.attention": "attn_implementation flash_attention",
    "model.activation_checkpointing": "gradient_checkpointing",
    "model.compile": "torch_compile",
    "data.path": "dataset dataset_name dataset_path train_file data_files",
    "data.max_sample_tokens": "max_seq_length max_length cutoff_len",
    "data.pack_tokens": "packing sample_packing seq_len sequence_len",
    "update.one_row": "padding_free",
    "tracking.trackers": "report_to",
    "tracking.name": "run_name wandb_name",
    "tracking.project": "wandb_project mlflow_experiment_name",
    "data.num_workers": "dataloader_num_workers",
}
DERIVED = "gradient_accumulation_steps accumulate_grad_batches num_microbatches grad_accum_steps"
FOREIGN_KEYS = {
    **{name: f"here it is {key}" for key, names in NAMES_ELSEWHERE.items() for name in names.split()},
    **dict.fromkeys(
        DERIVED.split(), "it is derived, never set: set update.global_batch_size and update.micro_batch_size"
    ),
}
# By removed key, its replacement. A line is kept for one release.
REMOVED_KEYS = {
    "run.manifest": "it was removed: run_hash in each row of metrics.jsonl tells runs apart; leave the key out",
    "optim.in_backward": "it was removed, since it freed no memory where gradients accumulate: leave it out",
    "eval.completion_tokens": "it was removed: `megabatch chat` writes text with the run's model; leave the key out",
    "checkpoint.partial": "it was removed: a signal ends the run after the update that runs; leave it out",
}


def sections() -> dict[str, type[Section]]:
    fields = Config.model_fields.items()
    return {name: cast("type[Section]", field.annotation) for name, field in fields}


def fields_of(section: type[Section]) -> dict[str, Any]:
    """Return the type of the value of each key of a section."""
    return {key: field.rebuild_annotation() for key, field in section.model_fields.items()}


def known_keys() -> dict[str, Any]:
    """Return the type of the value of each dotted key, without the keys of named sources and of options."""
    return {f"{name}.{key}": kind for name, section in sections().items() for key, kind in fields_of(section).items()}


def is_options(annotation: Any) -> bool:
    """Return True for a table with free keys, which somebody else checks."""
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return Options in members


def is_named_sources(annotation: Any) -> bool:
    return get_origin(annotation) is dict and get_args(annotation)[1] is SourceConfig


def type_of(key: str) -> Any:
    """Return the type of the value of a dotted key, in options and named sources too; None for an unknown key."""
    first, below = ".".join(key.split(".")[:2]), key.split(".")[2:]
    annotation = known_keys().get(first)
    if not below:
        return annotation
    if is_options(annotation):
        return object if len(below) == 1 else None
    if is_named_sources(annotation) and len(below) == 2:
        return fields_of(SourceConfig).get(below[1])
    return None


def unknown_key(key: str, where: str) -> MegabatchError:
    """Return the error for an unknown key, with the nearest one of its table, else of all."""
    table, _, name = key.rpartition(".")
    if key in REMOVED_KEYS:
        return MegabatchError(f"unknown key {key} {where}; {REMOVED_KEYS[key]}")
    if name in FOREIGN_KEYS:
        return MegabatchError(f"unknown key {key} {where}; {FOREIGN_KEYS[name]}")
    is_source = key.count(".") == 3 and is_named_sources(known_keys().get(table.rpartition(".")[0]))
    section = SourceConfig if is_source else sections().get(table)
    section_keys = [] if section is None else list(section.model_fields)
    keys_by_name = {key_of_all.rpartition(".")[2]: key_of_all for key_of_all in known_keys()}
    if (near := nearest(name, section_keys)) is not None:
        change = f"the nearest key is {table}.{near}"
    elif (near := nearest(name, keys_by_name)) is not None:
        change = f"the nearest key is {keys_by_name[near]}"
    else:
        change = (
            f"[{table}] has {', '.join(section_keys)}" if section_keys else f"the sections are {', '.join(sections())}"
        )
    return MegabatchError(f"unknown key {key} {where}; {change}")


def unknown_section(section: str, table: dict[str, Any], where: str) -> MegabatchError:
    """Return the error for an unknown table; another trainer's key in it says more than the table's name."""
    for key in table:
        if key in FOREIGN_KEYS:
            return unknown_key(f"{section}.{key}", where)
    near = nearest(section, sections())
    change = f"the sections are {', '.join(sections())}" if near is None else f"the nearest section is [{near}]"
    return MegabatchError(f"unknown section [{section}] {where}; {change}")


def nearest(name: str, known: Collection[str]) -> str | None:
    """Return the name that is spelled most alike, else one that begins with the same four letters; None: neither."""
    lower = {spelled.lower(): spelled for spelled in known}
    close = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.6)
    begun = [candidate for candidate in lower if candidate[:4] == name.lower()[:4]]
    return next((lower[name] for name in close + begun), None)
