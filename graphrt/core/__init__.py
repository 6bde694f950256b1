"""What is the same on every device, in layers: docs/architecture.md has their order."""
