"""Threads that step runners of one pool while another one's graphs appear and go."""
