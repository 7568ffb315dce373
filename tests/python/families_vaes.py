"""Small vaes."""

from __future__ import annotations

from families import Family

VAES: tuple[Family, ...] = ()
