"""The tape of a capture: operators are recorded, and lowered to the cheapest calls for replays."""
