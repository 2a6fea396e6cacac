"""What of Hugging Face's TrainingArguments an exact update cannot keep; all of it is in docs/integrations.md."""

from typing import Any

from megabatch.errors import PlanError

OTHER_WRAPPERS = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA", "TP")


def refuse(args: Any, accelerator: Any) -> None:
    """Raise `PlanError` for the first setting that cannot be kept, with what to set in its place."""
    for setting, is_set, instead in _refused(args, accelerator):
        if is_set:
            raise PlanError(f"MegabatchTrainer cannot keep {setting}; {instead}")


def _refused(args: Any, accelerator: Any) -> list[tuple[str, bool, str]]:
    """A setting, whether it is there, and what to do."""
    data = args.accelerator_config
    wrapper = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    optim = str(getattr(args.optim, "value", args.optim))
    return [
        ("fp16", accelerator.mixed_precision in ("fp16", "fp8"), "float16 loses small gradients: set bf16=True"),
        (wrapper, wrapper in OTHER_WRAPPERS, "use DistributedDataParallel (torchrun), or megabatch train for FSDP2"),
        ("parallelism_config", args.parallelism_config is not None, "leave it out, or use megabatch train"),
        (f"{args.n_gpu} GPUs in one process", args.n_gpu > 1, "start a process for each with torchrun"),
        (
            "auto_find_batch_size=True",
            args.auto_find_batch_size,
            "it would change the update; leave it out, and set max_microbatch_tokens to what fits",
        ),
        (
            "average_tokens_across_devices=False",
            not args.average_tokens_across_devices,
            "each rank would weigh its own way; leave it out",
        ),
        (
            "train_sampling_strategy='batch_rebalance'",
            args.train_sampling_strategy == "batch_rebalance",
            "set 'random': an update is cut by length whatever its order",
        ),
        (
            f"optim={optim!r}",
            "layerwise" in optim or "lomo" in optim,
            "it steps inside backward; choose one that steps afterwards",
        ),
        ("torch_empty_cache_steps", args.torch_empty_cache_steps is not None, "leave it out"),
        ("accelerator_config.split_batches", data.split_batches, "leave it out: batches are dealt by sample"),
        ("accelerator_config.dispatch_batches", bool(data.dispatch_batches), "leave it out: each rank reads its own"),
        (
            "accelerator_config.use_seedable_sampler=False",
            not data.use_seedable_sampler,
            "leave it out: ranks must draw one order",
        ),
        (
            "accelerator_config.gradient_accumulation_kwargs",
            bool(data.gradient_accumulation_kwargs),
            "leave it out: gradients are summed by megabatch",
        ),
    ]
