"""A standalone OpenAI-compatible server for DDTree, on transformers: one model pair, CPU or one GPU."""
