"""The parts of `train_tiny.py`: text, tokens, the two models, and the loop that trains them."""
