"""DDTree: lossless speculative decoding with a tree drawn from a block drafter. Knows torch, no engine, no host."""
