"""What we call in each SGLang version, as data for `sglang_overlay.contract`."""
