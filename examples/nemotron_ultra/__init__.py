"""Recipes for Nemotron-3-Ultra-550B: see README.md."""
