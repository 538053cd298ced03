"""What the engine measured and said."""
