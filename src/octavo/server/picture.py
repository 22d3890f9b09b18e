"""The picture of the cache."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter()
