"""The main job on an embedded default: the story, the sshd that it starts for itself, and what ends it however it ends."""
