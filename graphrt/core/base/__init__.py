"""What everything stands on: errors, log, trees of tensors, the door to private torch."""
