"""DDTree inside SGLang: anchored edits for pinned versions, and adapters for versions with a registry.

Nothing here contains upstream text. `build` finds anchors in the stock files of a pinned version by their syntax
tree, checks the sha256 of what it starts from and of what it made, and only ever inserts our own lines.
"""
