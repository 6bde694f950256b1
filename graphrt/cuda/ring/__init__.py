"""The ring of slots from which graphs fetch their inputs: an `InputTransport` of core's."""

from graphrt.cuda.ring.format import RingDevice, RingFormat, slot_bytes
from graphrt.cuda.ring.slots import SlotRing
from graphrt.cuda.ring.transport import RingTransport, ring_transport

__all__ = [
    "RingDevice",
    "RingFormat",
    "RingTransport",
    "SlotRing",
    "ring_transport",
    "slot_bytes",
]
