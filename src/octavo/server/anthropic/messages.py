"""Anthropic's messages."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter()
