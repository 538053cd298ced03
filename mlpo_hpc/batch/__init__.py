"""Batch scripts for Slurm: facts of machines, a job, and one template for all of them."""
