"""The only folder that knows DeepSpeed."""
