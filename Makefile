# Thin names for scripts/; nothing here does anything by itself.
.PHONY: demo test fast lint types oracle clean

demo: ## the main job on this machine
	scripts/demo

test: ## lint, types and every tier of tests (about half an hour)
	scripts/test

fast: ## the tests that take less than three minutes
	scripts/test fast

lint: ## ruff and mypy
	scripts/test lint

types:
	scripts/setup test
	.venv/bin/mypy

oracle: ## predict beside dlopen on real wheels (downloads and unpacks about 20 GB)
	scripts/setup test
	.venv/bin/python scripts/oracle.py

clean:
	rm -rf .venv .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
