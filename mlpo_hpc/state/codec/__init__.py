"""How state is laid out in bytes."""
