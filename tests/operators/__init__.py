"""torch's own operator samples (OpInfo), captured and replayed."""
