"""Who and where am I: ranks, nodes, memory, and one verdict for all."""
