"""How many streams of an NPU graphs hold, and how many sizes fit."""
