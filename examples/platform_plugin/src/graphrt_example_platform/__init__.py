"""An example of an out-of-tree graphrt platform: the CPU with a trace of its replays."""
