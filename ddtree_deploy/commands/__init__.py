"""The commands, one file a family: parse, call, render, exit code. Heavy imports happen inside the functions."""
