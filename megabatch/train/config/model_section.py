"""The model."""

from typing import Literal

from megabatch.train.config.section import Function, Options, Section


class ModelConfig(Section):
    """The model: give one of name, config and function."""

    name: str | None = None
    """A causal language model of the Hugging Face hub, or a folder that save_pretrained has written: its weights."""
    config: Options | None = None
    """What transformers' AutoConfig takes: model_type = "llama", hidden_size = 128, ...: fresh weights."""
    function: Function | None = None
    """"module:function" that returns any torch module, or a list or mapping of several, which the loss gets in its
    place; called with model.options."""
    options: Options = {}
    """Keyword arguments of model.function."""
    tokenizer: str | None = None
    """A tokenizer of the hub or a folder; "bytes": a token a byte. None: that of model.name, else bytes."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Type of the parameters, and of what the optimizer keeps."""
    compute_dtype: Literal["bfloat16"] | None = None
    """Compute in it and keep the parameters in dtype: autocast for plain and ddp, its own policy for fsdp2."""
    attention: str | None = None
    """transformers' name of an attention backend: "sdpa", "eager", "flash_attention_2", "flex_attention", ...
    None: what transformers takes."""
    activation_checkpointing: bool = False
    """Recompute each layer in backward: less memory, more time."""
    compile: bool = False
    """torch.compile, layer by layer."""
    freeze: list[str] = []
    """Parameters that stay as they are, by patterns as of file names: "*.embed_tokens.*", "model.layers.0.*"."""
    lora: Options | None = None
    """Train adapters on a frozen model, with what peft's LoraConfig takes: r = 8, lora_alpha = 16, target_modules =
    ["q_proj", "v_proj"], lora_dropout = 0.1, ... Checkpoints have the adapters alone. Needs megabatch[peft]."""
    quantize: Literal["nf4", "fp4"] | None = None
    """Keep the linear layers of the base of model.lora in four bits, by bitsandbytes. Needs megabatch[qlora]."""
    double_quantization: bool = True
    """With quantize: keep the scales of its blocks in eight bits, too."""
    experts: Options | None = None
    """The balance of a mixture of experts: router_loss, scores ("softmax" or "sigmoid"), bias_rate, by which biases of
    routers move after each update, and bias_name. See docs/experts.md."""
