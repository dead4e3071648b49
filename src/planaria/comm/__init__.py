"""Process groups that can be rebuilt, how a stuck collective is left, and mesh building."""

from planaria.comm.domain import Domain, Mode
from planaria.comm.handle import BACKEND, RebuildableGroup, init_default, register
from planaria.comm.store import EpochStore, KeyValue, MemoryKeyValue
from planaria.comm.transport import GlooTransport, NcclTransport, Transport

__all__ = [
    "BACKEND",
    "Domain",
    "EpochStore",
    "GlooTransport",
    "KeyValue",
    "MemoryKeyValue",
    "Mode",
    "NcclTransport",
    "RebuildableGroup",
    "Transport",
    "init_default",
    "register",
]
