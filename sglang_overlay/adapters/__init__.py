"""DDTREE for SGLang versions that have a registry: nothing is edited, everything is registered at start."""
