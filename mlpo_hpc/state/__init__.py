"""The virtual tier: where each subgroup's state is, and how it gets to the update and back."""
