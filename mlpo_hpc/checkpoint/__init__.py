"""Checkpoints in a format of our own: what a run needs to go on, on any number of ranks."""
