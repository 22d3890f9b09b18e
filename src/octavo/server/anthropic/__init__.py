"""Anthropic's API."""
