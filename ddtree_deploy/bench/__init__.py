"""How fast a server answers, plain, with DFlash and with DDTree, in one run on the same prompts (docs/bench.md)."""
