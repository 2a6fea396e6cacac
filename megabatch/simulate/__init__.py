"""Simulation of rank 0 of N: memory, traffic and time of an update, without a GPU, weights or peers."""

from typing import TYPE_CHECKING

from megabatch.lazy import export_lazily

if TYPE_CHECKING:
    from megabatch.simulate.devices import DEVICES as DEVICES
    from megabatch.simulate.devices import Device as Device
    from megabatch.simulate.devices import busy_seconds as busy_seconds
    from megabatch.simulate.devices import device_named as device_named
    from megabatch.simulate.ledger import CATEGORIES as CATEGORIES
    from megabatch.simulate.long_samples import simulate_long_samples as simulate_long_samples
    from megabatch.simulate.quantized import QUANTIZED_OPTIMIZERS as QUANTIZED_OPTIMIZERS
    from megabatch.simulate.quantized import FourBitLinear as FourBitLinear
    from megabatch.simulate.quantized import QuantizedAdam as QuantizedAdam
    from megabatch.simulate.repeated_layers import extend as extend
    from megabatch.simulate.repeated_layers import repeat_microbatches as repeat_microbatches
    from megabatch.simulate.replica import Replica as Replica
    from megabatch.simulate.simulated_update import Simulated as Simulated
    from megabatch.simulate.simulated_update import join_ranks as join_ranks
    from megabatch.simulate.simulated_update import simulate as simulate
    from megabatch.simulate.traffic import message_seconds as message_seconds
else:
    _HOME = {  # public name → its module
        "CATEGORIES": "ledger",
        "DEVICES": "devices",
        "Device": "devices",
        "FourBitLinear": "quantized",
        "QUANTIZED_OPTIMIZERS": "quantized",
        "QuantizedAdam": "quantized",
        "Replica": "replica",
        "Simulated": "simulated_update",
        "busy_seconds": "devices",
        "device_named": "devices",
        "extend": "repeated_layers",
        "join_ranks": "simulated_update",
        "message_seconds": "traffic",
        "repeat_microbatches": "repeated_layers",
        "simulate": "simulated_update",
        "simulate_long_samples": "long_samples",
    }
    _REMOVED = {  # public name of the last version → what to use instead
        "Moment": "Simulated.phases has the memory of each phase by category",
        "compile_layers": "simulate the layers as they are; compiled ones keep fewer activations",
    }
    __all__ = list(_HOME)
    __getattr__, __dir__ = export_lazily(__name__, _HOME, _REMOVED)
