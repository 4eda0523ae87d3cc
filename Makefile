# Thin names for scripts/; nothing here does anything by itself.
.PHONY: demo test fast lint types oracle fuzz soak clean

demo: ## the main job on this machine
	scripts/demo

test: ## lint, types and every tier of tests (the better part of an hour on two cores)
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

fuzz: ## the fuzz targets, for as long as you let them
	scripts/fuzz

soak: ## several controllers, several hosts, and everything going wrong, for minutes
	scripts/soak

clean:
	rm -rf .venv .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
