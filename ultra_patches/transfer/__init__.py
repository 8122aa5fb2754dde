"""Weights on their way from trainer ranks to workers: layouts and their exchange."""
