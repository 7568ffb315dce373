"""Rows of the op table, a module per family of ops."""
