"""What runs inside SGLang. Imports SGLang only in functions, because SGLang imports this while it imports itself.

For 0.5.11 these modules and the core they use are laid into one file (`sglang_overlay.vendor`); the adapters for later
versions import them from here.
"""
