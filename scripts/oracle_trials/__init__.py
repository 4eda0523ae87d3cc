"""The parts of `oracle.py` and `oracle_story.py`: wheels and trees to try the oracle on, what a host does with them, and the page."""
