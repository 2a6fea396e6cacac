"""Models of transformers that mix padding into tokens whatever the mask says, and why they do."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from megabatch.errors import PlanError

# Rotary positions that go by the longest row of a microbatch.
BY_LENGTH = ("dynamic", "longrope")
UNMASKED = "convolves over padding"
POOLED = "pools frames by the padded length"
# Model types and classes of transformers, found by trying all families (tests/exact/padded.py).
MIXES_PADDING = {
    "SeamlessM4TConformerEncoder": UNMASKED,
    "SeamlessM4Tv2ConformerEncoder": UNMASKED,
    "T5GemmaForSequenceClassification": "reads the token behind the last",
    "canine": "convolves and pools characters with padding",
    "convbert": UNMASKED,
    "cpmant": "expects padding on the left",
    "data2vec-audio": UNMASKED,
    "fnet": "takes no attention_mask",
    "funnel": "pools tokens with padding",
    "mobilebert": "embeds a token with the one behind it",
    "moonshine": "normalizes over all frames of the padded row",
    "nystromformer": "takes means over parts of the padded row",
    "prophetnet": "takes relative positions of other tokens, by the padded length",
    "reformer": "sorts padding and tokens into chunks",
    "sew": POOLED,
    "sew-d": POOLED,
    "speech_to_text": UNMASKED,
    "wav2vec2-conformer": UNMASKED,
    "yoso": UNMASKED,
}


def find_mixing_causes(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield why a model of transformers mixes padding into tokens, and the most tokens of a row where it does not."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        # FSDP2 makes a subclass of the class. Modules of your own may have anything by these names.
        kinds = [kind for kind in type(module).__mro__ if kind.__module__.startswith("transformers.")]
        if not kinds:
            continue
        name, config = kinds[0].__name__, getattr(module, "config", None)
        configs[id(config)] = config
        if name in MIXES_PADDING:
            yield f"{name} {MIXES_PADDING[name]}", 0
        # The layer of Wav2Vec2, and of those that follow it.
        if name.endswith("GroupNormConvLayer"):
            yield f"{name} normalizes over all frames of the padded row (feat_extract_norm)", 0
        if getattr(module, "summary_type", None) in ("last", "mean"):
            yield f"{name} takes the {module.summary_type} of the padded row", 0
        # Shorter rows have full attention.
        if config is not None and getattr(module, "attention_type", None) == "block_sparse":
            full_attention = (5 + 2 * config.num_random_blocks) * config.block_size
            yield f"{name} chooses blocks by the padded length (attention_type=original_full does not)", full_attention
    for config in filter(None, configs.values()):
        kind = getattr(config, "model_type", None)
        if kind in MIXES_PADDING:
            yield f"{kind} {MIXES_PADDING[kind]}", 0
        # Settings of all layers, or by kind of layer.
        rope: Any = getattr(config, "rope_parameters", None) or {}
        for settings in filter(_goes_by_length, (rope, *rope.values())):
            default = getattr(config, "max_position_embeddings", 1)
            yield (
                f"{kind} has rotary positions that go by the longest row (rope_type {settings['rope_type']})",
                settings.get("original_max_position_embeddings") or default,
            )


def _goes_by_length(settings: Any) -> bool:
    return isinstance(settings, dict) and settings.get("rope_type") in BY_LENGTH


def refuse_mixing(causes: Sequence[tuple[str, int]], padded: Mapping[str, Tensor]) -> None:
    """Raise `PlanError` where a model mixes the padding of an input into tokens."""
    for name, value in padded.items():
        for cause, max_tokens in causes:
            if value.shape[1] > max_tokens:
                raise PlanError(
                    f"samples of one microbatch have {name} of unequal lengths, and {cause}, so that padding changes "
                    "their gradient whatever the mask says; give micro_batch_size=1, or samples of one length"
                )


def is_read(models: Sequence[Any], name: str, main: str | None) -> bool:
    """Return True for tokens, and for the labels of which a text model makes the inputs of its decoder."""
    makes_inputs = name == "labels" and main == "input_ids"
    return name.endswith("input_ids") or (
        makes_inputs and any(getattr(model.config, "is_encoder_decoder", False) for model in models)
    )
