"""The ring of slots from which graphs fetch their inputs: an `InputTransport` of core's."""
