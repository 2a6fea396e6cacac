"""Speed of a device and model FLOPs utilization (MFU): the arithmetic of a model over the peak of its devices.

By appendix B of PaLM's paper (arXiv:2204.02311): 6 operations per token and parameter, 4 per frozen one,
and 12 per token, layer and feature of attention for each token of a sample. The input embedding multiplies
nothing. Recomputing adds nothing.
"""

import re
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from megabatch.simulate import DEVICES, Device
from megabatch.train.parallel.wrap import NUM_EXPERTS

TERA = 1e12
# Torch's names of devices. Others of a family, such as H100 PCIe and H200 NVL, have other peaks.
NAMES = {
    r"A100.*40GB": "a100-40g",
    r"A100.*80GB": "a100-80g",
    r"H100 80GB HBM3$": "h100-80g",
    r"NVIDIA H200$": "h200",
    r"NVIDIA B200$": "b200",
    r"L40S$": "l40s",
    r"RTX 4090$": "rtx4090",
}


@dataclass(frozen=True)
class Arithmetic:
    """The numbers of a model that its operations follow from."""

    num_computed: int  # parameters, without an input embedding that is not the head too
    num_trained: int  # of them
    num_attended: int  # layers x features of all heads

    def flops_per_token(self, mean_tokens: float) -> float:
        """Return the operations of forward and backward, for samples of so many tokens."""
        return 4 * self.num_computed + 2 * self.num_trained + 12 * self.num_attended * mean_tokens


def arithmetic_of(model: nn.Module) -> Arithmetic | str:
    """Return the numbers of a whole model, or the reason why they are not known."""
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        return f"a {kind} is no model of transformers"
    config = model.config.get_text_config()
    if any(getattr(config, key, None) for key in NUM_EXPERTS):
        return "a token computes with some of the experts"
    head = model.get_output_embeddings()
    tied = None if head is None else head.weight
    entry = model.get_input_embeddings()
    embedded = {id(parameter) for parameter in entry.parameters() if parameter is not tied}
    computed = [parameter for parameter in model.parameters() if id(parameter) not in embedded]
    num_heads = getattr(config, "num_attention_heads", None)
    num_layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(num_heads, int) or not isinstance(num_layers, int):
        return f"the config of a {kind} does not name its heads and layers"
    num_features = num_heads * (getattr(config, "head_dim", None) or config.hidden_size // num_heads)
    return Arithmetic(
        sum(parameter.numel() for parameter in computed),
        sum(parameter.numel() for parameter in computed if parameter.requires_grad),
        num_layers * num_features,
    )


@dataclass(frozen=True)
class Utilization:
    """The measure of a model's speed: its arithmetic and the peak of its device."""

    arithmetic: Arithmetic | None
    peak: float | None  # operations per second
    words: str  # the peak, or why there is no MFU

    def mfu(self, tokens_per_second: float, mean_tokens: float) -> float | None:
        """Return the MFU of a device, for samples of so many tokens; None where it is not known."""
        if self.arithmetic is None or self.peak is None:
            return None
        return self.arithmetic.flops_per_token(mean_tokens) * tokens_per_second / self.peak


UNKNOWN = Utilization(None, None, "no MFU")


def utilization_of(arithmetic: Arithmetic | str, device: Device | torch.device, dtype: torch.dtype) -> Utilization:
    """Return the measure of a model on a device, by its numbers or the reason why they are not known.

    The peak is the dense one of the device's data sheet.
    """
    if isinstance(device, torch.device):
        name = "a CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
        known = known_device(name)
    else:
        known, name = device, "a CPU" if device.is_cpu else device.name
    if known is None or known.is_cpu or dtype not in known.flops:
        return Utilization(None, None, f"no MFU: the peak of {name} is not known")
    if isinstance(arithmetic, str):
        return Utilization(None, None, f"no MFU: {arithmetic}")
    peak, kind = known.flops[dtype], str(dtype).removeprefix("torch.")
    return Utilization(arithmetic, peak, f"{known.name}'s {peak / TERA:,.0f} TFLOP/s in {kind}")


def known_device(name: str) -> Device | None:
    """Return the data sheet of a device by torch's name of it."""
    return next((DEVICES[known] for pattern, known in NAMES.items() if re.search(pattern, name)), None)
