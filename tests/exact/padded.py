"""Families of transformers beside padding: a tiny model of every type from its config, samples of unequal lengths."""

import copy
import inspect
import re
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.models.auto import modeling_auto

from megabatch import GradientAccumulator, PlanError, loss, losses
from megabatch.verification.float64_copy import Float64WithoutDropout
from tests.exact.tiny import VOCABULARY

LENGTHS = (5, 20, 8)  # an odd one for what is pooled, and a longer one for block-sparse attention
CLASSES = 3
TASKS = {
    "CausalLM": "CAUSAL_LM", "MaskedLM": "MASKED_LM", "SequenceClassification": "SEQUENCE_CLASSIFICATION",
    "TokenClassification": "TOKEN_CLASSIFICATION", "Seq2SeqLM": "SEQ_TO_SEQ_CAUSAL_LM", "CTC": "CTC",
    "AudioClassification": "AUDIO_CLASSIFICATION", "SpeechSeq2Seq": "SPEECH_SEQ_2_SEQ",
}  # fmt: skip
CASES = tuple(
    f"{task} {kind}"
    for task, name in TASKS.items()
    for kind in getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES")
)
MIXES = ("big_bird", "convbert", "fnet", "funnel", "mobilebert", "nystromformer", "reformer", "yoso")
REFUSED = {  # all others are exact
    *(f"CausalLM {kind}" for kind in ("big_bird", "cpmant", "prophetnet", "reformer")),
    *(f"MaskedLM {kind}" for kind in MIXES),
    *(f"SequenceClassification {kind}" for kind in (*MIXES, "bigbird_pegasus", "canine", "t5gemma", "xlnet")),
    *(f"TokenClassification {kind}" for kind in (*MIXES, "canine") if kind != "reformer"),
    *(f"Seq2SeqLM {kind}" for kind in ("bigbird_pegasus", "prophetnet")),
    *(
        f"{task} {kind}"
        for task in ("CTC", "AudioClassification")
        for kind in ("data2vec-audio", "hubert", "sew", "sew-d", "unispeech", "unispeech-sat", "wav2vec2",
                     "wav2vec2-conformer", "wavlm")
    ),
    *(
        f"SpeechSeq2Seq {kind}"
        for kind in ("moonshine", "seamless_m4t", "seamless_m4t_v2", "speech-encoder-decoder", "speech_to_text",
                     "speecht5")
    ),
}  # fmt: skip
NOT_BUILT = {  # why
    "takes sound of one length": (
        "AudioClassification audio-spectrogram-transformer", "AudioClassification whisper", "SpeechSeq2Seq whisper",
    ),
    "takes more than tokens": (
        "MaskedLM perceiver", "TokenClassification bros", "Seq2SeqLM voxtral_realtime", "SpeechSeq2Seq dia",
        "SpeechSeq2Seq voxtral_realtime",
    ),
    "parts whose sizes depend on each other": (
        "CausalLM blt", "CausalLM cohere_compass_text", "CausalLM dots3_note", "CausalLM dots3_note_text",
        "CausalLM gemma4_assistant", "CausalLM gemma4_unified_assistant", "CausalLM mimo_v2_flash",
        "CausalLM phi4_multimodal", "CausalLM qwen4_exp", "CausalLM qwen4_exp_text",
        "SequenceClassification cohere_compass_text", "Seq2SeqLM vibevoice_asr", "SpeechSeq2Seq fun_asr_nano",
        "SpeechSeq2Seq kyutai_speech_to_text", "SpeechSeq2Seq moonshine_streaming", "SpeechSeq2Seq vibevoice",
        "SpeechSeq2Seq vibevoice_asr",
    ),
    "its config makes no model": ("CausalLM musicgen", "CausalLM musicgen_melody"),
    "a package that is not installed": (
        "CausalLM gemma3n", "SequenceClassification layoutlmv2", "TokenClassification layoutlmv2",
    ),
}  # fmt: skip

# Configs: keys of one meaning have one small value, wherever they are.

SMALL: dict[str, Any] = {
    r"(.*_)?vocab_size|vocab_size_per_layer_input": VOCABULARY,
    r"type_vocab_size|topk|num_experts_per_tok\w*|moe_topk|moe_k|top_k_experts|moe_top_k": 2,
    r"hidden_size|d_model|n_embd|dim|emb\w*_dim|embedding_size|word_embed_proj_dim|hidden_dim|\w+_hidden_size|lru_width"
    r"|projection_dim|num_mel_bins|input_dim|feature_projection_input_dim|input_feat_per_channel": 16,
    r"(.*_)?intermediate_size|.*ffn_dim|d_ff|n_inner|d_inner|ffn_hidden_size|inner_dim|feed_forward_size": 24,
    r"num_hidden_layers|n_layers?|num_layers|(num_|speech_)?(encoder|decoder)_layers": 2,
    r"(num_|speech_)?((en|de)coder_)?attention_heads|n_heads?|num_heads|linear_num_(value|key)_heads|(num_|swa_num_)?(key_value"
    r"|kv)_heads": 2,
    r"(global_|attention_|linear_\w+_|v_|swa_)?head_dim|d_kv|d_head|kv_channels|qk_\w+_head_dim|[qk]v?_lora_rank": 8,
    r"num_(local_)?experts|n_routed_experts|moe_num_experts": 4,
    r"n_group|topk_group|num_expert_group|first_k_dense_replace": 1,
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length": 256,
    r"max_(source|target)_positions": 256,
    r"state_size|ssm_state_size|mamba_d_state|sliding_window|attention_window_size|patch_size": 4,
    r"time_step_rank|mamba_dt_rank": 2,
    r"image_size": 8,
    r".*dropout.*|.*layerdrop|.*_drop|.*pdrop|mask_(time|feature)_prob|router_jitter_noise": 0.0,
}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 2}
SOUND = {
    "conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "conv_pos_kernel_size": 3, "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_expand": 2, "mamba_chunk_size": 4}
KIMI = {"num_experts_per_token": 2, "linear_head_dim": 8, "linear_num_heads": 2, "qk_head_dim": 16}
BLOCKS = {"attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1}
ZAMBA = {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "attention_hidden_size": 32,
         "n_mamba_heads": 4}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {  # keys of one type, or of a task and a type
    "bamba": MAMBA, "granitemoehybrid": MAMBA, "big_bird": BLOCKS, "bigbird_pegasus": BLOCKS,
    "canine": {"num_hash_buckets": 256, "num_hash_functions": 2},
    "codegen": {"n_head": 4, "rotary_dim": 4, "n_embd": 32}, "gptj": {"rotary_dim": 4},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deberta": {"pooler_hidden_size": 16, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {"pooler_hidden_size": 16, "relative_attention": True, "pos_att_type": ["c2p", "p2c"],
                   "position_buckets": 8, "conv_kernel_size": 3, "conv_act": "gelu"},
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 60, "pad_token_id": 0},
    "funnel": {"block_sizes": [1, 2], "block_repeats": [1, 1]},
    "gemma3n_text": {"intermediate_size": [24, 24], "num_kv_shared_layers": 0, "laurel_rank": 4, "altup_num_inputs": 2,
                     "activation_sparsity_pattern": [0.0, 0.0]},
    "gemma4_text": {"num_kv_shared_layers": 0}, "gemma4_unified_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"],
                "window_size": 4},
    "granite_speech5_ctc": {"encoder_config": {"context_size": 4, "num_mel_bins": 4}},
    "wav2vec2-bert": {"vocab_size": VOCABULARY}, "wav2vec2-conformer": {"vocab_size": VOCABULARY},
    "kimi_linear": KIMI, "bailing_hybrid": KIMI, "falcon_h1": {**MAMBA, "mamba_d_ssm": 32},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 1, "chunk_size": 4},
    "xlstm": {"num_blocks": 2, "chunk_size": 4, "ffn_round_up_to_multiple_of": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4}, "laguna": {"num_attention_heads_per_layer": [2, 2]},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 4, "hidden_size": 24}, "led": {"attention_window": [4, 4]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 48, "channel_shrink_ratio": 2}, "longformer": {"attention_window": [4, 4]},
    "longcat_flash": {"qk_head_dim": 16, "expert_ffn_hidden_size": 12, "zero_expert_num": 1},
    "mamba2": {"num_heads": 4, "expand": 2, "n_groups": 1, "chunk_size": 4}, "ministral": {"head_dim": 8},
    "mistral4": {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "head_dim": 4, "v_head_dim": 4},
    "mobilebert": {"true_hidden_size": 16, "intra_bottleneck_size": 16},
    "mpt": {"attn_config": {"attn_pdrop": 0}}, "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "neomme": {"head_dim": 16},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "nystromformer": {"num_landmarks": 4, "segment_means_seq_len": 4},
    "perceiver": {"d_latents": 16, "num_latents": 4, "qk_channels": 16, "v_channels": 16,
                  "num_self_attends_per_block": 1},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"], "local_attn_chunk_length": 4,
                 "lsh_attn_chunk_length": 4, "num_buckets": 4, "num_hashes": 2, "hash_seed": 1, "is_decoder": False},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"}, "zaya": {"num_experts_per_tok": 1},
    "zamba": {**ZAMBA, "attention_head_dim": 16, "attn_layer_period": 2, "attn_layer_offset": 1, "n_mamba_heads": 2},
    "zamba2": {**ZAMBA, "head_dim": 16, "attention_head_dim": 16, "mamba_ngroups": 1, "mamba_headdim": 8,
               "chunk_size": 4, "num_mem_blocks": 1, "adapter_rank": 4, "hybrid_layer_ids": [1, 3]},
}  # fmt: skip
MOST_PARAMETERS = 3_000_000


def _small(config: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The keys of a config with small values, those of its parts too."""
    made = {key: _small_value(key, value) for key, value in config.items() if key not in ("dtype", "per_layer_config")}
    if "conv_dim" in made and "conv_stride" in made:
        made |= {key: value for key, value in SOUND.items() if key in made}
    for key in ("layer_types", "layers_block_type"):
        if kinds := made.get(key):
            kinds = list(dict.fromkeys(kinds)) * 2
            count = max(2, len(kinds) // 2)
            made |= {key: kinds[:count], "num_hidden_layers": count}
            if mlp := made.get("mlp_layer_types"):
                made["mlp_layer_types"] = (list(dict.fromkeys(mlp)) * count)[:count]
    for key, value in own.items():
        made[key] = made[key] | value if isinstance(value, dict) and isinstance(made.get(key), dict) else value
    return made


def _small_value(key: str, value: Any) -> Any:
    if isinstance(value, dict) and (key.endswith("config") or "model_type" in value):
        return _small(value, OWN.get(value.get("model_type", ""), {}))
    if key in TOKENS and (value is not None or key == "pad_token_id"):
        return TOKENS[key]
    if key.endswith("token_id") and isinstance(value, int) and value >= VOCABULARY:
        return VOCABULARY - 4
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return next((small for pattern, small in SMALL.items() if re.fullmatch(pattern, key)), value)


def make(case: str, **given: Any) -> nn.Module:
    """A tiny model in float64 with large random weights and biases. Raises ValueError if it is not tiny."""
    task, kind = case.split()
    config = transformers.AutoConfig.for_model(kind)
    keys = _small(config.to_dict(), OWN.get(kind, {}) | given)
    if task.endswith("Classification"):
        keys["num_labels"] = CLASSES
    if task == "CausalLM" and "is_decoder" in keys and not keys.get("is_encoder_decoder"):
        keys["is_decoder"] = True
    keys.pop("id2label", None), keys.pop("label2id", None)
    small = type(config)(**keys)
    factory = getattr(transformers, f"AutoModelFor{task}")
    with torch.device("meta"):
        count = sum(each.numel() for each in factory.from_config(copy.deepcopy(small)).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count} parameters")
    torch.manual_seed(0)
    model = factory.from_config(small).double()
    if getattr(model.config, "use_cache", None):
        model.config.use_cache = False
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape).to(parameter.dtype))
    return model.train(kind == "reformer")  # which has gradients in no other mode


# Samples and losses.


def samples_of(task: str, model: Any) -> list[dict[str, Tensor]]:
    """Samples as the model reads them; ``num`` says how much sound is in one."""
    lengths = (4, 20, 8) if model.config.model_type == "reformer" else LENGTHS  # which takes multiples of four
    return [_sample(task, model, length, number) for number, length in enumerate(lengths)]


def _sample(task: str, model: Any, length: int, number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)

    def ids(count: int, most: int = VOCABULARY - 6) -> Tensor:
        return torch.randint(4 if most > CLASSES else 0, most, (count,), generator=generator)

    is_pair = model.config.is_encoder_decoder
    if task in ("CTC", "AudioClassification", "SpeechSeq2Seq") and model.main_input_name != "input_ids":
        shape = (300 * length,) if model.main_input_name in ("input_values", "inputs") else (20 * length, 16)
        sample = {model.main_input_name: torch.randn(*shape, generator=generator).double()}
    else:
        sample = {"input_ids": ids(length)}
    if task == "CTC":
        return sample | {"num": torch.tensor(shape[0])}
    if is_pair and task in ("Seq2SeqLM", "SpeechSeq2Seq"):
        return sample | {"decoder_input_ids": ids(number + 2), "labels": ids(number + 2)}
    if is_pair:
        sample["input_ids"][-1] = TOKENS["eos_token_id"]  # where BART and others find the class
        sample["decoder_input_ids"] = sample["input_ids"].clone()
    if task.endswith("SequenceClassification") or task == "AudioClassification":
        return sample | {"labels": torch.tensor(number % CLASSES)}
    return sample | {"labels": ids(length, CLASSES) if task == "TokenClassification" else ids(length)}


@loss(weigh=lambda microbatch: len(microbatch["num"]))
def framewise(model: Any, microbatch: Any) -> tuple[Tensor, int]:
    """The squares of the logits of real frames."""
    num = microbatch["num"]
    logits = model(**{key: value for key, value in microbatch.items() if key != "num"}).logits  # [B, F, V]
    owners = [each for each in (model, getattr(model, "encoder", None)) if each is not None]
    names = ("_get_feat_extract_output_lengths", "_get_subsampling_output_length")
    count = next(getattr(each, name) for each in owners for name in names if hasattr(each, name))
    is_real = torch.arange(logits.shape[1]) < count(num)[:, None]
    return (logits.square().sum(-1) * is_real).sum(), len(num)


def loss_of(task: str, model: Any) -> Any:
    if task == "CTC":
        return framewise
    is_causal = task in ("CausalLM", "Seq2SeqLM", "SpeechSeq2Seq") and not model.config.is_encoder_decoder
    return losses.next_token if is_causal else losses.classification


# What comes of it.


@contextmanager
def _in_float64() -> Generator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # XGLM makes a tensor of float64's smallest number
    try:
        with warnings.catch_warnings(), Float64WithoutDropout():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(before)


def outcome(case: str, **given: Any) -> str:
    """Return "exact", "refused" or what happened: a microbatch of three samples beside one sample at a time."""
    task = case.split()[0]
    with _in_float64():
        try:
            model = make(case, **given)
            samples, loss_fn = samples_of(task, model), loss_of(task, model)
            expected = _gradient(model, samples, loss_fn, 1)
        except Exception as error:
            return f"not built: {type(error).__name__}: {error}"
        try:
            found = _gradient(model, samples, loss_fn, 3)
        except PlanError as error:
            if "padding changes" not in str(error) or "\n" in str(error):
                return str(error)
            _gradient(model, samples[:1] * 3, loss_fn, 3)  # samples of one length are not refused
            found = {}
    if not found:
        return "refused" if _padding_changes(model, samples) else "refused, and padding changes nothing"
    largest = max(float(each.norm()) for each in expected.values())
    assert largest > 0
    errors = {
        name: float((found[name] - each).norm()) / max(float(each.norm()), 1e-4 * largest)
        for name, each in expected.items()
    }
    return next((f"{name} is off by {error:.1e}" for name, error in errors.items() if not error < 1e-9), "exact")


def _padding_changes(model: nn.Module, samples: list[dict[str, Tensor]]) -> bool:
    """Tell by plain torch."""
    main = getattr(model, "main_input_name", "input_ids")
    if model.config.model_type in ("canine", "prophetnet"):  # whose masks overflow in float64
        model = copy.deepcopy(model).float()
    rows = [{key: value for key, value in sample.items() if key not in ("labels", "num")} for sample in samples]
    padded = {key: pad_sequence([row[key] for row in rows], batch_first=True) for key in rows[0]}
    takes_mask = "attention_mask" in inspect.signature(model.forward).parameters
    changes: list[float] = []
    for number, row in enumerate(rows):
        beside = {key: value[number : number + 1] for key, value in padded.items()}
        if takes_mask:
            mask = torch.arange(beside[main].shape[1]) < len(row[main])
            beside["attention_mask"] = mask.long()[None]
        alone = {key: value[None] for key, value in row.items()}
        one, other = (_logits(model, inputs) for inputs in (alone, beside))
        changes.append(float((one - other[:, : one.shape[1]]).norm() / one.norm()))
    return any(not each <= 1e-5 for each in changes)  # T5Gemma has NaN where it reads padding


def _logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    given = {key: value.to(model.dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return copy.deepcopy(model)(**given).logits  # some models change in a forward


def _gradient(model: nn.Module, samples: list[dict[str, Tensor]], loss_fn: Any, size: int) -> dict[str, Tensor]:
    model = copy.deepcopy(model)  # some models change in their first forward
    gradient = GradientAccumulator(model, micro_batch_size=size)
    gradient.forward_backward(samples, loss_fn)
    gradient.finalize()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
