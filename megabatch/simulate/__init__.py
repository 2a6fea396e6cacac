"""Simulation of rank 0 of N: memory, traffic and time of an update, without a GPU, weights or peers."""

from megabatch.simulate.allocator import Event, Reserved, reserved
from megabatch.simulate.devices import DEVICES, Device, device_named
from megabatch.simulate.ledger import CATEGORIES, Ledger, Moment, Phase, tagging_shards
from megabatch.simulate.replica import Replica
from megabatch.simulate.simulated_update import Simulated, simulate
from megabatch.simulate.traffic import Sent

__all__ = [
    "CATEGORIES",
    "DEVICES",
    "Device",
    "Event",
    "Ledger",
    "Moment",
    "Phase",
    "Replica",
    "Reserved",
    "Sent",
    "Simulated",
    "device_named",
    "reserved",
    "simulate",
    "tagging_shards",
]
