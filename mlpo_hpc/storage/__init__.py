"""Bytes on one tier: containers of slots, how bytes reach them, and what is mounted where."""
