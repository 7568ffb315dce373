"""Small unets."""

from __future__ import annotations

from families import Family

UNETS: tuple[Family, ...] = ()
