"""What a run tells about itself, from the journals of its ranks: figures, findings, one page."""
