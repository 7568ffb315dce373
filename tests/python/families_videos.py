"""Small videos."""

from __future__ import annotations

from families import Family

VIDEOS: tuple[Family, ...] = ()
