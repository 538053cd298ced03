"""Permission to move bytes on a tier."""
