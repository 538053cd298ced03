"""Whether a node, a job and a configuration are fit: what is looked at, and what is said about it."""
